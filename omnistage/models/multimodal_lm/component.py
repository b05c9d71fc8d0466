"""A multimodal LM of `transformers`, unpatched, on the autoregressive engine.

Text goes as with any causal LM. A media item is merged with its placeholders by the model's own forward, which runs up
to the decoder (`capture.py`); the rows that arrive there are the item's, whatever prompt it stands in.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from omnistage.compat import prepare_torchvision
from omnistage.core.errors import LimitExceededError, StageError, UnsupportedModalityError, UnsupportedModelError
from omnistage.core.family import LoadContext
from omnistage.core.types import ARInput, MediaSpan, Modality, RequestInfo
from omnistage.engines.ar.component import ARComponent
from omnistage.hf import transformers
from omnistage.models._qwen_omni.positions import rope_positions, vision_bytes
from omnistage.models.causal_lm.component import CausalLM, read_model
from omnistage.models.causal_lm.component import load as load_causal_lm
from omnistage.models.loading import nested_settings, read_auto_config
from omnistage.models.multimodal_lm.capture import DecoderCapture, DecoderInputs, DependentItemsError
from omnistage.models.multimodal_lm.processor import MultimodalProcessor, auto_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from omnistage.engines.ar.sharding import RankGroup

_BESIDE = ("cross_attention_layers", "cross_layer_interval")
"""Settings of decoders some of whose layers attend to media."""


class MultimodalLM(CausalLM):
    """Adapter around the decoder and head of `AutoModelForMultimodalLM`, with all that the model has before them."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
        encoders = [(config, config._attn_implementation) for config in _encoder_configs(model)]
        self.stock_attention: str = model.get_decoder().config._attn_implementation
        self._placeholder_rows: dict[int, torch.Tensor] = {}
        try:
            super().__init__(model, tokenizer)
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not run on text without media ({type(error).__name__}), so it is no "
                "decoder of merged embeddings; such models are not served"
            ) from error
        for settings, implementation in encoders:
            settings._attn_implementation = implementation
        self.unsupported: dict[Modality, str] = {}
        """Kinds of media that the processor takes and that would not be answered exactly, with the reason."""
        self.both_ways_ids: frozenset[int] = frozenset()
        """Token ids of media that attend to later tokens of their run; known once media were tried."""
        self.both_ways_limit = float("inf")
        """Tokens of the longest run of which that is known."""
        self._capture = DecoderCapture(model, self.decoder)
        self._rope = next((module for module in model.modules() if hasattr(module, "get_rope_index")), None)
        vision = getattr(model.config, "vision_config", None)
        levels = len(getattr(vision, "deepstack_visual_indexes", None) or ())
        self.spec = replace(
            self.spec,
            position_dims=1 if self._rope is None else 3,
            deep_size=levels * self.spec.embed_size,
        )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = super().embed(token_ids)
        for token, row in self._placeholder_rows.items():
            rows = torch.where((token_ids == token)[:, None], row, rows)
        return rows

    def note_placeholders(self, token_ids: Iterable[int]) -> None:
        """Find placeholders that the model embeds as something else where they are sampled: some as their padding."""
        for token in token_ids:
            ids = torch.tensor([[token]], device=self.device)
            try:
                row = self._capture.run({"input_ids": ids}).embeds[0]
            except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, UnsupportedModelError):
                continue  # the model takes none without media
            if not torch.equal(row, super().embed(ids[0])[0]):
                self._placeholder_rows[token] = row

    def check(self, info: RequestInfo, payload: ARInput) -> None:
        del info
        for span in payload.media:
            if span.kind in self.unsupported:
                raise UnsupportedModalityError(self.unsupported[span.kind], param="messages")

    def prepare(self, info: RequestInfo, payload: ARInput) -> ARInput:
        del info
        if self.both_ways_ids and payload.media:
            payload = replace(payload, both_ways=self._both_ways(payload))
        if self._rope is None or not payload.media:
            return payload
        positions, delta = rope_positions(self._rope, payload.token_ids, payload.context)
        return replace(payload, positions=positions, position_delta=int(delta))

    def _both_ways(self, payload: ARInput) -> tuple[tuple[int, int], ...]:
        """The runs of those tokens that attend to later ones of their run, in its media."""
        where = sorted(place for span in payload.media for place in span.positions.tolist())
        places = [place for place in where if payload.token_ids[place] in self.both_ways_ids]
        ranges: list[tuple[int, int]] = []
        for place in places:
            first = ranges.pop()[0] if ranges and ranges[-1][1] == place else place
            ranges.append((first, place + 1))
        longest = max((end - start for start, end in ranges), default=0)
        if longest > self.both_ways_limit:
            raise LimitExceededError(
                f"{longest} tokens of media in a row attend to each other, and only up to {self.both_ways_limit} were "
                "compared with transformers at load; send smaller media, or put text between them",
                param="messages",
            )
        return tuple(ranges)

    def shard(self, group: RankGroup, device: torch.device) -> None:
        if self.both_ways_ids:
            raise UnsupportedModelError(
                f"the pictures of {type(self.model).__name__} attend both ways, which is not computed on several ranks "
                "yet: set tensor_parallel: 1 for its stage"
            )
        super().shard(group, device)

    def encode(self, span: MediaSpan) -> torch.Tensor:
        if not len(span.positions):  # another holds the rows of all
            return torch.empty(0, self.spec.embed_size, device=self.device, dtype=self.dtype)
        inputs = self.captured(span.inputs)
        if inputs.deep is not None and inputs.deep.shape[1] != self.spec.deep_size:
            raise StageError(f"media give {inputs.deep.shape[1]} numbers a token for deeper layers, not as planned")
        return inputs.rows()

    def captured(self, inputs: Mapping[str, torch.Tensor]) -> DecoderInputs:
        """What the model's forward hands to its decoder for a processor's outputs."""
        return self._capture.run(self.on_device(inputs))

    def on_device(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the model takes of a processor's outputs, in its dtype."""
        return {
            name: value.to(self.device, self.dtype if value.is_floating_point() else None)
            for name, value in inputs.items()
            if self._capture.accepts(name)
        }

    def media_bytes(self, tokens: int) -> int:
        return encoder_bytes(self.model.config, self.dtype, tokens)


def load(context: LoadContext) -> ARComponent:
    """The component of a model folder: on the paged engine, or where that cannot be with transformers' own cache."""
    prepare_torchvision(required=False)
    folder, planned = context.model.folder, context.device.type == "meta"
    auto = auto_model(str(read_auto_config(folder).model_type))
    processor = None if planned else MultimodalProcessor.load(folder)
    try:
        return _paged(context, auto, processor)
    except UnsupportedModelError as error:
        reason, dependent = str(error), isinstance(error, DependentItemsError)
    if processor is not None and dependent:
        gc.collect()  # two copies need not fit
        processor.use_whole_prompts(rows=True)
        try:
            return _paged(context, auto, processor)
        except UnsupportedModelError as error:
            reason = str(error)
    from omnistage.models.multimodal_lm.grouped import GroupedMultimodalLM
    from omnistage.models.multimodal_lm.own_cache import OwnCacheMultimodalLM

    gc.collect()
    if processor is None:  # what sequences keep of media is in the plan
        processor = MultimodalProcessor.load(folder)
    processor.use_whole_prompts()
    processor.check_media()
    model, tokenizer = read_model(context, auto)
    settings = model.generation_config
    try:
        return GroupedMultimodalLM(model, tokenizer, processor, reason=reason)
    except UnsupportedModelError as error:
        reason = f"{reason}; {error}"
    model.generation_config = settings  # what was tried has put its own there, without the end tokens
    return OwnCacheMultimodalLM(model, tokenizer, processor, reason=reason)


def _paged(context: LoadContext, auto: Any, processor: MultimodalProcessor | None) -> MultimodalLM:
    """The component on the paged engine, compared with transformers on prompts with media."""
    config = read_auto_config(context.model.folder).get_text_config()
    if any(getattr(config, name, None) for name in _BESIDE):  # without weights nothing else shows it
        raise UnsupportedModelError(f"layers of a {config.model_type} attend to pictures beside the text")
    component = load_causal_lm(context, MultimodalLM, auto)
    if len(component.attention_modules) != len(component.spec.kv_shapes):  # on the meta device nothing else shows it
        raise UnsupportedModelError(f"{type(component.model).__name__} computes attention in its own code")
    if processor is not None:
        from omnistage.models.multimodal_lm.probe import STOCK_FAILURE, check_media

        processor.check_media()
        # Also those of kinds that are not served: any of them may be sampled.
        settings = nested_settings(component.model.config.to_dict())
        ids = {value for name, value in settings if name.endswith(("_id", "_index")) and type(value) is int}
        component.note_placeholders(token for token in ids if 0 <= token < component.spec.vocab_size)
        refusals = check_media(component, processor)
        for error in refusals.values():
            # Of a recurrent model transformers' own cache serves all kinds.
            if isinstance(error, DependentItemsError) or (component.spec.states and STOCK_FAILURE not in error.message):
                raise error
        component.spec = replace(component.spec, whole_media=processor.whole)
        component.unsupported = {kind: error.message for kind, error in refusals.items()}
    return component


def encoder_bytes(config: Any, dtype: torch.dtype, tokens: int) -> int:
    """Peak memory of encoding pictures that take this many tokens, where the config tells."""
    vision = getattr(config, "vision_config", None)
    sizes = ("temporal_patch_size", "patch_size", "hidden_size", "intermediate_size", "spatial_merge_size")
    if vision is None or not all(isinstance(getattr(vision, name, None), int) for name in sizes):
        return 0
    return vision_bytes(vision, dtype, tokens)


def _encoder_configs(model: PreTrainedModel) -> list[Any]:
    """The configs of all parts of it that are neither its decoder nor lead to it, each after those around it.

    Not every part is a model of its own: layers of Fun-ASR's projector read a config inside the model's.
    """
    decoder: nn.Module = model.get_decoder()
    inside = set(decoder.modules())
    modules = [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
    leading = [module for module in modules if module in inside or any(child is decoder for child in module.modules())]
    of_decoder = {id(model.config.get_text_config()), *(id(module.config) for module in leading)}
    configs = [module.config for module in modules if module not in leading]
    pending = [model.config]
    while pending:
        config = pending.pop()
        configs.append(config)
        inner = (getattr(config, name, None) for name in config.sub_configs)
        pending += [part for part in inner if isinstance(part, transformers.PreTrainedConfig)]
    return [config for config in configs if id(config) not in of_decoder]
