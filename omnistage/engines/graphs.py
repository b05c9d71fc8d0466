"""CUDA graphs of whole calls, captured on first use and kept in a bounded cache; plain calls everywhere else.

A decoder's forward is hundreds of small kernels, and launching them costs more than running them. Replaying a graph
costs one launch. Turning graphs off (or running on another device) calls the same function directly.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE as _Pool

logger = logging.getLogger(__name__)

Function = Callable[..., tuple[Tensor, ...]]
"""Of tensors alone, and of nothing else that changes."""

_tf32_lock = threading.Lock()
_tf32_users = 0
_tf32_before = False


@contextlib.contextmanager
def allow_tf32(enabled: bool) -> Iterator[None]:
    """Allow TF32 in float32 matrix products within the block, as far as torch can.

    The switch is one for the process and is read when a kernel is launched or captured: replayed graphs keep what
    they were captured with, but float32 products that another thread launches meanwhile see it too. `enabled=False`
    leaves the process's setting alone. Blocks may nest and overlap: the last one to end restores.
    """
    global _tf32_users, _tf32_before
    if not enabled:
        yield
        return
    matmul = torch.backends.cuda.matmul
    with _tf32_lock:
        if not _tf32_users:
            # Read through the new name, which never raises; set through the old one, which keeps both in agreement.
            _tf32_before = matmul.fp32_precision == "tf32"
            matmul.allow_tf32 = True
        _tf32_users += 1
    try:
        yield
    finally:
        with _tf32_lock:
            _tf32_users -= 1
            if not _tf32_users:
                matmul.allow_tf32 = _tf32_before


def bucket(count: int, parts: int = 1) -> int:
    """The next power of two, or the next of `parts` equal steps between two of them.

    Batches are padded to it so that few graphs exist; four parts pad by a quarter at most.
    """
    step = max((1 << (count - 1).bit_length()) // (2 * parts), 1)
    return -(-count // step) * step


class _Graph:  # pragma: no cover  (needs a CUDA device)
    """One captured call with its static inputs and output."""

    def __init__(
        self,
        function: Function,
        inputs: tuple[Tensor, ...],
        constants: tuple[Tensor, ...],
        pool: _Pool,
        stream: torch.cuda.Stream,
    ) -> None:
        self._inputs = tuple(tensor.clone() for tensor in (*inputs, *constants))
        self._constants = constants
        self._graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            function(*self._inputs)  # libraries set themselves up on first use, which cannot be captured
            # Not torch.cuda.graph(): it synchronises the device and empties the allocator's cache under the other
            # stages. Thread-local: other stages go on allocating and launching while this thread captures.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._output = function(*self._inputs)
            finally:
                self._graph.capture_end()
        current.wait_stream(stream)

    def __call__(self, inputs: tuple[Tensor, ...], constants: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for static, tensor in zip(self._inputs, inputs, strict=False):
            static.copy_(tensor, non_blocking=True)
        known, self._constants = self._constants, constants
        for static, tensor, last in zip(self._inputs[len(inputs) :], constants, known, strict=True):
            if tensor is not last:
                static.copy_(tensor, non_blocking=True)
        self._graph.replay()
        return self._output


class GraphCache:
    """Calls functions of tensors through CUDA graphs. Not thread-safe: one per engine loop, all on one stream."""

    def __init__(self, *, enabled: bool, capacity: int = 96, priority: int = 0) -> None:
        self.enabled = enabled
        self.capacity = capacity
        self._priority = priority
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._pool: _Pool | None = None
        self._stream: torch.cuda.Stream | None = None
        """Where all of them are captured: the allocator gives memory of one stream to no other. Kernels keep the
        priority of the stream that they were captured on."""
        self.captures = 0

    def __call__(
        self, key: Hashable, function: Function, *inputs: Tensor, constants: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...]:
        """`function(*inputs, *constants)`. The answers may be buffers that the next call overwrites.

        Calls with an equal key must have the same function and shapes. One of the `constants` that the last such call
        had in this place is not read again: it must not have changed. A failed capture turns graphs off for good.
        """
        if not self.enabled or inputs[0].device.type != "cuda":
            return function(*inputs, *constants)
        return self._replay(key, function, inputs, constants)  # pragma: no cover  (needs a CUDA device)

    def _replay(
        self, key: Hashable, function: Function, inputs: tuple[Tensor, ...], constants: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:  # pragma: no cover  (needs a CUDA device)
        graph = self._graphs.get(key)
        if graph is None:
            if self._pool is None or self._stream is None:
                self._pool = torch.cuda.graph_pool_handle()
                self._stream = torch.cuda.Stream(priority=self._priority)  # type: ignore[no-untyped-call]
            try:
                graph = _Graph(function, inputs, constants, self._pool, self._stream)
            except RuntimeError as error:
                self.clear()
                self.enabled = False
                logger.warning("CUDA graph capture failed, running without graphs from here on: %s", error)
                return function(*inputs, *constants)
            self.captures += 1
            self._graphs[key] = graph
            if len(self._graphs) > self.capacity:
                # Its kernels may still be running; their memory must not go to the next graph before they are done.
                torch.cuda.current_stream().synchronize()
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return graph(inputs, constants)

    def clear(self) -> None:
        """Give the graphs' memory back."""
        self._graphs.clear()
