"""How the readers of output streams are woken: all at one go, and where they are many, not for every token."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest

from omnistage.core.types import Modality, RequestInfo
from omnistage.pipeline import stream
from omnistage.pipeline.event_loop import LoopCalls
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk
from tests.hang_guard import HANG_SECONDS


class Loop:
    """What `LoopCalls` needs of an event loop, run by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[Callable[[], None]] = []
        self.later: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_soon_threadsafe(self, function: Callable[..., None], *args: object) -> None:
        self.calls.append(partial(function, *args))

    def call_later(self, delay: float, function: Callable[..., None], *args: object) -> None:
        self.later.append((delay, partial(function, *args)))

    def run(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


def make() -> tuple[Loop, Callable[[asyncio.Event], None]]:
    """A loop, and what wakes a reader in it."""
    loop, calls = Loop(), LoopCalls(stream._SECONDS_A_READER)
    return loop, lambda event: calls.add(loop, event.set)  # type: ignore[arg-type]


def test_many_readers_cost_one_call_into_the_loop() -> None:
    loop, wake = make()
    events = [asyncio.Event() for _ in range(64)]
    for event in events:
        wake(event)
    assert len(loop.calls) == 1
    loop.run()
    assert all(event.is_set() for event in events)
    wake(asyncio.Event())
    assert len(loop.calls) == 1


@pytest.mark.parametrize("count", [1, 64])
def test_readers_are_woken_again_after_their_share_of_time(count: int) -> None:
    loop, wake = make()
    for _ in range(count):
        wake(asyncio.Event())
    loop.run()
    again = asyncio.Event()
    wake(again)
    loop.run()
    assert not again.is_set()
    ((delay, wake_all),) = loop.later
    assert delay == pytest.approx(count * stream._SECONDS_A_READER)
    wake(other := asyncio.Event())
    assert not loop.calls
    loop.now += delay
    wake_all()
    assert again.is_set()
    assert other.is_set()
    loop.now += 1.0
    wake(late := asyncio.Event())
    loop.run()
    assert late.is_set()


def test_the_end_of_a_request_wakes_its_reader_without_a_pause() -> None:
    class Door:
        def start(self, plan: object, sink: Callable[[OutputChunk], None]) -> SimpleNamespace:
            sink(OutputChunk("a", Modality.TEXT, final=OmniRequestOutput("a")))
            return SimpleNamespace(trace=None)

    async def run() -> None:
        ended = stream.OutputStream(Door(), "a", 4)  # type: ignore[arg-type]
        stream._readers[asyncio.get_running_loop()]._not_before = math.inf
        ended.begin(SimpleNamespace())  # type: ignore[arg-type]
        assert [item.final is not None for item in await asyncio.wait_for(ended.take(), HANG_SECONDS)] == [True]

    asyncio.run(run())


def test_no_wake_is_lost_between_threads() -> None:
    async def run() -> None:
        readers, loop = LoopCalls(stream._SECONDS_A_READER), asyncio.get_running_loop()
        events = [asyncio.Event() for _ in range(2000)]
        threads = [
            threading.Thread(target=lambda part: [readers.add(loop, e.set) for e in part], args=(events[i::4],))
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), timeout=HANG_SECONDS)
        for thread in threads:
            thread.join()

    asyncio.run(run())


def test_an_event_loop_that_is_closed_is_not_kept() -> None:
    class Door:
        """An orchestrator that starts nothing."""

        def start(self, plan: object, sink: object) -> SimpleNamespace:
            return SimpleNamespace(trace=None)

    async def open_stream() -> weakref.ref[asyncio.AbstractEventLoop]:
        plan = SimpleNamespace(request=SimpleNamespace(info=RequestInfo("a")))
        stream.OutputStream(Door(), "a", 4).begin(plan)  # type: ignore[arg-type]
        return weakref.ref(asyncio.get_running_loop())

    loops = [asyncio.run(open_stream()) for _ in range(3)]
    gc.collect()
    assert [loop() for loop in loops] == [None] * 3


def test_every_reader_of_a_closed_loop_is_told() -> None:
    """A request whose reader is gone ends with this error instead of running on."""
    loop = asyncio.new_event_loop()
    readers = LoopCalls()
    loop.close()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            readers.add(loop, asyncio.Event().set)
