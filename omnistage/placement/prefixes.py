"""Which process has seen the beginning of a prompt: its prefix cache may have it."""

from __future__ import annotations

from collections import OrderedDict

from omnistage.core.types import ARInput, StagePayloadIn
from omnistage.placement.worker_process import Worker

PREFIX_TOKENS = 128
"""Prompts whose first tokens are the same go to one process; shorter ones are computed faster than they are moved."""
MAX_EXCESS = 2
"""Requests that a process may have beyond the one with the fewest, and still get one for its prefix."""
_MAX_PREFIXES = 4096


class Prefixes:
    """Remembers the last process of each prefix. Used under the lock of its group."""

    def __init__(self) -> None:
        self._workers: OrderedDict[int, Worker] = OrderedDict()

    def choose(self, payload: StagePayloadIn, least_loaded: Worker) -> Worker:
        """The process for a request: that of its prefix, unless it has much more to do than the least loaded."""
        if not isinstance(payload, ARInput) or len(payload.token_ids) < PREFIX_TOKENS:
            return least_loaded
        prefix = hash((payload.token_ids[:PREFIX_TOKENS], tuple(span.key for span in payload.media)))
        previous = self._workers.pop(prefix, least_loaded)
        worker = least_loaded if previous.lost or previous.load > least_loaded.load + MAX_EXCESS else previous
        self._workers[prefix] = worker
        if len(self._workers) > _MAX_PREFIXES:
            self._workers.popitem(last=False)
        return worker

    def forget(self, worker: Worker) -> None:
        """A process is lost: it has no cache any more, and nothing of it is kept."""
        for prefix in [prefix for prefix, other in self._workers.items() if other is worker]:
            del self._workers[prefix]
