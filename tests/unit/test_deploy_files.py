"""The files under deploy/ hold together: known instructions, files and options that exist, times that fit."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from omnistage.cli import app
from omnistage.config import OmniEngineArgs
from omnistage.server.http.stopping import STOP_SECONDS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
INSTRUCTIONS = {
    *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN", "SHELL"),
    *("STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
}


def serve_options() -> set[str]:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return {option for parameter in command.params for option in parameter.opts}


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


# -------------------------------------------------------------------------------------------------- container


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Containerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def test_the_containerfile_has_known_instructions_and_its_sources_exist() -> None:
    stages: list[str] = []
    for name, rest in instructions():
        assert name in INSTRUCTIONS, name
        if name == "FROM":
            stages.append(rest.rpartition(" AS ")[2])
        if name in ("CMD", "ENTRYPOINT", "VOLUME"):
            assert all(isinstance(word, str) for word in json.loads(rest))
        if name == "COPY":
            words = shlex.split(rest)
            flags = [word for word in words if word.startswith("--")]
            sources = [word for word in words if not word.startswith("--")][:-1]
            for flag in flags:
                assert flag.removeprefix("--from=") in stages
            if not flags:
                assert all((ROOT / source).exists() for source in sources), sources
    assert stages == ["build", "cpu", "cuda", "cuda-ray"]


def test_every_stage_that_runs_is_nobodys_root_and_says_when_it_is_ready() -> None:
    found = instructions()
    users = [rest for name, rest in found if name == "USER"]
    assert users == ["10001:10001", *["root", "10001:10001"] * 2]
    (check,) = [rest for name, rest in found if name == "HEALTHCHECK"]
    assert "/ready" in check
    assert json.loads(check.partition("CMD ")[2])[0] == "python"
    (entry,) = [json.loads(rest) for name, rest in found if name == "ENTRYPOINT"]
    (default,) = [json.loads(rest) for name, rest in found if name == "CMD"]
    assert {word for word in [*entry, *default] if word.startswith("--")} <= serve_options()


def test_the_containers_torch_is_the_one_that_is_checked() -> None:
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert ("ARG", f"TORCH={pinned}") in instructions()


def test_the_containers_extras_exist() -> None:
    import tomllib

    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (extras,) = [rest.removeprefix("EXTRAS=") for name, rest in instructions() if rest.startswith("EXTRAS=")]
    assert set(extras.split(",")) <= set(known)


def test_what_is_copied_is_not_ignored() -> None:
    kept = (DEPLOY / "Containerfile.dockerignore").read_text(encoding="utf-8").split()
    copied = [shlex.split(rest)[:-1] for name, rest in instructions() if name == "COPY" and "--from" not in rest]
    assert {f"!{source}" for sources in copied for source in sources} <= set(kept)


# ---------------------------------------------------------------------------------------- compose, Kubernetes


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|m|h|)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"s": 1, "m": 60, "h": 3600, "": 1}[unit]


def test_compose_leaves_time_to_drain_and_gives_nothing_away() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    targets = {rest.rpartition(" AS ")[2] for name, rest in instructions() if name == "FROM"}
    for service in services.values():
        build = service["build"]
        assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Containerfile"
        assert build["target"] in targets
        drain = float(option(service["command"], "--drain-seconds"))
        assert seconds(service["stop_grace_period"]) > drain + STOP_SECONDS
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["ports"] == ["127.0.0.1:8000:8000"]
        assert {word for word in service["command"] if word.startswith("--")} <= serve_options()


def test_kubernetes_asks_the_right_doors_and_waits_long_enough() -> None:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    doors = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert doors == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    paused = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = float(option(container["args"], "--drain-seconds"))
    assert pod["terminationGracePeriodSeconds"] > paused + drain + STOP_SECONDS
    assert {word for word in container["args"] if word.startswith("--")} <= serve_options()
    users = {rest for name, rest in instructions() if name == "USER"} - {"root"}
    assert users == {f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]


# ---------------------------------------------------------------------------------------------------- systemd


def unit(name: str) -> dict[str, list[str]]:
    """A unit's settings by key; a key may come more than once."""
    text = re.sub(r"\\\n\s*", "", (DEPLOY / name).read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_the_unit_leaves_time_to_drain_and_its_options_exist() -> None:
    found = unit("omnistage.service")
    (started,) = found["ExecStart"]
    words = shlex.split(started)
    assert {word for word in words if word.startswith("--")} <= serve_options()
    assert float(found["TimeoutStopSec"][0]) > float(option(words, "--drain-seconds")) + STOP_SECONDS
    assert found["KillSignal"] == ["SIGTERM"]
    (waiting,) = found["ExecStartPost"]
    assert f"http://127.0.0.1:{option(words, '--port')}/ready" in waiting
    assert found["DynamicUser"] == ["yes"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", ["omnistage.service", "omnistage-cuda.conf"])
def test_systemd_understands_every_line(name: str, tmp_path: Path) -> None:
    # The program itself is not installed there.
    text = (DEPLOY / "omnistage.service").read_text(encoding="utf-8")
    text = re.sub(r"^(ExecStart|ExecStartPost)=\S+", r"\1=/bin/true", text, flags=re.MULTILINE)
    if name != "omnistage.service":
        text = text.replace("[Install]", (DEPLOY / name).read_text(encoding="utf-8") + "\n[Install]")
    file = tmp_path / "omnistage.service"
    file.write_text(text, encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True, timeout=60)
    about_us = [line for line in done.stderr.splitlines() if "omnistage" in line]
    assert (done.returncode, about_us) == (0, []), done.stderr


# -------------------------------------------------------------------------------------------------- the page


def test_options_and_files_on_the_page_exist() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    blocks: list[Any] = re.findall(r"omnistage serve[^\n`]*", page)
    named = {word for block in blocks for word in re.findall(r"(?<![\w-])--[a-z][a-z-]+", block)}
    inline = set(re.findall(r"`(--[a-z][a-z-]+)[^`]*`", page))
    of_the_container_engine = {"--target", "--build-arg", "--read-only"}
    assert (named | inline) - serve_options() - of_the_container_engine == set()
    for file in DEPLOY.iterdir():
        assert file.name in page, f"deploy/{file.name} is not on the page"


# ------------------------------------------------------------------------------------------------- autoscaling


def test_the_autoscaler_reads_metrics_that_exist_and_scales_the_deployment_that_exists() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")))
    names = {document["metadata"]["name"] for document in documents if document["kind"] == "Deployment"}
    scaled = yaml.safe_load((DEPLOY / "keda.yaml").read_text(encoding="utf-8"))["spec"]
    assert scaled["scaleTargetRef"]["name"] in names
    assert 1 <= scaled["minReplicaCount"] <= scaled["fallback"]["replicas"] <= scaled["maxReplicaCount"]
    documented = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    for trigger in scaled["triggers"]:
        (metric,) = re.findall(r"omnistage_\w+", trigger["metadata"]["query"])
        assert f"`{metric}`" in documented
        assert float(trigger["metadata"]["threshold"]) > 0


def test_the_service_on_kuberay_has_options_that_exist_and_finds_its_head() -> None:
    job, service = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text(encoding="utf-8"))
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:2] == ["omnistage", "serve"]
    assert {word for word in words if word.startswith("--")} <= serve_options()
    cluster = job["spec"]["rayClusterSpec"]
    head = cluster["headGroupSpec"]["template"]
    assert service["spec"]["selector"].items() <= head["metadata"]["labels"].items()
    (container,) = head["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports.pop("http") == int(option(words, "--port"))
    # The operator's own names: a list of ports replaces its defaults, and it submits the job to `dashboard`.
    assert ports == {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
    versions = {rest.partition("=")[2] for name, rest in instructions() if name == "ARG" and rest.startswith("RAY=")}
    assert versions == {cluster["rayVersion"]}
    targets = {rest.rpartition(" AS ")[2] for name, rest in instructions() if name == "FROM"}
    templates = [head, *(group["template"] for group in cluster["workerGroupSpecs"])]
    assert {each["spec"]["containers"][0]["image"].partition(":")[2] for each in templates} <= targets
    settings = OmniEngineArgs(model="m", overrides=tuple(b for a, b in pairwise(words) if a == "--set"), ray="auto")
    replicas = {text.rpartition("=")[2] for text in settings.overrides if ".replicas=" in text}
    assert replicas == {str(sum(group["replicas"] for group in cluster["workerGroupSpecs"]))}
    # The head's GPU is the service's: Ray would take it for free.
    assert cluster["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
