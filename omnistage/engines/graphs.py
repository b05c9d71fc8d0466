"""CUDA graphs of whole calls, captured on first use and kept in a bounded cache; plain calls everywhere else.

A decoder's forward is hundreds of small kernels, and launching them costs more than running them. Replaying a graph
costs one launch. Turning graphs off (or running on another device) calls the same function directly.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from omnistage.core.failures import loses_device

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
Function = Callable[..., tuple[Tensor, ...]]
"""Of tensors alone, and of nothing else that changes."""
_ALIGNMENT = 512
"""Of tensors in a buffer, as the allocator's."""

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


class Capture(Protocol):
    """Captures calls as graphs."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Call `run` twice, the second time to capture what it does; what the returned function does over again."""


class CudaCapture:  # pragma: no cover  (needs a CUDA device)
    """Captures as CUDA graphs that share one pool: memory which one of them frees inside, the next one uses.

    So no two of them may run at once, and what a captured call returns must be copied out of the pool inside it.
    """

    def __init__(self, priority: int) -> None:
        self._priority = priority
        self._renew()

    def _renew(self) -> None:
        self._pool = torch.cuda.MemPool()
        # All are captured on one stream: the allocator gives memory of one stream to no other. Kernels keep the
        # priority of the stream that they were captured on.
        self._stream = torch.cuda.Stream(priority=self._priority)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        current, stream = torch.cuda.current_stream(), self._stream
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                # Libraries set themselves up on first use, which cannot be captured. From the same pool: what this
                # takes, the graph takes over, and is not held twice.
                with torch.cuda.use_mem_pool(self._pool):
                    run()
                # Not torch.cuda.graph(): it synchronises the device and empties the allocator's cache under the other
                # stages. Thread-local: other stages go on allocating and launching while this thread captures.
                graph.capture_begin(pool=self._pool.id, capture_error_mode="thread_local")  # type: ignore[arg-type]
                try:
                    run()
                finally:
                    self._end(graph)
        finally:
            current.wait_stream(stream)
        return graph.replay

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            end_capture(graph, self._pool.id)
        except RuntimeError:
            self._renew()
            raise


def capture(
    step: Callable[[], _T], device: torch.device, pool: Any
) -> tuple[Any, _T]:  # pragma: no cover  (needs CUDA; tests/gpu)
    """A CUDA graph of `step`, and its result, which every replay writes anew."""
    step()  # kernels compile and workspaces appear before the capture
    torch.cuda.current_stream(device).synchronize()
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph(): it synchronises the device and empties the allocator's cache under the other stages.
    # Thread-local: they go on allocating and launching while this thread captures.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        result = step()
    finally:
        end_capture(graph, pool)
    return graph, result


def try_capture(make: Callable[[], _T], what: str, *, may_fail: bool = True) -> _T | None:
    """What `make` captures; None, with a line in the log, where that cannot be: there may be no memory for it."""
    try:
        with torch.inference_mode():
            return make()
    except RuntimeError as error:
        if not may_fail or loses_device(error):
            raise
        logger.warning("no %s: %s", what, error)
        return None


def end_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> None:  # pragma: no cover  (needs a CUDA device)
    """End the capture of this thread. Raises what broke it; then `pool` takes no further capture."""
    try:
        graph.capture_end()
    except RuntimeError:
        # The driver gave the capture up, and torch has ended it neither in the allocator, which would hold back memory
        # that several streams have used, nor in the generator of random numbers, which would give none any more.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        with contextlib.suppress(RuntimeError), warnings.catch_warnings(action="ignore"):  # it is empty
            another = torch.cuda.CUDAGraph()
            another.capture_begin(capture_error_mode="thread_local")
            another.capture_end()
        raise


