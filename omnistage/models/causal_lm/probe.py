"""Checks at load that a causal LM computes on the paged engine what it computes in transformers, or is refused.

Two checks, because neither is enough. The attention calls of the model itself say what each layer attends to, at any
length (`recording.py`). A short text through both then compares everything else in numbers, in float32 whatever the
dtype of the weights: in float16 a wrong model can lie within the rounding of a right one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from omnistage.core.errors import StageError, UnsupportedModelError
from omnistage.engines.ar.attention import BatchLayout, PagedContext, bind_caches, current
from omnistage.engines.ar.attention.recording import AttentionCall, record_attention
from omnistage.engines.ar.attention.sdpa import SdpaBackend
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.recurrent import StatePool, StateStep, states_of
from omnistage.engines.quantisation.transform import current_quantiser
from omnistage.hf import transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_TOKENS = 12
_TOLERANCE = 1e-3
"""Of the logits' range, in float32."""
_ROUNDED_TOLERANCE = 0.1
"""The same where the model runs in the dtype of its weights only, such as quantised ones."""
_NARROW = (torch.float16, torch.bfloat16)
CACHES = ("past_key_values", "cache_params")
"""Arguments and outputs of a model that are its cache."""
_FORWARD_ERRORS = (TypeError, IndexError, KeyError, AttributeError, ValueError, RuntimeError, StageError)
"""What a model's own code may raise for a batch that it does not expect."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Logits `[n, V]` of the probe as transformers computes them."""

    logits: torch.Tensor
    wide: bool
    """In float32; else in the dtype of the weights, where the model runs in no other."""


@torch.inference_mode()
def stock_logits(model: PreTrainedModel, vocab_size: int, *, cached: bool = False) -> Expected:
    """What the engine has to compute. `cached`: with the last token alone, after the state of the others."""
    ids = torch.arange(_PROBE_TOKENS, device=model.device)[None] % vocab_size
    if getattr(model.config, "quantization_config", None) is None and current_quantiser() is None:
        try:
            with in_float32(model):
                return Expected(_logits(model, ids, cached), True)
        except (RuntimeError, TypeError):  # kernels for one dtype, or no memory for one module's weights in float32
            if model.dtype == torch.float32:
                raise
    return Expected(_logits(model, ids, cached), False)


def _logits(model: PreTrainedModel, ids: torch.Tensor, cached: bool) -> torch.Tensor:
    """`[n, V]`"""
    if not cached:
        return model(input_ids=ids, use_cache=False).logits[0]  # type: ignore[no-any-return]
    first = model(input_ids=ids[:, :-1], use_cache=True)
    name = next(name for name in CACHES if name in first)
    args = inspect.signature(model.forward).parameters
    place = {"position_ids": torch.tensor([[ids.shape[1] - 1]], device=ids.device)} if "position_ids" in args else {}
    last = model(input_ids=ids[:, -1:], use_cache=True, **{name: first[name]}, **place)
    return torch.cat((first.logits[0], last.logits[0]))


def attention_calls(
    model: PreTrainedModel, vocab_size: int, recurrent: Sequence[nn.Module] = ()
) -> list[AttentionCall]:
    """What each attention module asks for; empty on the `meta` device where the model looks at its data.

    Layers with one of the modules `recurrent` may be without attention.
    """
    _check_layer_types(model, {states_of(module).layer for module in recurrent})
    planned, dtype = model.device.type == "meta", model.dtype
    if planned:
        model.to(torch.bfloat16)  # without data, experts are multiplied in no other
    try:
        inputs: dict[str, Any] | None = None
        if recurrent:  # with a cache: masks for these layers look at one that is given, which `meta` cannot do
            name = next(name for name in CACHES if name in inspect.signature(model.forward).parameters)
            inputs = {"input_ids": torch.arange(4, device=model.device)[None] % vocab_size}
            inputs[name] = transformers.DynamicCache(config=model.config)
        calls = record_attention(model, vocab_size, inputs, required=not recurrent)
        _check_positions(calls)
        _check_cached_windows(model, calls)
        return calls
    except torch.OutOfMemoryError:
        raise
    except (NotImplementedError, *_FORWARD_ERRORS) as error:
        if planned and not recurrent:
            return []
        raise _refusal(type(model).__name__, error) from error
    finally:
        if planned:
            model.to(dtype)


