"""Memory that a computation would take, found by running it on the meta device: shapes and dtypes, no data, no weights.

torch frees a tensor when its last reference goes, on every device alike. Following the storages of a run without data
therefore gives the peak that the allocator of a real device sees, up to the workspaces of its libraries.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

META = torch.device("meta")
_ALIGNMENT = 512
"""The CUDA allocator rounds every block up to it."""


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class is not typed
    """Follows the storages that operators make, from their birth to their end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, int] = {}
        self._bytes = 0
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for value in tree_iter((args, kwargs)):  # what was there before counts as nothing, and so do views of it
            if isinstance(value, Tensor):
                self._follow(value, 0)
        out = _select_all(*args) if func is torch.ops.aten.index.Tensor else None
        if out is None:
            out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, Tensor):
                self._follow(value, -(-value.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT)
        return out

    def _follow(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = size
        self._bytes += size
        self.peak = max(self.peak, self._bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._bytes -= self._live.pop(key, 0)


def _select_all(tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    """What a mask selects, as if it selected everything: without data nobody knows. None for other indices."""
    mask = indices[0] if len(indices) == 1 else None
    if mask is None or mask.dtype is not torch.bool or tensor.device != META:
        return None
    return tensor.new_empty(mask.numel(), *tensor.shape[mask.ndim :])


class _FusedAttention(TorchFunctionMode):
    """Attention as the fused kernels of real devices do it: its scores are never in memory."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            query, _key, value = args[:3] if len(args) >= 3 else [(kwargs or {})[n] for n in ("query", "key", "value")]
            return query.new_empty(*query.shape[:-1], value.shape[-1])
        return func(*args, **(kwargs or {}))


def peak_bytes(run: Callable[[], object]) -> int:
    """The largest sum of what is alive at once of all that `run` allocates; its tensors are on the meta device."""
    with torch.inference_mode(), _FusedAttention(), _Allocations() as allocations:
        result = run()
    del result
    peak: int = allocations.peak
    return peak


def weight_bytes(modules: Iterable[nn.Module]) -> int:
    """Parameters and buffers of some modules; what they share counts once."""
    sizes: dict[int, int] = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())
