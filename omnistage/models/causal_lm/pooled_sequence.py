"""Sequences that transformers itself prepares, as for `generate`, with keys and values in the engine's pool.

A prompt is one forward of the model's own, with all of its media. The tokens that several sequences generate are one
padded batch: what the model prepares for each of them is put together. What a sequence keeps beside growing keys and
values, such as those of a picture that all layers attend to, stays its own.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from omnistage.core.errors import InternalError, UnsupportedModelError
from omnistage.engines.ar.attention import KVCache
from omnistage.engines.ar.component import GroupedSequence
from omnistage.engines.ar.group import Group
from omnistage.hf import transformers
from omnistage.models.causal_lm.own_cache import GeneratedSequence
from omnistage.models.causal_lm.own_model import MODEL_ERRORS
from omnistage.models.causal_lm.pooled_cache import CachePlace, PooledLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from omnistage.models.causal_lm.own_model import Inputs

logger = logging.getLogger(__name__)

_WIDTHS = ("decoder_input_ids", "input_ids", "inputs_embeds")
"""Arguments of a forward whose second dimension are its tokens."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Where a model's cache lies."""

    places: tuple[CachePlace | None, ...]
    """Of each layer: in the engine's pool; None: the sequence keeps it, if it is anything."""
    held_bytes: int
    """What one sequence keeps."""

    @property
    def pooled(self) -> tuple[CachePlace, ...]:
        return tuple(place for place in self.places if place is not None)


class _LengthLayer(transformers.cache_utils.DynamicLayer):  # type: ignore[misc]
    """In place of a sequence's pooled layers between two forwards: says how long they are."""

    def __init__(self, sequence: PooledSequence) -> None:
        super().__init__()
        self._sequence = sequence
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self._sequence.length

    def update(self, *_args: Any, **_options: Any) -> Any:
        raise InternalError("a sequence's own cache was written in place of that of its batch")


