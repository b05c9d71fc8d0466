"""Requests to a model in processes while these are killed, stopped and cut off: what becomes of every one of them.

    python benchmarks/chaos.py [--requests 1000] [--faults 50] [--rounds 1] [--replicas 2] [--kinds "cut off"]

A small random Qwen2.5-Omni; its talker and vocoder run in processes. Every request must end exactly once, soon after
the fault, with an error that says what happened or with the output that it has alone in one process: the same tokens,
and samples that differ by rounding only, as they do with the company in a batch. Nothing may be left behind: what the
service holds is counted at the start, after requests without a fault, and after each round of faults, so that what
grows with the faults can be told from what it takes to serve at all.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import random
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from machine_load import load, processor_seconds
from side_process import own_memory

from omnistage.core.errors import StageUnavailableError
from omnistage.core.memory import resident_memory, trim_heap
from omnistage.core.params import CodecParams, SamplingParams, StageParams
from omnistage.core.types import FinishReason
from omnistage.models.registry import REGISTRY
from omnistage.omni import AsyncOmni
from omnistage.pipeline.outputs import OmniRequestOutput

_PROMPTS = [f"Tell me about number {number}." for number in range(8)]
_FAULTS = ("killed", "stopped", "cut off")
_PARAMS: dict[str, StageParams] = {
    "thinker": SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    "talker": SamplingParams(temperature=0.0, max_tokens=40, min_tokens=40),
    "token2wav": CodecParams(seed=3, num_steps=2),
}
_ROUNDING = 1e-5
_TIMEOUT = 120.0
Content = tuple[tuple[int, ...], np.ndarray]
_POOLS = ("thinker.kv_blocks=256", "talker.kv_blocks=256")


class Chaos:
    def __init__(self, omni: AsyncOmni, expected: dict[str, Content], options: argparse.Namespace) -> None:
        self._omni = omni
        self._expected = expected
        self._options = options
        self._replicas = omni._groups[0]._replicas
        self._chance = random.Random(options.seed)
        self._fault_at, self._faults, self._kind = float("-inf"), 0, ""
        self.ends: Counter[str] = Counter()
        self.problems: list[str] = []
        self.delays: defaultdict[str, list[float]] = defaultdict(list)
        """By the kind of fault: seconds until the end of each request that it ended."""
        self.recoveries: list[float] = []
        """Seconds from a fault until all processes are up again."""
        self.starts: list[float] = []
        """Seconds of the restarts alone, from the moment at which a process is to be started again."""
        self.work: list[float] = []
        """Processor seconds that each restarted process had taken when it was ready."""

    async def run(self, requests: int, faults: int) -> None:
        """So many of both, and as many more requests as there are until the last fault."""
        attacker = asyncio.create_task(self._attack(faults))
        numbers = itertools.count()
        while not (attacker.done() and next(numbers) >= requests):
            async with asyncio.TaskGroup() as group:  # rounds, until there were enough requests and faults
                for _ in range(self._options.concurrency):
                    group.create_task(self._request(self._chance.choice(_PROMPTS)))
                    next(numbers)
        await attacker

    async def _request(self, prompt: str) -> None:
        finals = []
        try:
            async for item in self._omni.generate(prompt, _PARAMS, modalities=["text", "audio"], timeout=_TIMEOUT):
                if item.final is not None:
                    finals.append(item.final)
        except StageUnavailableError:
            self.ends["refused with 503"] += 1
            await asyncio.sleep(0.05)
            return
        if len(finals) != 1:
            self.problems.append(f"a request ended {len(finals)} times")
            return
        self._judge(prompt, finals[0])

    def _judge(self, prompt: str, output: OmniRequestOutput) -> None:
        if output.finish_reason is FinishReason.DEADLINE:
            self.problems.append(f"a request had not ended after {_TIMEOUT:g} s")
        elif output.error is None:
            tokens, samples = content(output)
            same = tokens == self._expected[prompt][0] and samples.shape == self._expected[prompt][1].shape
            same = same and bool(np.abs(samples - self._expected[prompt][1]).max() < _ROUNDING)
            self.ends["as in one process" if same else "with another output"] += 1
            if not same:
                self.problems.append(f"another output ({output.finish_reason})")
        elif isinstance(output.error, StageUnavailableError):
            self.ends["with its process"] += 1
            if sum(replica.failures for replica in self._omni.replicas()) > self._faults:
                self.problems.append("a process was lost without a fault")
            self.delays[self._kind].append(time.monotonic() - self._fault_at)
        else:
            self.problems.append(f"{type(output.error).__name__}: {output.error}")

    def time_starts(self) -> None:
        replicas, restart = self._replicas, self._replicas._restart

        def timed(replica: Any) -> None:
            begin = time.monotonic()
            restart(replica)
            self.starts.append(time.monotonic() - begin)
            if (worker := replica.worker) is not None:
                self.work.append(processor_seconds(worker.host.pid))

        replicas._restart = timed  # type: ignore[method-assign]

    async def _attack(self, faults: int) -> None:
        while self._options.standby and ((server := self._replicas._fork_server) is None or not server.ready):
            await asyncio.sleep(0.1)
        for number in range(faults):
            await asyncio.sleep(self._chance.uniform(0.2, 2.0 * self._options.pause))
            replicas = self._omni.replicas()
            target = self._chance.choice(replicas)
            self._fault_at, self._faults = time.monotonic(), self._faults + 1
            if target.pid is None:
                raise RuntimeError("a process is down before its fault")
            self._kind = kind = self._options.kinds[number % len(self._options.kinds)]
            if kind == "cut off":
                workers = self._replicas.workers()
                next(w for w in workers if w.host.pid == target.pid).host.socket.shutdown(socket.SHUT_RDWR)
            else:
                os.kill(target.pid, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
            while target.pid in (pids := [replica.pid for replica in self._omni.replicas()]) or None in pids:
                await asyncio.sleep(0.05)
                if time.monotonic() - self._fault_at > 120.0:
                    raise RuntimeError(f"a process that was {kind} has not come back")
            self.recoveries.append(time.monotonic() - self._fault_at)


def content(output: OmniRequestOutput) -> Content:
    return tuple(output.token_ids), np.zeros(0, np.float32) if output.audio is None else output.audio.samples


def held() -> dict[str, int]:
    """What this process has open and takes; the files in memory are among its files."""
    gc.collect()
    trim_heap()  # what the allocator keeps of freed memory is not held by anyone
    return {
        "files": _entries("/dev/fd"),
        "segments": _entries("/dev/shm"),
        "threads": threading.active_count(),
        "objects": len(gc.get_objects()),
        "MiB": (resident_memory() or 0) >> 20,
        "MiB of its own": own_memory() >> 20,
    }


def _entries(folder: str) -> int:
    """Of this user in a folder; none where the system has no such folder."""
    try:
        return sum(1 for entry in os.scandir(folder) if entry.stat(follow_symlinks=False).st_uid == os.getuid())
    except FileNotFoundError:
        return 0


async def count_idle(omni: AsyncOmni, when: str) -> None:
    """Print what is held while there is no request."""
    omni.orchestrator.check_idle()
    await asyncio.sleep(1.0)
    print(f"  {when}: {', '.join(f'{count} {name}' for name, count in held().items())}", flush=True)


def spread(values: list[float], unit: str = "s") -> str:
    return f"median {statistics.median(values):.2f} {unit}, longest {max(values):.2f} {unit}" if values else "none"


def overrides_of(options: argparse.Namespace) -> tuple[str, ...]:
    group = {
        "stages": "[talker, token2wav]",
        "replicas": options.replicas,
        "max_restarts": options.rounds * options.faults + 5,
        "standby": str(options.standby).lower(),
    }
    return (*_POOLS, *(f"deployment.placement.voice.{key}={value}" for key, value in group.items()))


async def compare(folder: Path, options: argparse.Namespace) -> int:
    expected = {}
    arguments = {"device": "cpu", "dtype": "float32", "progress": False}
    async with AsyncOmni(folder, overrides=_POOLS, **arguments) as omni:  # type: ignore[arg-type]
        for prompt in _PROMPTS:
            async for item in omni.generate(prompt, _PARAMS, modalities=["text", "audio"]):
                if item.final is not None:
                    expected[prompt] = content(item.final)
    async with AsyncOmni(folder, overrides=overrides_of(options), **arguments) as omni:  # type: ignore[arg-type]
        chaos, begin = Chaos(omni, expected, options), time.monotonic()
        await count_idle(omni, "at the start")
        chaos.time_starts()
        await chaos.run(options.warm_up, 0)
        await count_idle(omni, f"after {sum(chaos.ends.values())} requests")
        for number in range(1, options.rounds + 1):
            await chaos.run(options.requests, options.faults)
            await count_idle(omni, f"after {sum(chaos.ends.values())} requests and {number * options.faults} faults")
    faults, seconds = options.rounds * options.faults, time.monotonic() - begin
    print(f"{sum(chaos.ends.values())} requests in {seconds:.0f} s, {faults} faults")
    for what, count in sorted(chaos.ends.items()):
        print(f"  {count:5} ended {what}")
    for kind, delays in chaos.delays.items():
        print(f"  {len(delays):5} requests of processes that were {kind}: from the fault to their end {spread(delays)}")
    print(f"  from a fault until all processes take requests: {spread(chaos.recoveries)}")
    print(f"  from a restart until its process takes requests: {spread(chaos.starts)}")
    print(f"  processor time of a process until it takes requests: {spread(chaos.work)}")
    for problem, count in Counter(chaos.problems).most_common(10):
        print(f"PROBLEM, {count} times: {problem}")
    return 1 if chaos.problems else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=1, help="of so many requests and faults each")
    parser.add_argument("--warm-up", type=int, default=200, help="requests before the first fault")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--standby", action="store_true", help="fork lost processes from one that has imported all")
    parser.add_argument("--kinds", nargs="+", choices=_FAULTS, default=_FAULTS, help="of faults, in turn")
    parser.add_argument("--pause", type=float, default=0.4, help="mean seconds between two faults, once all are up")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"load of the machine: {load()}")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        tiny = REGISTRY.family("qwen2_5_omni").tiny
        if tiny is None:
            raise SystemExit("the family has no small checkpoint")
        tiny(model, seed=7)
        code = asyncio.run(compare(model, options))
    print(f"load of the machine: {load()}")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