def _check_layer_types(model: PreTrainedModel, recurrent: Set[int]) -> None:
    """Refuse layers that are no plain attention by their own name: sparse ones show it in long texts only."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    kinds = [kind for number, kind in enumerate(kinds) if number not in recurrent]
    others = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention", "moe", "mlp"})
    if others:
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers of the type {', '.join(others)}; the paged engine computes full and "
            "sliding-window attention"
        )


def _check_positions(calls: list[AttentionCall]) -> None:
    """Refuse attention that counts tokens in transformers' cache, as Llama 4's does from position 8,192 on."""
    for kind in {type(call.module) for call in calls}:
        try:
            source = inspect.getsource(kind.forward)
        except OSError:  # a module without its source
            continue
        if "get_seq_length" in source:
            raise UnsupportedModelError(
                f"{kind.__name__} counts positions in transformers' own cache, which the paged engine does not use"
            )


def _check_cached_windows(model: PreTrainedModel, calls: list[AttentionCall]) -> None:
    """Refuse a model whose cache in transformers drops keys that its mask shows: its answers depend on the chunking."""
    layers = transformers.DynamicCache(config=model.config).layers
    if len(layers) != len(calls):
        return
    for number, (layer, call) in enumerate(zip(layers, calls, strict=True)):
        window = layer.sliding_window if layer.is_sliding else None
        if window is not None and window != call.window:
            raise UnsupportedModelError(
                f"layer {number} of {type(model).__name__} keeps {window} tokens in transformers' cache, but its mask "
                f"shows {call.window or 'all'}, so what it attends to depends on how a prompt is cut; remove "
                "sliding_window from config.json to serve it without a window"
            )


def check_logits(component: ARComponent, name: str, expected: Expected) -> None:
    """Compare the probe on the engine with `expected`; refuse a model that differs."""
    try:
        logits = _paged_logits(component, expected.wide)
        if expected.wide and component.spec.states and component.dtype != torch.float32:
            _paged_logits(component, False)  # recurrent layers mix dtypes: whether they run in these
    except torch.OutOfMemoryError:
        raise
    except _FORWARD_ERRORS as error:
        raise _refusal(name, error) from error
    tolerance = _TOLERANCE if expected.wide else rounded_tolerance(_ROUNDED_TOLERANCE)
    scale = float(expected.logits.abs().max()) or 1.0
    worst = float((logits.float() - expected.logits.float()).abs().max()) / scale
    if not worst < tolerance:
        raise UnsupportedModelError(
            f"{name} gives other logits on the paged engine than in transformers (by {worst:.1e} of their range): it "
            "uses token ids, positions or state that a flattened batch does not carry"
        )


def rounded_tolerance(plain: float) -> float:
    """`plain`, or what quantised activations need: two orders of the same sums round some of them to other numbers."""
    quantiser = current_quantiser()
    special = quantiser.config.method.tolerance if quantiser is not None else None
    return plain if special is None else special


def _refusal(name: str, error: Exception) -> UnsupportedModelError:
    # Torch's and Python's own messages name tensors and lines of transformers, which tell a user nothing.
    detail = f": {error}" if isinstance(error, StageError) else f" ({type(error).__name__} in its forward)"
    return UnsupportedModelError(f"{name} cannot run in a flattened batch without transformers' own cache{detail}")


@torch.inference_mode()
def _paged_logits(component: ARComponent, wide: bool) -> torch.Tensor:
    """Logits `[2, n, V]` of the probe, run twice side by side and in three steps.

    A model that remembers elsewhere than in the pool, or lets neighbours see each other, does not come through.
    """
    device, model = component.device, component.modules[0]
    ids = torch.arange(_PROBE_TOKENS, device=device) % component.spec.vocab_size
    dtype = torch.float32 if wide else component.dtype
    caches = component.spec.empty_caches(2, _PROBE_TOKENS, lambda shape: torch.zeros(shape, device=device, dtype=dtype))
    bind_caches(component.attention_modules, caches)
    states = StatePool(
        component.recurrent_modules,
        2,
        lambda shape, kind: torch.zeros(shape, device=device, dtype=torch.float32 if wide else kind),
    )
    backend = SdpaBackend()
    slots = [np.arange(_PROBE_TOKENS) + i * _PROBE_TOKENS for i in range(2)]
    tables = [np.asarray([i], dtype=np.int32) for i in range(2)]
    parts, last = [], _PROBE_TOKENS - 1
    with in_float32(model) if wide else nullcontext():
        for start, end in ((0, _PROBE_TOKENS // 2), (_PROBE_TOKENS // 2, last), (last, _PROBE_TOKENS)):
            positions = np.arange(start, end)
            counts, lengths = (np.full(2, n, dtype=np.int32) for n in (len(positions), end))
            where = torch.from_numpy(np.concatenate([s[positions] for s in slots])).to(device)
            layout = BatchLayout(counts, lengths, slots, tables)
            places = torch.from_numpy(np.concatenate([positions] * 2)).to(device)
            paged = current.paged = PagedContext(backend, where, backend.plan(layout, device))
            with states.computing(StateStep.of(layout, (0, 1), device)):
                hidden = component.forward(component.embed(ids[places]), places[None], paged)
            parts.append(component.logits(hidden).view(2, len(positions), -1))
    return torch.cat(parts, dim=1)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Run `model` in float32, with the weights of one module converted at a time: no second copy of all of them."""
    handles, originals = [], {}

    def widen(module: nn.Module, _args: object) -> None:
        originals[module] = module._parameters, module._buffers
        module._parameters = {name: module._parameters[name] for name in module._parameters}
        module._buffers = {name: module._buffers[name] for name in module._buffers}

    def restore(module: nn.Module, _args: object, _output: object) -> None:
        module._parameters, module._buffers = originals.pop(module)

    modules: list[nn.Module] = []
    if any(p.dtype in _NARROW for p in model.parameters()):
        modules += (module for module in model.modules() if module._parameters or module._buffers)
    for module in modules:
        module._parameters, module._buffers = _Widened(module._parameters), _Widened(module._buffers)
        handles.append(module.register_forward_pre_hook(widen))
        handles.append(module.register_forward_hook(restore, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in modules:
            module._parameters, module._buffers = dict(module._parameters), dict(module._buffers)


class _Widened(dict[str, Any]):
    """Weights of a module that does not run, each converted when another module reads it, as Mamba's do."""

    def items(self) -> Any:
        """One after the other: a model that asks for its own dtype looks at the first."""
        return ((name, self[name]) for name in self)

    def __getitem__(self, name: str) -> Any:
        weight = super().__getitem__(name)
        if weight is None or weight.dtype not in _NARROW:
            return weight
        wide = weight.float()
        return nn.Parameter(wide, requires_grad=False) if isinstance(weight, nn.Parameter) else wide
