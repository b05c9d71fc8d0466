"""Checks at load that prompts with media give on the engine what they give in transformers, or the model is refused.

For each kind of media: a chat of two items goes through transformers' processor and forward as a whole, and through
ours item by item. Token ids, what arrives at the decoder, the attention masks and the logits are compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from omnistage.core.errors import InvalidRequestError, MediaError, OmniError, UnsupportedModelError
from omnistage.core.messages import ChatMessage, Part, TextPart
from omnistage.core.types import ARInput, Modality, RequestInfo
from omnistage.engines.ar.attention import BatchLayout, PagedContext, bind_caches, current
from omnistage.engines.ar.attention.recording import record_attention
from omnistage.engines.ar.attention.sdpa import SdpaBackend
from omnistage.engines.ar.recurrent import StatePool, StateStep
from omnistage.models.causal_lm.own_model import difference
from omnistage.models.causal_lm.probe import in_float32, rounded_tolerance
from omnistage.models.loading import use_paged_attention
from omnistage.models.multimodal_lm.capture import DecoderInputs, DependentItemsError
from omnistage.models.multimodal_lm.component import MultimodalLM
from omnistage.models.multimodal_lm.processor import MultimodalProcessor
from omnistage.models.multimodal_lm.verify import media_part

_TOLERANCE = 1e-3
"""Of the numbers' range; the rows and logits of other dtypes are rounded."""
_ROUNDED_TOLERANCE = 0.05
STOCK_FAILURE = "transformers' own forward does not take what its processor gives; check the checkpoint's files"
_FORWARD_ERRORS = (TypeError, IndexError, KeyError, AttributeError, ValueError, RuntimeError, OmniError)


def check_media(component: MultimodalLM, processor: MultimodalProcessor) -> dict[Modality, UnsupportedModelError]:
    """Kinds of media whose prompts would be answered otherwise than by transformers, with the reason.

    Raises where there is no other kind.
    """
    kinds = sorted(processor.input_modalities - {Modality.TEXT})
    refusals: dict[Modality, UnsupportedModelError] = {}
    for kind in kinds:
        try:
            _check_kind(component, processor, kind)
        except UnsupportedModelError as error:
            refusals[kind] = error
    if len(refusals) == len(kinds):
        raise min(refusals.values(), key=_rank)
    return refusals


def _rank(error: UnsupportedModelError) -> int:
    """The lower, the more it says of what is served, and the sooner there is another way."""
    return 0 if isinstance(error, DependentItemsError) else 1 + (STOCK_FAILURE in error.message)


def _check_kind(component: MultimodalLM, processor: MultimodalProcessor, kind: Modality) -> None:
    name = f"{type(component.model).__name__} with {kind} input"
    try:
        inputs, payload = _probe_inputs(processor, kind)
        expected, logits, ranges = _stock(name, component, inputs)
        component.both_ways_ids |= {payload.token_ids[place] for start, end in ranges for place in range(start, end)}
        component.note_placeholders({payload.token_ids[i] for s in payload.media for i in s.positions.tolist()})
        ours = component.prepare(RequestInfo("probe"), payload)
        rows, deep = _rows(component, ours)
        _compare(name, component, expected, ours, rows, deep)
        if ours.both_ways != ranges:
            raise UnsupportedModelError(f"{name}: other tokens than runs of those of media attend to later ones")
        ours_logits = _paged_logits(component, ours, rows, deep)
    except UnsupportedModelError:
        raise
    except torch.OutOfMemoryError:
        raise
    except _FORWARD_ERRORS as error:
        detail = str(error) if isinstance(error, OmniError) else type(error).__name__
        raise UnsupportedModelError(f"{name} cannot be run as the engine does: {detail}") from error
    if (worst := difference(ours_logits, logits)) >= _tolerance(component.dtype):
        raise UnsupportedModelError(
            f"{name} gives other logits on the paged engine than in transformers (by {worst:.1e} of their range)"
            + _others(expected)
        )
    if component.dtype != torch.float32:
        _check_in_float32(name, component, inputs, ours)


