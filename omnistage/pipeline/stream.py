"""The output of one running request, as a stream for one reader in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from weakref import WeakKeyDictionary

from omnistage.pipeline.event_loop import LoopCalls, call_soon
from omnistage.pipeline.orchestrator import Orchestrator
from omnistage.pipeline.output_assembler import OutputBuffer
from omnistage.pipeline.outputs import OutputChunk, Trace
from omnistage.pipeline.request import RequestPlan, RequestRun

_SECONDS_A_READER = 0.00025
"""Readers are woken again after so long for each of the last ones: where there are many, a write has several tokens.
Nobody sees pauses that are this short."""
_readers: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopCalls] = WeakKeyDictionary()


class OutputStream(AsyncIterator[OutputChunk]):
    """The items of one running request, for one reader. Closing it aborts the request if it still runs."""

    trace: Trace
    """What ran when; the stages still change it."""
    _items: Iterator[OutputChunk] = iter(())
    """Items that were taken and not read yet."""

    def __init__(self, orchestrator: Orchestrator, request_id: str, limit: int) -> None:
        self.request_id = request_id
        self._ready = asyncio.Event()
        self._at_end = False
        # Not through a method of its own: in a cycle, the request's media would live on until the next collection.
        loop = asyncio.get_running_loop()
        if (readers := _readers.get(loop)) is None:
            readers = _readers[loop] = LoopCalls(_SECONDS_A_READER)
        # At its end without a pause: its client may send another request.
        wakes = partial(readers.add, loop, self._ready.set), partial(call_soon, loop, self._ready.set)
        self._buffer = OutputBuffer(limit, *wakes)
        self._orchestrator = orchestrator
        self._run: RequestRun | None = None

    def begin(self, plan: RequestPlan, admitted: Callable[[], None] | None = None) -> None:
        """Admit the request, then call `admitted`. May be called from any thread."""
        self._run = self._orchestrator.start(plan, self._buffer.put)
        self.trace = self._run.trace
        if admitted is not None:
            admitted()

    @property
    def prompt_tokens(self) -> int:
        """Of the prompt, as far as they are known."""
        return 0 if self._run is None else self._run.prompt_tokens

    async def __anext__(self) -> OutputChunk:
        while (item := next(self._items, None)) is None:
            if not (items := await self.take()):
                raise StopAsyncIteration
            self._items = iter(items)
        return item

    async def take(self) -> list[OutputChunk]:
        """All items that have come since the last ones were taken, at least one; none at the end."""
        items: list[OutputChunk] = []
        while not self._at_end and not items:
            await self._ready.wait()
            self._ready.clear()
            items = self._buffer.pop_all()
        self._at_end = self._at_end or items[-1].final is not None
        return items

    def close(self) -> None:
        self._at_end, self._items = True, iter(())
        if self._run is not None:
            self._orchestrator.cancel(self._run)