class _Buffer:
    """Memory that graphs have in common, one after the other. The largest should come first: it only grows."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of the same shapes, dtypes and strides, side by side in the buffer."""
        shapes = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        sizes = [shape.numel() * shape.itemsize for shape in shapes]
        starts = list(itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
        if self._memory is None or self._memory.numel() < starts[-1]:
            # Graphs that were captured with the old one keep it.
            self._memory = torch.empty(starts[-1], dtype=torch.uint8, device=tensors[0].device)
        pieces = [self._memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        return [
            piece.view(shape.dtype).as_strided(shape.shape, shape.stride())
            for piece, shape in zip(pieces, shapes, strict=True)
        ]


class _Graph:
    """One captured call. Its inputs and results are in buffers that other graphs use, too."""

    def __init__(
        self,
        function: Function,
        inputs: tuple[Tensor, ...],
        constants: tuple[Tensor, ...],
        buffers: tuple[_Buffer, _Buffer],
        capture: Capture,
    ) -> None:
        self._inputs = buffers[0].views(inputs)
        torch._foreach_copy_(self._inputs, list(inputs))
        self._constants = [tensor.clone() for tensor in constants]
        self._sources = constants
        self._results: list[Tensor] = []

        def run() -> None:
            results = function(*self._inputs, *self._constants)
            if not self._results:
                self._results = buffers[1].views(results)
            for own, result in zip(self._results, results, strict=True):
                own.copy_(result)

        self._replay = capture(run)

    def __call__(self, inputs: tuple[Tensor, ...], constants: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        changed = [i for i, last in enumerate(self._sources) if constants[i] is not last]
        # One call: each gives the interpreter away, and other stages' threads want it.
        torch._foreach_copy_(
            [*self._inputs, *(self._constants[i] for i in changed)], [*inputs, *(constants[i] for i in changed)]
        )
        self._sources = constants
        return self.replay()

    def replay(self) -> tuple[Tensor, ...]:
        """With the inputs that it has."""
        self._replay()
        return tuple(self._results)


class GraphCache:
    """Calls functions of tensors through CUDA graphs. Not thread-safe: one per engine loop, all on one stream.

    `capture` is for tests; without it graphs are CUDA's, and inputs on other devices are for plain calls. `tf32` allows
    TF32 in what is called or captured. Replays leave the process's switch alone: where it changes, layers that are
    compiled elsewhere are compiled again.
    """

    def __init__(
        self,
        *,
        enabled: bool,
        capacity: int = 96,
        priority: int = 0,
        tf32: bool = False,
        capture: Capture | None = None,
    ) -> None:
        self.enabled = enabled
        self._tf32 = tf32
        self.capacity = capacity
        self._priority = priority
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._plain: OrderedDict[Hashable, None] = OrderedDict()
        """Keys that could not be captured, the oldest first."""
        self._buffers = _Buffer(), _Buffer()
        self._anywhere = capture is not None
        self._capture = capture
        self.captures = 0
        self.replays = 0

    def __call__(
        self, key: Hashable, function: Function, *inputs: Tensor, constants: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...]:
        """`function(*inputs, *constants)`. The results may be buffers that the next call, of any key, overwrites.

        Calls with an equal key must have the same function and shapes. One of the `constants` that the last such call
        had in this place is not read again: it must not have changed. A key that cannot be captured is called plainly.
        """
        if not self.enabled or key in self._plain or not (self._anywhere or inputs[0].is_cuda):
            return self._plainly(function, *inputs, *constants)
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            self.replays += 1
            return graph(inputs, constants)
        graph = self._add(key, function, inputs, constants)
        if graph is None:
            return self._plainly(function, *inputs, *constants)
        self.replays += 1
        return graph.replay()  # its inputs are there; what they were copied from may have been overwritten

    def _plainly(self, function: Function, *inputs: Tensor) -> tuple[Tensor, ...]:
        with allow_tf32(self._tf32):
            return function(*inputs)

    def _add(
        self, key: Hashable, function: Function, inputs: tuple[Tensor, ...], constants: tuple[Tensor, ...]
    ) -> _Graph | None:
        try:
            if self._capture is None:
                self._capture = CudaCapture(self._priority)
            with allow_tf32(self._tf32):
                graph = _Graph(function, inputs, constants, self._buffers, self._capture)
        except RuntimeError as error:  # there may be no memory for it
            if loses_device(error):
                raise
            logger.warning("no CUDA graph for %s, which runs without: %s", key, error)
            self._plain[key] = None
            if len(self._plain) > self.capacity:
                self._plain.popitem(last=False)
            return None
        self.captures += 1
        self._graphs[key] = graph
        if len(self._graphs) > self.capacity:
            if inputs[0].is_cuda:
                # Its kernels may still be running; their memory must not go to the next graph before they are done.
                torch.cuda.current_stream().synchronize()
            self._graphs.popitem(last=False)
        return graph

    def clear(self) -> None:
        """Give the graphs' memory back."""
        self._graphs.clear()
        self._buffers = _Buffer(), _Buffer()
