"""Recurrent layers of a `transformers` model, found by what they do with its cache, and made ready for the engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from omnistage.core.errors import UnsupportedModelError
from omnistage.engines.ar.component import StateShape
from omnistage.engines.ar.recurrent import LayerStates
from omnistage.hf import transformers
from omnistage.models.causal_lm.own_model import MODEL_ERRORS
from omnistage.models.causal_lm.probe import CACHES, in_float32

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS, _CUT = 11, 7
_TOLERANCE = 2e-5
"""Of a layer's output in float32, relative to its range."""
_SCALES = (1.0, 4.0)
"""Of the rows of which it is asked: a bound on time steps shows for some only."""


@dataclass(frozen=True, slots=True)
class _Call:
    module: nn.Module
    arguments: dict[str, Any]


class _WatchedCache(transformers.DynamicCache):  # type: ignore[misc]
    """transformers' cache, that says when a recurrent state is written."""

    on_write: Callable[[int], None]

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **options: Any) -> torch.Tensor:
        self.on_write(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **options)  # type: ignore[no-any-return]

    def update_recurrent_state(self, states: torch.Tensor, layer_idx: int, *args: Any, **options: Any) -> torch.Tensor:
        self.on_write(layer_idx)
        return super().update_recurrent_state(states, layer_idx, *args, **options)  # type: ignore[no-any-return]


def find_recurrent(model: PreTrainedModel, vocab_size: int) -> list[tuple[nn.Module, LayerStates]]:
    """The model's recurrent modules and their states; none of a model that has none.

    Raises `UnsupportedModelError` for layers that cannot be taken apart by sequence.
    """
    try:
        cache = _WatchedCache(config=model.config)
    except MODEL_ERRORS:  # another kind of cache; whether the model needs it shows in its logits
        return []
    if not any(isinstance(layer, _linear_layer()) for layer in cache.layers):
        return []
    name, planned, dtype = type(model).__name__, model.device.type == "meta", model.dtype
    if planned:
        # Without data, experts are multiplied in no other, and only these masks are made.
        model.to(torch.bfloat16)
        model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            calls = _recurrent_calls(model, cache, vocab_size)
            return [(call.module, _states_of(call, layer, cache, dtype)) for layer, call in calls]
    except MODEL_ERRORS as error:
        raise UnsupportedModelError(
            f"{name} has recurrent layers that do not run by themselves ({type(error).__name__} in their forward)"
        ) from error
    finally:
        if planned:
            model.to(dtype)


def _linear_layer() -> type:
    return transformers.cache_utils.LinearAttentionCacheLayerMixin  # type: ignore[no-any-return]


def _recurrent_calls(model: PreTrainedModel, cache: _WatchedCache, vocab_size: int) -> list[tuple[int, _Call]]:
    """The modules that write states, in order, each with its layer: those that were running when they were written."""
    running: list[_Call] = []
    calls: dict[nn.Module, tuple[int, _Call]] = {}

    def enter(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        running.append(_Call(module, {**dict(zip(names, args, strict=False)), **options}))

    def leave(module: nn.Module, args: object, output: object) -> None:
        del module, args, output
        running.pop()

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    cache.on_write = lambda layer: calls.setdefault(running[-1].module, (layer, running[-1]))  # type: ignore[assignment]
    argument = next(name for name in CACHES if name in inspect.signature(model.forward).parameters)
    ids = torch.arange(_TOKENS, device=model.device)[None] % vocab_size
    try:
        model(input_ids=ids, use_cache=True, **{argument: cache})
    finally:
        for handle in handles:
            handle.remove()
    return list(calls.values())


def _states_of(call: _Call, layer: int, watched: _WatchedCache, dtype: torch.dtype) -> LayerStates:
    """The states that one call of a module leaves, and whether it goes on from them."""
    module, name = call.module, type(call.module).__name__
    argument = next((key for key, item in call.arguments.items() if isinstance(item, transformers.Cache)), None)
    inputs = [i for key, i in call.arguments.items() if isinstance(i, torch.Tensor) and not key.endswith("mask")]
    if argument is None or len(inputs) != 1 or inputs[0] is not next(iter(call.arguments.values())):
        raise UnsupportedModelError(
            f"{name} takes more than hidden states and a cache, which its sequences would share"
        )
    rows, count = inputs[0], watched.layers[layer].number_of_states

    def run(*parts: torch.Tensor) -> tuple[torch.Tensor, Any]:
        cache = transformers.DynamicCache()
        cache.layers = [transformers.cache_utils.LinearAttentionLayer(number_of_states=count)] * (layer + 1)
        outputs = [module(part, **{argument: cache}) for part in parts]
        if [getattr(out, "shape", None) for out in outputs] != [part.shape for part in parts]:
            raise UnsupportedModelError(f"{name} gives more than hidden states, so its sequences cannot be taken apart")
        return torch.cat(outputs, dim=1), cache.layers[layer]

    _out, states = run(rows)
    shapes = tuple(
        StateShape(kind, index, tuple(state.shape[1:]), dtype if state.dtype == rows.dtype else state.dtype)
        for kind in ("conv_states", "recurrent_states")
        for index, state in getattr(states, kind).items()
        if state is not None
    )
    if rows.device.type == "meta":
        return LayerStates(shapes, argument, layer, stepwise=False, uneven=False)
    stepwise = uneven = False
    with in_float32(module):
        for scale in _SCALES:
            wide = rows.float() * scale
            whole, head, tail = run(wide)[0], wide[:, :_CUT], wide[:, _CUT:]
            stepwise = stepwise or _differ(run(head, tail)[0], whole)
            uneven = uneven or _differ(run(head, *tail.split(1, dim=1))[0], whole)
    if stepwise and uneven:
        raise UnsupportedModelError(
            f"{name} computes other numbers when it continues from its state, by several tokens and by single ones"
        )
    return LayerStates(shapes, argument, layer, stepwise=stepwise, uneven=uneven)


def _differ(output: torch.Tensor, expected: torch.Tensor) -> bool:
    """By more than rounding."""
    return not float((output - expected).abs().max()) < _TOLERANCE * (float(expected.abs().max()) or 1.0)
