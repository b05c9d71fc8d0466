"""A pipeline of scripted stages some of which run in processes of their own, which tests kill and stop."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from omnistage.core.params import CodecParams, SamplingParams
from omnistage.core.types import ARInput, FinishReason, RequestInfo
from omnistage.pipeline.links import links_within
from omnistage.pipeline.orchestrator import Orchestrator
from omnistage.pipeline.outputs import OmniRequestOutput
from omnistage.pipeline.request import OmniRequest
from omnistage.placement.fork_server import ForkServer
from omnistage.placement.group import StageGroup
from omnistage.placement.messages import Start
from omnistage.placement.replicas import Replicas, ReplicaStats
from omnistage.placement.worker_process import LocalProcess
from tests.hang_guard import HANG_SECONDS
from tests.unit.fakes import AUDIO, TEXT, FakeStage, Recorder, linear, stream_into
from tests.unit.placement_worker import LOADING, real_rows

PARAMS = {"thinker": SamplingParams, "talker": SamplingParams, "vocoder": CodecParams}


def eventually(condition: Callable[[], bool], seconds: float = HANG_SECONDS) -> None:
    """Wait for something that another thread or process brings about."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("it did not come about")
        time.sleep(0.01)


class PlacedPipeline:
    """thinker → talker → vocoder, of which the last two run in `replicas` processes."""

    def __init__(
        self,
        folder: Path,
        *,
        replicas: int = 1,
        hang_seconds: float = 30.0,
        max_restarts: int = 100,
        standby: bool = False,
    ) -> None:
        graph, stages = linear(), ("talker", "vocoder")
        self._hold = folder / "hold"
        start = Start("{}", tuple(stages), None, None, hang_seconds / 4, 30)
        command = ("tests.unit.placement_worker", str(self._hold))
        processes = Replicas(
            "voice",
            [start] * replicas,
            hang_seconds=hang_seconds,
            max_restarts=max_restarts,
            host=partial(LocalProcess, ("-m", *command)),
            fork_server=partial(ForkServer, command=command) if standby else None,
        )
        self.group = StageGroup("voice", {name: PARAMS[name] for name in stages}, processes)
        self.group._numbers = itertools.count(1000)  # past the small integers of which Python has one each
        processes.spawn()
        self.group.start()
        self.local = {name: FakeStage(name) for name in graph.order if name not in stages}
        self.bridges_called: list[str] = []
        bridges = {"talker": real_rows(stream_into()), "vocoder": stream_into(audio=True)}
        self.orchestrator = Orchestrator(
            graph,
            {**self.local, **self.group.stages},
            {name: self._noting(name, bridge) for name, bridge in bridges.items()},
            {},
            max_inflight=10_000,
            links=links_within(graph, stages),
        )

    def _noting(self, name, bridge):  # type: ignore[no-untyped-def]
        def call(*args):  # type: ignore[no-untyped-def]
            self.bridges_called.append(name)
            return bridge(*args)

        return call

    def __enter__(self) -> PlacedPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.orchestrator.shutdown(drain=False)

    @contextmanager
    def held(self) -> Iterator[None]:
        """No step of the processes ends inside the block."""
        with _existing(self._hold):
            yield

    @contextmanager
    def loading(self) -> Iterator[None]:
        """No process that is started inside the block has its stages before the end of it."""
        with _existing(self._hold.with_suffix(LOADING)):
            yield

    def submit(self, request_id: str = "r", tokens: int = 3) -> Recorder:
        sink = Recorder()
        info = RequestInfo(request_id, frozenset({TEXT, AUDIO}))
        self.orchestrator.submit(OmniRequest(info, ARInput((tokens,))), sink)
        return sink

    def replicas(self) -> list[ReplicaStats]:
        return self.group.replicas()

    def signal(self, number: int, which: int = signal.SIGKILL) -> None:
        pid = self.replicas()[number].pid
        assert pid is not None
        os.kill(pid, which)

    def running(self) -> list[int]:
        return [replica.running for replica in self.replicas()]

    def all_up(self) -> bool:
        """All processes run, and the stages' loops have noticed."""
        health = self.orchestrator.stats().health
        return all(replica.pid is not None for replica in self.replicas()) and all(
            health[name].available for name in self.group.stages
        )


@contextmanager
def _existing(file: Path) -> Iterator[None]:
    file.touch()
    try:
        yield
    finally:
        file.unlink()


def assert_whole(output: OmniRequestOutput, tokens: int) -> None:
    """Exactly what a request of so many tokens gives: nothing is missing, doubled, or another request's."""
    assert output.finish_reason is FinishReason.STOP, output.error
    assert output.token_ids == list(range(tokens))
    assert output.audio is not None
    expected = np.repeat(np.arange(tokens, dtype=np.float32), 10)
    np.testing.assert_array_equal(output.audio.samples, expected)
