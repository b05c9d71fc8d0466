"""transformers' cache with keys and values in the engine's pool, for models that run by their own forward."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from omnistage.engines.ar.attention import KVCache
from omnistage.engines.ar.group import Group
from omnistage.hf import transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CachePlace = tuple[int, int, int, int | None]
"""Of a layer of transformers' cache: heads, widths of a key and of a value, window."""


class PooledLayer(transformers.cache_utils.DynamicLayer):  # type: ignore[misc]
    """transformers' cache of one layer, for the sequences of one group."""

    def __init__(self, cache: KVCache, group: Group, window: int | None) -> None:
        super().__init__()
        self._pool, self._group, self._window = [part.view(-1, *part.shape[2:]) for part in cache], group, window
        self.is_sliding = window is not None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_options: Any) -> Any:
        """`[B, heads, count, d]` in, `[B, heads, kept, d]` out."""
        group = self._group
        slots = group.slots[:, group.longest - self._length() :]
        both = []
        for pool, new in zip(self._pool, (key_states, value_states), strict=True):
            pool.index_copy_(0, group.new_slots(), new.transpose(1, 2).reshape(-1, *pool.shape[1:]))
            rows = pool.index_select(0, slots.reshape(-1)).view(*slots.shape, *pool.shape[1:])
            both.append(rows.transpose(1, 2).contiguous())
        self.keys, self.values = both
        self.is_initialized = True
        return self.keys, self.values

    def _length(self) -> int:
        """Of the longest sequence: all, or what transformers' own cache keeps with a window."""
        group = self._group
        return group.longest if self._window is None else min(group.longest, self._window - 1 + group.count)

    def get_seq_length(self) -> int:
        return self._group.longest - self._group.count

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        del query_length
        return self._length(), self._group.longest - self._length()


def counts_in_cache(model: PreTrainedModel) -> bool:
    """Whether a layer counts tokens in the cache, as Llama 4's do from position 8,192 on: padding would count."""
    for kind in {type(module) for module in model.modules() if not isinstance(module, transformers.PreTrainedModel)}:
        try:
            if "get_seq_length" in inspect.getsource(kind.forward):
                return True
        except (OSError, TypeError):  # a module without its source
            continue
    return False
