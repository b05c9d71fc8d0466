"""What a process boundary costs: a chunk's way between two local processes, and time to first audio on the starter.

    omnistage pull starter
    python benchmarks/placement.py [--model starter] [--pairs 15] [--requests 32] [--pictures 16]

The first table: an input goes to a stage in another process, which sends it back; half of the time for both ways. The
second: requests in pairs, one to the model in one process, one to the same model in processes, in turn; medians of the
pairs' ratios. Then one replica beside two, with `--requests` of the stage that writes and with `--pictures` of the one
that draws: one thread and batches of four each. Two replicas need two cores beside what the service takes: where the
cores that are printed do not double from one replica to two, the machine had none to give.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
from machine_load import load, processor_seconds

from omnistage.core.graph import PipelineGraph
from omnistage.core.params import CodecParams, StageParams
from omnistage.core.stage import Stage, StageStats
from omnistage.core.types import Modality, ModuleInput, ModuleOutput, RequestInfo, StageChunk, StageFeed, StageInput
from omnistage.omni import Omni
from omnistage.pipeline.group_build import GroupParts
from omnistage.pipeline.worker import Worker
from omnistage.placement.group import StageGroup
from omnistage.placement.messages import Start
from omnistage.placement.replicas import Replicas
from omnistage.placement.worker_process import LocalProcess

_BYTES = (0, 1 << 10, 8 << 10, 64 << 10, 1 << 20, 16 << 20)
_RUNNING = 4
"""Requests in a batch of a replica; there must be several times as many."""
_QUESTION = [{"role": "user", "content": "Say in two short sentences what rain is."}]
_GROUPS = {
    "speak in a process": {"voice": "speak"},
    "hear and think, and speak, in processes": {"mind": "hear, think", "voice": "speak"},
}


class Echo(Stage):
    """Gives back what it is fed."""

    name = "echo"
    params_type: type[StageParams] = CodecParams
    uses_torch = False

    def __init__(self) -> None:
        self._fed: list[StageChunk] = []

    def check(self, stage_input: StageInput) -> None:
        pass

    def submit(self, stage_input: StageInput) -> None:
        pass

    def feed(self, request_id: str, feed: StageFeed) -> None:
        if isinstance(feed, ModuleInput):
            self._fed.append(StageChunk(request_id, "echo", ModuleOutput(feed.arrays)))

    def abort(self, request_id: str) -> None:
        pass

    def has_work(self) -> bool:
        return bool(self._fed)

    def step(self) -> list[StageChunk]:
        chunks, self._fed = self._fed, []
        return chunks

    def stats(self) -> StageStats:
        return StageStats()


class EchoWorker(Worker):
    def _build(self, message: Start) -> GroupParts:
        return GroupParts(PipelineGraph.build({"echo": Modality.AUDIO}), {"echo": Echo()}, {}, None)


def hop_times(repeats: int) -> dict[int, float]:
    """By bytes of an array: the median seconds of one way between two processes, thread to thread."""
    start = Start("{}", ("echo",), None, None, 0.5, 30)
    host = partial(LocalProcess, (__file__, "--worker"))
    replicas = Replicas("echo", [start], hang_seconds=60.0, max_restarts=0, host=host)
    group = StageGroup("echo", {"echo": CodecParams}, replicas)
    replicas.spawn()
    group.start()
    proxy, arrived = group.stages["echo"], threading.Event()
    proxy.wake = arrived.set
    proxy.submit(StageInput(RequestInfo("r"), CodecParams(), ModuleInput(final=False)))
    results = {}
    for size in _BYTES:
        feed = ModuleInput({"x": np.ones(size, np.uint8)} if size else {}, final=False)
        times = []
        for _ in range(repeats if size < 1 << 20 else repeats // 10):
            arrived.clear()
            begin = time.perf_counter()
            proxy.feed("r", feed)
            arrived.wait()
            (chunk,) = proxy.step()
            times.append((time.perf_counter() - begin) / 2)
            if (
                not isinstance(chunk.payload, ModuleOutput)
                or sum(a.nbytes for a in chunk.payload.arrays.values()) != size
            ):
                raise SystemExit("what came back is not what was sent")
        results[size] = statistics.median(times)
    proxy.close()
    return results


def first_audio(omni: Omni) -> tuple[float, bytes]:
    """Seconds to the first sound, and all of it."""
    begin, first, sound = time.perf_counter(), 0.0, []
    for item in omni.stream_chat(_QUESTION, {"think": {"max_tokens": 48}}, modalities=["text", "audio"]):
        if item.audio is not None and len(item.audio.samples):
            first = first or time.perf_counter() - begin
            sound.append(item.audio.samples.tobytes())
    return first, b"".join(sound)


def compare(model: str, pairs: int) -> None:
    for name, groups in _GROUPS.items():
        overrides = [f"deployment.placement.{group}.stages=[{stages}]" for group, stages in groups.items()]
        with Omni(model, progress=False) as inline, Omni(model, overrides=overrides, progress=False) as placed:
            times: dict[str, list[float]] = {"inline": [], "placed": []}
            for pair in range(pairs + 2):  # the first two are warm-ups
                both = [("inline", inline), ("placed", placed)]
                results = {side: first_audio(omni) for side, omni in both[:: 1 if pair % 2 else -1]}
                if results["inline"][1] != results["placed"][1]:
                    raise SystemExit("the two sides do not sound the same")
                for side, (seconds, _) in results.items():
                    times[side].append(seconds)
        one, other = times["inline"][2:], times["placed"][2:]
        ratio = statistics.median(b / a for a, b in zip(one, other, strict=True))
        medians = f"{statistics.median(one) * 1e3:.0f} → {statistics.median(other) * 1e3:.0f} ms"
        print(f"{name}: time to first audio {medians}, {ratio:.3f} of inline; the same sound in {pairs + 2} pairs")


def rate(omni: Omni, kind: str, requests: int, replicas: int) -> tuple[float, float, float]:
    """Requests a second, all sent at once; of how many cores the service and all replicas took the time."""
    modalities = ["text"] if kind == "think" else ["image"]
    params = {"think": {"max_tokens": 24}}
    omni.generate(["Hello"] * 2 * replicas, params, modalities=modalities, progress=False)
    prompts = [f"Count to {number}." for number in range(requests)]
    pids = [replica.pid for replica in omni.replicas() if replica.pid is not None]
    begin, work = time.perf_counter(), [processor_seconds(pid) for pid in (os.getpid(), *pids)]
    omni.generate(prompts, params, modalities=modalities, progress=False)
    seconds = time.perf_counter() - begin
    cores = [
        (processor_seconds(pid) - before) / seconds for pid, before in zip((os.getpid(), *pids), work, strict=True)
    ]
    return requests / seconds, cores[0], sum(cores[1:])


def compare_replicas(model: str, kind: str, requests: int) -> None:
    """Print the throughput with the bottleneck in one and in two processes of one thread each, in turn.

    A process has the same batch either way: a batch of half the size would not take half the time.
    """
    runs: dict[int, list[tuple[float, float, float]]] = {1: [], 2: []}
    for replicas in (1, 2, 2, 1, 1, 2):
        stages = "draw,paint" if kind == "draw" else kind
        keys = {"stages": f"[{stages}]", "replicas": replicas, "torch_threads": 1}
        overrides = [f"deployment.placement.g.{key}={value}" for key, value in keys.items()]
        with Omni(model, overrides=(*overrides, f"{kind}.max_running={_RUNNING}"), progress=False) as omni:
            runs[replicas].append(rate(omni, kind, requests, replicas))
    one, two = (statistics.median(run[0] for run in runs[replicas]) for replicas in (1, 2))
    print(f"{kind} in one process {one:.2f} requests/s, in two {two:.2f}: {two / one:.2f} times (medians of three)")
    for replicas, each in runs.items():
        service, rest = (statistics.median(run[which] for run in each) for which in (1, 2))
        print(f"  {replicas}: the service took {service:.2f} cores, the replicas together {rest:.2f}")


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        EchoWorker(socket.socket(fileno=int(sys.argv[2]))).run()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--requests", type=int, default=0, help="to compare one replica of think with two")
    parser.add_argument("--pictures", type=int, default=0, help="to compare one replica of draw with two")
    parser.add_argument("--repeats", type=int, default=1000, help="of a chunk's way; 0: none")
    options = parser.parse_args()
    print(f"load of the machine: {load()}")
    for size, seconds in hop_times(options.repeats).items() if options.repeats else ():
        print(f"{size:>10,} bytes: {seconds * 1e3:.3f} ms a chunk")
    if options.pairs:
        compare(options.model if options.model == "starter" else str(Path(options.model)), options.pairs)
    for kind, requests in (("think", options.requests), ("draw", options.pictures)):
        if requests:
            compare_replicas(options.model, kind, requests)
    print(f"load of the machine: {load()}")


if __name__ == "__main__":
    main()