class PooledSequence(GeneratedSequence, GroupedSequence):
    """One sequence; its tokens after the prompt are computed by `advance`."""

    def __init__(
        self, model: PreTrainedModel, plan: CachePlan, caches: Callable[[], Sequence[KVCache]], inputs: Inputs | None
    ) -> None:
        """`caches`: of the pooled layers, in order."""
        super().__init__(model, inputs)
        self.plan, self.pools = plan, caches
        self.length = 0
        """Tokens in the cache, which may be fewer than the engine counts: of an encoder's decoder."""

    def begin(self, token_ids: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        inputs = self.prepare(token_ids)
        count = next(inputs[name].shape[1] for name in _WIDTHS if inputs.get(name) is not None)
        if count > len(slots):
            raise InternalError(f"a prompt of {len(token_ids)} tokens takes {count} in the cache")
        cache = _growing(self.cache)
        group = Group.of(count, [count], [slots], token_ids.device)
        layers = list(cache.layers)
        cache.layers = _layers(self.plan, self.pools(), group, _padded(layers, len(self.plan.places)))
        logits = self.accept(self._model(**inputs, return_dict=True))
        self.length = count
        between = _LengthLayer(self)
        cache.layers = [
            layer if place is None else between for layer, place in zip(cache.layers, self.plan.places, strict=True)
        ]
        return logits

    @property
    def model(self) -> PreTrainedModel:
        return self._model

    def step(self, out: Any, row: int) -> torch.Tensor:
        """Take its row of a batch's output."""
        fields = {name: _row(value, row) for name, value in out.items()}
        fields["past_key_values"] = self.cache
        self.length += 1
        return self.accept(type(out)(**{name: value for name, value in fields.items() if value is not None}))


def advance(
    sequences: Sequence[PooledSequence], token_ids: torch.Tensor, slots: Sequence[np.ndarray], *, padded: bool
) -> torch.Tensor:
    """One more token `int64 [B]` of each; the logits `[B, V]` after it. `padded`: lengths may differ in a batch."""
    prepared = [seq.prepare(token_ids[row, None]) for row, seq in enumerate(sequences)]
    groups: dict[Hashable, list[int]] = {}
    for row, (sequence, inputs) in enumerate(zip(sequences, prepared, strict=True)):
        groups.setdefault((_kind(sequence, inputs), None if padded else sequence.length), []).append(row)
    logits: list[torch.Tensor | None] = [None] * len(sequences)
    for rows in groups.values():
        members = [sequences[row] for row in rows]
        out = members[0].model(
            **_merged(members, [prepared[row] for row in rows], [slots[row] for row in rows]), return_dict=True
        )
        for place, row in enumerate(rows):
            logits[row] = sequences[row].step(out, place)
    return torch.stack([row for row in logits if row is not None])


def plan_cache(sequence: GeneratedSequence, ids: torch.Tensor, name: str) -> CachePlan:
    """By a prompt and the token after it, with the cache that transformers makes."""
    sequence.forward(ids)
    before = [_length(layer) for layer in _growing(sequence.cache).layers]
    sequence.forward(ids[:1])
    layers = list(_growing(sequence.cache).layers)
    places = _places(layers, before, 1, name)
    lengths = {length for length, place in zip(before, places, strict=True) if place is not None}
    if len(lengths) != 1 or max(lengths) > len(ids):
        raise UnsupportedModelError(f"{name} caches {sorted(lengths)} tokens for a prompt of {len(ids)}")
    return CachePlan(places, max(0, sequence.num_bytes() - _pooled_bytes(layers, places)))


def planned_cache(model: PreTrainedModel, prompts: Sequence[tuple[torch.Tensor, Inputs]] = ()) -> CachePlan:
    """By a text on the `meta` device, with what a sequence keeps of the media of these prompts there."""
    ids = torch.zeros(1, 8, dtype=torch.int64, device=model.device)
    cache = _run_planned(model, ids, {}).past_key_values
    layers = list(_growing(cache).layers)
    places = _places(layers, [0] * len(layers), _length(layers[0]), type(model).__name__)
    if not any(places):
        raise UnsupportedModelError(f"{type(model).__name__} caches nothing")
    return CachePlan(places, max((_planned_bytes(model, places, *prompt) for prompt in prompts), default=0))


def _run_planned(model: PreTrainedModel, ids: torch.Tensor, inputs: Inputs) -> Any:
    start = {"decoder_input_ids": ids[:, :1]} if model.config.is_encoder_decoder else {}
    with torch.inference_mode(), _AnyScalar():  # type: ignore[no-untyped-call]
        return model(input_ids=ids, use_cache=True, return_dict=True, **start, **inputs)


def _planned_bytes(
    model: PreTrainedModel, places: Sequence[CachePlace | None], ids: torch.Tensor, inputs: Inputs
) -> int:
    """What a sequence keeps beside its tokens' keys and values after a prompt on the `meta` device."""
    try:
        out = _run_planned(model, ids[None], inputs)
    except MODEL_ERRORS:
        logger.debug("%s does not run with media without data", type(model).__name__, exc_info=True)
        return 0
    cache = out.past_key_values
    own = [layer for number, layer in enumerate(_growing(cache).layers) if not any(places[number : number + 1])]
    if isinstance(cache, transformers.EncoderDecoderCache):
        own += cache.cross_attention_cache.layers
    tensors = [part for layer in own if _length(layer) for part in (layer.keys, layer.values)]
    if (states := out.get("encoder_last_hidden_state")) is not None:
        tensors.append(states)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _AnyScalar(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """On the `meta` device: numbers that a model reads are 1, as those of its checks of counts and masks would be."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default):  # by inference mode
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


def _places(layers: Sequence[Any], before: Sequence[int], new: int, name: str) -> tuple[CachePlace | None, ...]:
    """Of layers that had `before` tokens and were given `new` ones."""
    kinds = transformers.cache_utils.DynamicLayer, transformers.cache_utils.DynamicSlidingWindowLayer
    places = list[CachePlace | None]()
    for layer, length in zip(layers, before, strict=True):
        growth = _length(layer) - length
        if growth not in (0, new) or (_length(layer) and type(layer) not in kinds):
            raise UnsupportedModelError(f"{name} caches more than keys and values")
        if not growth:
            places.append(None)
            continue
        window = layer.sliding_window if layer.is_sliding else None
        places.append((layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], window))
    return tuple(places)


def _pooled_bytes(layers: Sequence[Any], places: Sequence[CachePlace | None]) -> int:
    parts = (part for layer, place in zip(layers, places, strict=True) if place for part in (layer.keys, layer.values))
    # Those of a window are a part of a larger tensor.
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}.values())


# ------------------------------------------------------------------------------------------------ caches


def _growing(cache: Any) -> Any:
    """The part of a cache that grows with every token."""
    if isinstance(cache, transformers.EncoderDecoderCache):
        cache = cache.self_attention_cache
    if type(cache) is not transformers.DynamicCache:
        raise UnsupportedModelError(f"the model has a cache of its own: {type(cache).__name__}")
    return cache


def _length(layer: Any) -> int:
    if isinstance(layer, transformers.cache_utils.DummyLayer) or not getattr(layer, "is_initialized", True):
        return 0
    return int(layer.get_seq_length())


def _padded(layers: list[Any], count: int) -> list[Any]:
    return layers + [transformers.cache_utils.DynamicLayer() for _ in range(count - len(layers))]


def _layers(plan: CachePlan, caches: Sequence[KVCache], group: Group, layers: Sequence[Any]) -> list[Any]:
    pools: Iterator[KVCache] = iter(caches)
    return [
        layer if place is None else PooledLayer(next(pools), group, place[3])
        for layer, place in zip(layers, plan.places, strict=True)
    ]


def _join_layers(layers: Sequence[Any]) -> Any:
    """One layer that sequences keep, as that of their batch; shorter ones are filled up with zeros behind."""
    if not _length(layers[0]):
        return layers[0]
    joined = transformers.cache_utils.DynamicLayer()
    joined.lazy_initialization(layers[0].keys, layers[0].values)
    joined.keys = _joined([layer.keys for layer in layers], dim=2)
    joined.values = _joined([layer.values for layer in layers], dim=2)
    return joined


def _batch_cache(sequences: Sequence[PooledSequence], group: Group) -> Any:
    first = sequences[0]
    own_layers = [_growing(sequence.cache).layers for sequence in sequences]
    cache = transformers.DynamicCache()
    joined = [
        _join_layers(layers) if place is None else None
        for layers, place in zip(zip(*own_layers, strict=True), first.plan.places, strict=True)
    ]
    cache.layers = _layers(first.plan, first.pools(), group, joined)
    if not isinstance(first.cache, transformers.EncoderDecoderCache):
        return cache
    cross = transformers.DynamicCache()
    theirs = [sequence.cache.cross_attention_cache.layers for sequence in sequences]
    cross.layers = [_join_layers(layers) for layers in zip(*theirs, strict=True)]
    return transformers.EncoderDecoderCache(cache, cross)


# ------------------------------------------------------------------------------------------------- batches


def _own_mask(sequence: PooledSequence) -> str:
    """The argument that is the mask of the tokens in the cache."""
    return "decoder_attention_mask" if sequence.model.config.is_encoder_decoder else "attention_mask"


def _kind(sequence: PooledSequence, inputs: dict[str, Any]) -> Hashable:
    """Sequences of one kind can be computed together."""
    encoder = sequence.model.config.is_encoder_decoder
    mask = _own_mask(sequence)
    parts: list[Hashable] = [id(sequence.model)]
    for name in sorted(inputs):
        value = inputs[name]
        if name in (mask, "past_key_values") or (encoder and name in ("attention_mask", "encoder_outputs")):
            parts.append(name)
        elif isinstance(value, torch.Tensor):
            parts.append((name, value.shape))
        else:
            parts.append((name, value if isinstance(value, bool | int | float | str | None) else id(value)))
    shapes = [
        None if not _length(layer) else layer.keys.shape
        for layer, place in zip(_growing(sequence.cache).layers, sequence.plan.places, strict=True)
        if place is None
    ]
    return (*parts, *shapes)


def _merged(
    sequences: Sequence[PooledSequence], inputs: Sequence[dict[str, Any]], slots: Sequence[np.ndarray]
) -> dict[str, Any]:
    first, device = sequences[0], next(v.device for v in inputs[0].values() if isinstance(v, torch.Tensor))
    group = Group.of(1, [sequence.length + 1 for sequence in sequences], slots, device)
    merged: dict[str, Any] = {}
    for name, value in inputs[0].items():
        values = [each[name] for each in inputs]
        if name == "attention_mask" and "encoder_outputs" in inputs[0]:
            continue
        if name == "past_key_values":
            merged[name] = _batch_cache(sequences, group)
        elif name == "encoder_outputs":
            rows = [each.last_hidden_state for each in values]
            masks = [row.new_ones(1, row.shape[1], dtype=torch.int64) for row in rows]
            merged[name] = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=_joined(rows, dim=1))
            merged["attention_mask"] = _joined(masks, dim=1)
        elif isinstance(value, torch.Tensor):
            many = name.endswith("position_ids") and value.ndim == 3
            merged[name] = torch.cat(values, dim=1 if many else 0)
        else:
            merged[name] = value
    mask = _own_mask(first)
    if mask in inspect.signature(first.model.forward).parameters:  # `generate` leaves it out where nothing is padded
        merged[mask] = group.mask()
    return merged


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Along the first dimension; filled up with zeros behind along `dim`."""
    if len({part.shape for part in parts}) > 1:
        longest = max(part.shape[dim] for part in parts)
        parts = [
            torch.cat((part, part.new_zeros(*part.shape[:dim], longest - part.shape[dim], *part.shape[dim + 1 :])), dim)
            for part in parts
        ]
    return torch.cat(tuple(parts))


def _row(value: Any, row: int) -> Any:
    """A sequence's part of an output."""
    if isinstance(value, torch.Tensor):
        return value[row : row + 1] if value.ndim else None
    if isinstance(value, tuple) and value and all(isinstance(each, torch.Tensor) for each in value):
        return tuple(each[row : row + 1] for each in value)
    return None