def _check_in_float32(name: str, component: MultimodalLM, inputs: dict[str, torch.Tensor], payload: ARInput) -> None:
    """What rounding hides in narrower dtypes, where the model runs in float32 at all."""
    if getattr(component.model.config, "quantization_config", None) is not None:
        return
    dtype, component.dtype = component.dtype, torch.float32
    try:
        with in_float32(component.model):
            logits = _stock(name, component, inputs)[1]
            got = _paged_logits(component, payload, *_rows(component, payload))
    except _FORWARD_ERRORS:  # kernels for one dtype, a tower that narrows its input, no memory
        return
    finally:
        component.dtype = dtype
    if (worst := difference(got, logits)) >= rounded_tolerance(_TOLERANCE):
        raise UnsupportedModelError(
            f"{name} gives other logits on the paged engine than in transformers (by {worst:.1e} of their range in "
            "float32)"
        )


def _probe_inputs(processor: MultimodalProcessor, kind: Modality) -> tuple[dict[str, torch.Tensor], ARInput]:
    """Two items in one chat, by transformers' processor as a whole and by ours; one where it takes only one."""
    for count in (2, 1):
        parts: list[Part] = [TextPart("a b")]
        for number in range(count):
            parts += [media_part(processor, kind, number), TextPart(f"c {number}")]
        messages = [ChatMessage("user", tuple(parts))]
        try:
            rendered, media, _guarded = processor.rendered(messages)
            outputs = processor.items.call(rendered, media)[1]
            payload = processor.chat(messages)
        except (MediaError, InvalidRequestError):
            if count == 1:
                raise
            continue
        inputs = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
        ids = tuple(inputs["input_ids"][0].tolist())
        if ids != payload.token_ids:
            raise DependentItemsError(
                f"the processor writes other tokens for a chat with {count} {kind} items than for its text and each "
                "item apart, so items cannot be encoded one by one"
            )
        return inputs, payload
    raise UnsupportedModelError(f"the processor takes no {kind}")


@torch.inference_mode()
def _stock(
    name: str, component: MultimodalLM, inputs: dict[str, torch.Tensor]
) -> tuple[DecoderInputs, torch.Tensor, tuple[tuple[int, int], ...]]:
    """What transformers hands to the decoder, its logits `[n, V]`, and which tokens attend both ways.

    Refuses other masks.
    """
    own = component.on_device(inputs)
    model: Any = component.model
    decoder: Any = component.decoder
    try:
        decoder.set_attn_implementation(component.stock_attention)
        logits = model(**own, use_cache=False).logits[0]
        expected = component.captured(inputs)
        calls = record_attention(model, component.spec.vocab_size, own, decoder, ranges=True)
    except OmniError:
        raise
    except _FORWARD_ERRORS as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise UnsupportedModelError(f"{name}: {STOCK_FAILURE} ({reason[:200]})") from error
    finally:
        use_paged_attention(decoder)
    ranges = {call.both_ways for call in calls if call.both_ways}
    if len(ranges) > 1:
        raise UnsupportedModelError(f"{name}: other tokens attend both ways in one layer than in another")
    if ranges and component.spec.states:
        raise UnsupportedModelError(f"{name}: its tokens attend both ways beside recurrent layers")
    for call in calls:
        # Once for any kind of media: a module that looks ahead in none of its ranges sees none.
        ahead = bool(call.both_ways) or getattr(call.module, "paged_ahead", False)
        setattr(call.module, "paged_ahead", ahead)  # noqa: B010  (torch types attributes as tensors)
        if call.window and call.both_ways and max(end - start for start, end in call.both_ways) <= call.window:
            # Whether the window cuts a longer range is not seen here: Gemma's does, that of transformers' default not.
            component.both_ways_limit = min(component.both_ways_limit, call.window)
    return expected, logits, next(iter(ranges), ())


