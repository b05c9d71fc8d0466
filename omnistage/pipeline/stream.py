"""The output of one running request, as a stream for one reader in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from omnistage.pipeline.orchestrator import Orchestrator
from omnistage.pipeline.output import OutputBuffer
from omnistage.pipeline.outputs import OutputChunk
from omnistage.pipeline.request import RequestPlan


class OutputStream(AsyncIterator[OutputChunk]):
    """The items of one running request, for one reader. Closing it aborts the request if it still runs."""

    def __init__(self, orchestrator: Orchestrator, plan: RequestPlan, limit: int) -> None:
        self.request_id = plan.request.info.request_id
        self._ready = asyncio.Event()
        self._done = False
        # Not through a method of its own: in a cycle, the request's media would live on until the next collection.
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, self._ready.set)
        self._buffer = OutputBuffer(limit, wake)
        self._orchestrator = orchestrator
        self._run = orchestrator.start(plan, self._buffer.put)
        self.trace = self._run.trace
        """What ran when; the stages still change it."""

    async def __anext__(self) -> OutputChunk:
        if self._done:
            raise StopAsyncIteration
        while (item := self._buffer.pop()) is None:
            await self._ready.wait()
            self._ready.clear()
        self._done = item.final is not None
        return item

    async def take(self) -> list[OutputChunk]:
        """All items that have come since the last ones were taken, at least one; none at the end."""
        items: list[OutputChunk] = []
        while not self._done and not items:
            items = self._buffer.pop_all()
            if not items:
                await self._ready.wait()
                self._ready.clear()
        self._done = self._done or items[-1].final is not None
        return items

    def close(self) -> None:
        self._done = True
        self._orchestrator.cancel(self._run)
