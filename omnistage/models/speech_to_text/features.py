"""Features of clips, computed beside whatever else runs: each clip by itself, in a thread of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np

from omnistage.engines.threads import set_single_threaded

_MAX_THREADS = 16
T = TypeVar("T")


class EarlyFeatures(Generic[T]):
    """Begins with a clip as soon as it is there, so that a batch that begins later need not wait for each in turn."""

    def __init__(self, extract: Callable[[np.ndarray], T]) -> None:
        self._extract = extract
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, "features", initializer=set_single_threaded)
        self._jobs: dict[str, tuple[np.ndarray, Future[T]]] = {}

    def begin(self, request_id: str, samples: np.ndarray) -> None:
        if request_id not in self._jobs:
            self._jobs[request_id] = samples, self._pool.submit(self._extract, samples)

    def of(self, clips: Sequence[np.ndarray]) -> list[T]:
        """Those of these clips. What has not begun does so now, all at once."""
        entries = [(samples, future) for samples, future in tuple(self._jobs.values())]
        futures = []
        for clip in clips:
            match = next((future for samples, future in entries if samples is clip), None)
            futures.append(self._pool.submit(self._extract, clip) if match is None else match)
        return [future.result() for future in futures]

    def forget(self, request_id: str) -> None:
        if (entry := self._jobs.pop(request_id, None)) is not None:
            entry[1].cancel()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