@torch.inference_mode()
def _rows(component: MultimodalLM, payload: ARInput) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Embeddings `[n, E]` of the prompt and its rows `[n, deep_size]` for deeper layers, as the engine puts them."""
    size = component.spec.embed_size
    embeds = component.embed(torch.tensor(payload.token_ids, device=component.device)).clone()
    deep = embeds.new_zeros(len(embeds), component.spec.deep_size) if component.spec.deep_size else None
    for span in payload.media:
        encoded = component.encode(span).to(embeds.dtype)
        embeds[span.positions] = encoded[:, :size]
        if deep is not None and encoded.shape[1] > size:
            deep[span.positions] = encoded[:, size:]
    return embeds, deep


def _compare(
    name: str,
    component: MultimodalLM,
    expected: DecoderInputs,
    payload: ARInput,
    rows: torch.Tensor,
    deep: torch.Tensor | None,
) -> None:
    tolerance = _tolerance(component.dtype)
    if (worst := difference(rows, expected.embeds)) >= tolerance:
        raise DependentItemsError(
            f"{name}: the rows of a media item depend on the rest of the prompt (by {worst:.1e} of their range), so "
            "items cannot be encoded one by one"
        )
    if not torch.equal(_positions(component, payload), _expected_positions(component, expected, len(rows))):
        raise UnsupportedModelError(f"{name} counts positions by a rule of its own, which is not served yet")
    if expected.deep is not None and (deep is None or difference(deep, expected.deep) >= tolerance):
        raise UnsupportedModelError(f"{name}: what media add to deeper layers depends on the rest of the prompt")


def _positions(component: MultimodalLM, payload: ARInput) -> torch.Tensor:
    positions = payload.positions
    if positions is None:
        positions = torch.arange(len(payload.token_ids))
    return _at_least_2d(positions).expand(component.spec.position_dims, -1)


def _expected_positions(component: MultimodalLM, expected: DecoderInputs, count: int) -> torch.Tensor:
    if expected.positions is None:
        return torch.arange(count).expand(component.spec.position_dims, -1)
    # Some models put the plain positions, by which they mask, before the three of m-RoPE.
    return _at_least_2d(expected.positions)[-component.spec.position_dims :]


def _at_least_2d(positions: torch.Tensor) -> torch.Tensor:
    return positions.reshape(-1, positions.shape[-1]).cpu()


@torch.inference_mode()
def _paged_logits(
    component: MultimodalLM, payload: ARInput, embeds: torch.Tensor, deep: torch.Tensor | None
) -> torch.Tensor:
    """Logits `[n, V]` of the prompt on the paged engine, in three steps."""
    device, count = component.device, len(embeds)
    new = component.spec.empty_caches(1, count, lambda shape: torch.zeros(shape, device=device, dtype=component.dtype))
    bind_caches(component.attention_modules, new)
    states = StatePool(
        component.recurrent_modules, 1, lambda shape, dtype: torch.zeros(shape, device=device, dtype=dtype)
    )
    backend, slots, table = SdpaBackend(), np.arange(count), np.zeros(1, dtype=np.int32)
    positions = _positions(component, payload).to(device)
    media = torch.zeros(count, dtype=torch.bool, device=device)
    for span in payload.media:
        media[span.positions] = True
    parts = []
    middle = next((first or last for first, last in payload.both_ways if first < count // 2 < last), count // 2)
    for start, end in ((0, middle), (middle, count - 1), (count - 1, count)):
        queries, length = (np.full(1, n, dtype=np.int32) for n in (end - start, end))
        ends = np.arange(start, end) + 1
        for first, last in payload.both_ways:
            ends[max(first - start, 0) : max(last - start, 0)] = last
        layout = BatchLayout(queries, length, [slots], [table], [ends] if payload.both_ways else None)
        where = torch.arange(start, end, device=device)
        paged = current.paged = PagedContext(backend, where, backend.plan(layout, device))
        arguments = embeds[start:end], positions[:, start:end].contiguous(), paged
        with states.computing(StateStep.of(layout, (0,), device)):
            if deep is not None and bool(media[start:end].any()):
                places = media[start:end]
                hidden = component.forward_media(*arguments, places, deep[start:end][places])
            else:
                hidden = component.forward(*arguments)
        parts.append(component.logits(hidden))
    return torch.cat(parts)


def _tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCE if dtype == torch.float32 else rounded_tolerance(_ROUNDED_TOLERANCE)


def _others(expected: DecoderInputs) -> str:
    if not expected.others:
        return ""
    return f"; its decoder also takes {', '.join(expected.others)}, which a flattened batch does not carry"
