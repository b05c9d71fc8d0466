"""What each attention module of a `transformers` model asks of its attention, from one pass of the model itself.

A sliding window may be in the model's mask alone, keys and values may differ in width from layer to layer, and a module
may pass soft caps or sinks. Configs name these in many ways or not at all; the calls themselves do not lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import local
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from omnistage.core.errors import UnsupportedModelError
from omnistage.hf import transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RECORDING_NAME = "omnistage_recording"
"""Name under which `transformers` finds the attention and the masks that record instead of computing."""

_IGNORED = frozenset(
    {
        "scaling",
        "dropout",
        "sliding_window",
        "softcap",
        "s_aux",
        "is_causal",
        "position_ids",
        "use_cache",
        "cache_position",
    }
    | {
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "past_key_values",
        "logits_to_keep",
    }
)
"""Arguments of an attention call that are read here or change nothing."""

_OTHER, _BOTH_WAYS = -1, -2
"""Windows of masks that are none."""

MaskFunction = Callable[..., torch.Tensor]
"""Whether a query sees a key: of the numbers of the row and the head, and of both places."""

_current = local()
"""`calls`: those of the recording that this thread runs."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One attention module's call: what its cache has to hold and over which keys it attends."""

    module: nn.Module
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    plain: bool
    """Neither soft caps nor sinks, and values as wide as keys: what every backend computes."""
    shows: MaskFunction | None = None
    """The model's own mask; None: it passes none, and attends to all before."""
    both_ways: tuple[tuple[int, int], ...] = ()
    """Ranges `[start, end)` of tokens that see all of their range."""


def record_attention(
    model: PreTrainedModel,
    vocab_size: int,
    inputs: Mapping[str, Any] | None = None,
    decoder: PreTrainedModel | None = None,
    *,
    required: bool = True,
    ranges: bool = False,
) -> list[AttentionCall]:
    """The attention calls of a forward of `model`, in order; those of its `decoder` alone, where one is given.

    `required`: a model without any is refused. `ranges`: tokens may see later ones within a range, and the windows of
    the modules are those that were recorded before.

    `inputs` are those of the forward, else it is a short text. The attention implementation is changed by it.

    Raises `UnsupportedModelError` for attention that a paged cache cannot serve. On the `meta` device it works as far
    as the model does not look at its data; what it raises there is left to the caller.
    """
    name = type(model).__name__
    calls: list[AttentionCall] = []
    (decoder or model).set_attn_implementation(RECORDING_NAME)
    _current.calls, _current.ranges = calls, ranges
    try:
        if inputs is None:
            ids = torch.arange(4, device=model.device)[None] % vocab_size
            # With a mask given, positions are not searched for packed sequences, which the `meta` device cannot do.
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.inference_mode():
            model(**inputs, use_cache=False)
    finally:
        _current.calls = None
    if required and not calls:
        raise UnsupportedModelError(
            f"{name} computes attention in its own code instead of transformers' AttentionInterface, so it cannot use "
            "the paged cache"
        )
    if len({id(call.module) for call in calls}) < len(calls):
        raise UnsupportedModelError(
            f"{name} runs the same attention module several times in a forward, which needs several caches for one "
            "module"
        )
    return calls


def _record(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`transformers`' attention signature; gives zeros."""
    where = type(module).__name__
    if (query.shape[0], key.shape[2]) != (1, query.shape[2]):
        raise UnsupportedModelError(
            f"{where} attends over {key.shape[2]} keys for {query.shape[2]} tokens; the paged cache is for its own"
        )
    unknown = [name for name, item in kwargs.items() if name not in _IGNORED and _matters(item)]
    if unknown:
        raise UnsupportedModelError(
            f"{where} passes {', '.join(unknown)} to its attention, which the paged engine does not take"
        )
    plain = kwargs.get("softcap") is None and kwargs.get("s_aux") is None and key.shape[3] == value.shape[3]
    shows = getattr(attention_mask, "shows", None)
    ranges = _ranges_of(shows, query.shape[2], getattr(module, "paged_window", None)) if _current.ranges else None
    window: int | None = getattr(module, "paged_window", None)
    if ranges is None:
        window = _window_of(attention_mask, module, where)
    _current.calls.append(
        AttentionCall(module, key.shape[1], key.shape[3], value.shape[3], window, plain, shows, ranges or ())
    )
    batch, heads, tokens, _ = query.shape
    return query.new_zeros(batch, tokens, heads, value.shape[3]), None


def _matters(item: object) -> bool:
    return isinstance(item, torch.Tensor) or (item is not None and item is not False)


def _ranges_of(shows: MaskFunction | None, tokens: int, window: Any) -> tuple[tuple[int, int], ...] | None:
    """The ranges whose tokens see each other, where a mask differs in nothing else from causal with this window."""
    if shows is None:
        return None
    zero, places = torch.tensor(0), torch.arange(tokens)
    rows, columns = places[:, None], places[None, :]
    try:
        mask = shows(zero, zero, rows, columns).expand(tokens, tokens).cpu()
    except (IndexError, RuntimeError):
        return None
    ends = torch.where(mask, columns + 1, 0).amax(1).maximum(places + 1).tolist()
    ranges, start = [], 0
    while start < tokens:
        if ends[start] > start + 1:
            ranges.append((start, ends[start]))
        start = ends[start]
    expected = columns <= rows
    for start, end in ranges:
        expected[start:end, start:end] = True
    if window is not None:
        expected &= columns > rows - window
    return tuple(ranges) if torch.equal(mask, expected) else None


def _window_of(mask: torch.Tensor | None, module: nn.Module, where: str) -> int | None:
    if mask is None and getattr(module, "is_causal", True):
        return None
    window = _BOTH_WAYS if mask is None else getattr(mask, "window", _OTHER)  # set by `_describe`
    if window == _BOTH_WAYS:
        raise UnsupportedModelError(f"{where} attends to later tokens too (an encoder); only causal models are served")
    if window == _OTHER:
        raise UnsupportedModelError(
            f"{where} attends through a mask of its own, neither causal nor a sliding window, unlike the paged engine"
        )
    return None if window is None else int(window)


def _describe(mask_function: MaskFunction, local_size: int | None = None, **kwargs: Any) -> torch.Tensor:
    """`transformers`' mask signature: a mask that carries its `window`.

    The mask function is asked about places around the window's edges, so that a window of any length shows.
    """
    del kwargs
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    around = [local_size * times for times in (1, 2)] if local_size else [64, 1024, 1 << 20]
    places = torch.tensor(sorted({0, 1, 2, *(edge + step for edge in around for step in range(-2, 3))}))
    places = places[places >= 0]
    rows, columns = places[:, None], places[None, :]
    try:
        visible = mask_function(torch.tensor(0), torch.tensor(0), rows, columns).expand(len(places), len(places))
    except (IndexError, RuntimeError):  # it looks at more than places, such as the kinds of tokens
        visible = torch.zeros(len(places), len(places), dtype=torch.bool)
    causal = columns <= rows
    window: int | None = _BOTH_WAYS if bool(visible.all()) else _OTHER
    if torch.equal(visible, causal):
        window = None
    elif local_size and torch.equal(visible, causal & (columns > rows - local_size)):
        window = local_size
    mask.window, mask.shows = window, mask_function  # type: ignore[attr-defined]
    return mask


transformers.AttentionInterface.register(RECORDING_NAME, _record)
transformers.masking_utils.AttentionMaskInterface.register(RECORDING_NAME, _describe)
