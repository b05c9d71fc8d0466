"""A stage whose work is done in another process: itself a stage, so that nothing above can tell."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnistage.core.params import StageParams, answers
from omnistage.core.stage import Stage, StageState, StageStats, StepSeconds
from omnistage.core.types import FinishReason, StageChunk, StageFeed, StageInput

if TYPE_CHECKING:
    from omnistage.placement.group import Binding, StageGroup
    from omnistage.placement.worker_process import Worker


_UNAVAILABLE = {
    StageState.REBUILDING: "runs in a process that is being restarted",
    StageState.FAILED: "runs in a process that has failed too often: look at the log and restart the service",
}


@dataclass(slots=True)
class _Held:
    binding: Binding
    open: set[int]
    """Answers that have not ended."""


class ProxyStage(Stage):
    """Speaks for one stage of a group. Chunks come in by `put`, from the threads that read the processes' channels."""

    uses_torch = False
    only_waited = True

    def __init__(self, name: str, params_type: type[StageParams], group: StageGroup) -> None:
        self.name = name
        self.params_type = params_type
        self._group = group
        self._requests: dict[str, _Held] = {}
        self._inbox: deque[tuple[Worker | None, list[tuple[Binding, StageChunk]]]] = deque()
        self._putting = threading.Lock()

    def note(self, state: StageState) -> None:
        """Whether there is a process that can take requests."""
        self.unavailable = _UNAVAILABLE.get(state)
        self.beyond_repair = state is StageState.FAILED
        if self.wake is not None:
            self.wake()

    def put(self, worker: Worker | None, batch: list[tuple[Binding, StageChunk]]) -> None:
        """Take chunks, from any thread. They are a worker's batch, or the ends of requests that lost theirs."""
        with self._putting:
            asleep = not self._inbox  # else `step` finds this one as well
            self._inbox.append((worker, batch))
        if asleep and self.wake is not None:
            self.wake()

    # ---------------------------------------------------------------------------------------- the contract

    def check(self, stage_input: StageInput) -> None:
        self._group.check(self.name, stage_input=stage_input)

    def check_params(self, params: StageParams) -> None:
        self._group.check(self.name, params=params)

    def submit(self, stage_input: StageInput) -> None:
        binding = self._group.submit(self.name, stage_input)
        self._requests[stage_input.info.request_id] = _Held(binding, set(range(answers(stage_input.params))))

    def feed(self, request_id: str, feed: StageFeed) -> None:
        if (request := self._requests.get(request_id)) is not None:
            self._group.feed(request.binding, self.name, feed)

    def abort(self, request_id: str) -> None:
        if (request := self._requests.pop(request_id, None)) is not None:
            self._group.abort(request.binding, self.name)

    def has_work(self) -> bool:
        return bool(self._inbox)

    def step(self) -> list[StageChunk]:
        chunks = []
        while self._inbox:
            worker, batch = self._inbox[0]
            for binding, chunk in batch:
                request = self._requests.get(chunk.request_id)
                if request is not None and request.binding is binding:
                    chunks.append(chunk)
                    self._note_end(request, chunk)
            if worker is not None:
                self._group.note_taken(worker, self.name)
            self._inbox.popleft()  # last: `put` wakes the loop that has seen it empty
        return chunks

    def _note_end(self, request: _Held, chunk: StageChunk) -> None:
        if chunk.finish is None and chunk.error is None:
            return
        request.open.discard(chunk.index)
        if not request.open or chunk.error is not None or chunk.finish is FinishReason.ERROR:
            del self._requests[chunk.request_id]
            self._group.release(request.binding, self.name)

    def stats(self) -> StageStats:
        return self._group.stats(self.name, holding=bool(self._requests))

    def step_seconds(self) -> StepSeconds:
        return self._group.step_seconds(self.name)

    def close(self) -> None:
        self._group.close(self.name)
