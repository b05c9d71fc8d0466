"""How the readers of output streams are woken: all at one go, and where they are many, not for every token."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from omnistage.core.types import RequestInfo
from omnistage.pipeline import stream
from omnistage.pipeline.stream import _Readers


class Loop:
    """What `_Readers` needs of an event loop, run by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[Callable[[], None]] = []
        self.later: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_soon_threadsafe(self, function: Callable[[], None]) -> None:
        self.calls.append(function)

    def call_later(self, delay: float, function: Callable[[], None]) -> None:
        self.later.append((delay, function))

    def run(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


def make() -> tuple[Loop, _Readers]:
    loop = Loop()
    return loop, _Readers(loop)  # type: ignore[arg-type]


def test_many_readers_cost_one_call_into_the_loop() -> None:
    loop, readers = make()
    events = [asyncio.Event() for _ in range(64)]
    for event in events:
        readers.wake(event)
    assert len(loop.calls) == 1
    loop.run()
    assert all(event.is_set() for event in events)
    readers.wake(asyncio.Event())
    assert len(loop.calls) == 1


@pytest.mark.parametrize("count", [1, 64])
def test_readers_are_woken_again_after_their_share_of_time(count: int) -> None:
    loop, readers = make()
    for _ in range(count):
        readers.wake(asyncio.Event())
    loop.run()
    again = asyncio.Event()
    readers.wake(again)
    loop.run()
    assert not again.is_set()
    ((delay, wake_all),) = loop.later
    assert delay == pytest.approx(count * stream._SECONDS_A_READER)
    readers.wake(other := asyncio.Event())
    assert not loop.calls
    loop.now += delay
    wake_all()
    assert again.is_set()
    assert other.is_set()
    loop.now += 1.0
    readers.wake(late := asyncio.Event())
    loop.run()
    assert late.is_set()


def test_the_readers_of_requests_that_have_ended_do_not_wait_for_their_share_of_time() -> None:
    loop, readers = make()
    for _ in range(64):
        readers.wake(asyncio.Event())
    loop.run()
    ended = [asyncio.Event() for _ in range(8)]
    readers.wake(running := asyncio.Event())
    for event in ended:
        readers.wake_ended(event)
    assert len(loop.calls) == 2
    loop.run()
    assert all(event.is_set() for event in ended)
    assert not running.is_set()


def test_no_wake_is_lost_between_threads() -> None:
    async def run() -> None:
        readers = _Readers(asyncio.get_running_loop())
        events = [asyncio.Event() for _ in range(2000)]
        threads = [
            threading.Thread(target=lambda part: [readers.wake(e) for e in part], args=(events[i::4],))
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), timeout=30)
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
    readers = _Readers(loop)
    loop.close()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            readers.wake(asyncio.Event())
