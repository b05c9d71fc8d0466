"""A side of `starter_language_model.py` in a separate process that is controlled over its standard streams.

Each side has its own process because OpenMP's threads of one process get in each other's way: two threads that compute
by turns in one process are both slower than either is alone. And vLLM needs an environment of its own: this file needs
nothing but Python.

A line of the child's input is a JSON object with `prompts` (lists of token ids), `tokens`, `side` and `penalty` (for
repetitions); a line of its answer one with `seconds`, `processor` (its seconds too), `memory` and `tokens` (the ids
that were generated). Its first line says which versions run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Ids = list[int]
Generate = Callable[[Sequence[Ids], int, str, float], list[Ids]]
"""Generates this many new tokens for every prompt; the name selects the method, the last is the repetition penalty."""


@dataclass(frozen=True, slots=True)
class Done:
    """All prompts of a call completed."""

    seconds: float
    processor: float
    """Seconds of the processor, all threads together."""
    tokens: list[Ids]
    """New ones, of each prompt."""
    memory: int = 0
    """Bytes that the process holds without what is mapped from files, afterwards."""


def clocked(function: Callable[[], list[Ids]]) -> Done:
    start, busy = time.perf_counter(), time.process_time()
    tokens = function()
    return Done(time.perf_counter() - start, time.process_time() - busy, tokens, own_memory())


def own_memory() -> int:
    """Bytes of this process's own memory (RssAnon); 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def answer(prepare: Callable[[], tuple[dict[str, Any], Generate]]) -> None:
    """The child's part: `prepare` loads the model and gives the versions and what generates."""
    # What libraries print belongs to the standard error; the standard output carries answers alone.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    versions, generate = prepare()
    say(versions)
    for line in sys.stdin:
        asked = json.loads(line)
        given = (asked["prompts"], asked["tokens"], asked["side"], asked["penalty"])
        done = clocked(lambda given=given: generate(*given))  # type: ignore[misc]
        say(asdict(done))


class Side:
    """The parent's part."""

    def __init__(self, python: Path, script: str, folder: Path, extra: Mapping[str, str], log: Path | None) -> None:
        self.script = script
        self._log = (log or Path(os.devnull)).open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name(script)), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **extra},
        )
        self.versions = self._read()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise SystemExit(f"{self.script} ended without a result; --log FILE keeps its output")
        found = json.loads(line)
        if not isinstance(found, dict):
            raise SystemExit(f"{self.script} sent {line!r}")
        return found

    def run(self, tokens: int, side: str, penalty: float = 1.0) -> Callable[[Sequence[Ids]], Done]:
        def run(prompts: Sequence[Ids]) -> Done:
            if self._process.stdin is None:
                raise SystemExit(f"{self.script} has no input")
            asked = {"prompts": list(prompts), "tokens": tokens, "side": side, "penalty": penalty}
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            return Done(**self._read())

        return run

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        self._log.close()
