"""A `transformers` causal LM, unpatched, on the autoregressive engine."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from omnistage.core.errors import CheckpointError, UnsupportedModelError
from omnistage.core.family import LoadContext
from omnistage.engines.ar.attention.window_check import check_windows
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.recurrent import make_recurrent
from omnistage.hf import transformers
from omnistage.models import loading
from omnistage.models.causal_lm.embedding import model_embedding
from omnistage.models.causal_lm.head import ModelHead, model_head
from omnistage.models.causal_lm.own_cache import OwnCacheLM
from omnistage.models.causal_lm.own_forward import OwnForwardLM
from omnistage.models.causal_lm.probe import Expected, attention_calls, check_logits, stock_logits
from omnistage.models.causal_lm.processor import load_tokenizer
from omnistage.models.causal_lm.recurrent import find_recurrent
from omnistage.models.decoder import DecoderComponent
from omnistage.models.prequantised import check_quantisation

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from omnistage.engines.ar.sharding import RankGroup


_MAX_REASON_CHARS = 200

logger = logging.getLogger(__name__)


class CausalLM(DecoderComponent):
    """Adapter around `AutoModelForCausalLM`'s decoder and head."""

    pure_forward = True

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
        config = model.config.get_text_config()
        vocab_size, max_length = loading.positive(config, "vocab_size"), loading.max_sequence_length(config)
        recurrent = find_recurrent(model, vocab_size)
        if not recurrent:
            loading.kv_shape(config)  # a config that is no transformer's is refused before it is run
        planned = model.device.type == "meta"  # there are no numbers to compare
        expected = None if planned else stock_logits(model, vocab_size, cached=bool(recurrent))
        self._recurrent = [make_recurrent(module, states) for module, states in recurrent]
        calls = attention_calls(model, vocab_size, self._recurrent)
        for call in calls:
            setattr(call.module, "paged_window", call.window)  # noqa: B010  (torch types attributes as tensors)
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        if not isinstance(decoder, transformers.PreTrainedModel):  # ModernBERT calls its head so
            decoder = model.base_model
        super().__init__(
            model,
            decoder,
            head,
            config,
            max_length=max_length,
            layer_shapes=tuple((call.kv_heads, call.key_dim, call.value_dim) for call in calls),
            plain_attention=all(call.plain for call in calls),
            states=tuple(states.shapes for _module, states in recurrent),
            uneven_states=any(states.uneven for _module, states in recurrent),
        )
        self._attention_modules = [call.module for call in calls]
        self._head = model_head(model, decoder, head)
        if recurrent:  # of the others, none with a scale of the decoder's own is known
            self._embedding = model_embedding(decoder, self._embedding)
        self.tokenizer = tokenizer
        self.eos_token_ids = loading.end_token_ids(model.generation_config, config, tokenizer)
        if expected is not None:
            check_windows(calls)
            self._check_same(expected)
        if recurrent:
            logger.info(
                "%s has recurrent layers, whose state holds all tokens at once: prompts reuse no prefixes of others",
                type(model).__name__,
            )

    @property
    def attention_modules(self) -> Sequence[nn.Module]:
        return self._attention_modules or super().attention_modules

    @property
    def recurrent_modules(self) -> Sequence[nn.Module]:
        return self._recurrent

    @property
    def heads(self) -> tuple[nn.Module, ...]:
        head = self.model.get_output_embeddings()
        return () if head is None else (head,)

    def shard(self, group: RankGroup, device: torch.device) -> None:
        if self.spec.states:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has recurrent layers, which are not divided among ranks yet: set "
                "tensor_parallel: 1 for its stage"
            )
        head = self._head
        if isinstance(head, ModelHead):
            self._head = self.model.get_output_embeddings()
        super().shard(group, device)
        if isinstance(head, ModelHead):
            self._head = head.rebuilt(self.model)

    def _check_same(self, expected: Expected) -> None:
        """Refuse a model that does more than a plain decoder and head: it would give wrong answers."""
        check_logits(self, type(self.model).__name__, expected)


Component = TypeVar("Component", bound=CausalLM)


def load(context: LoadContext, adapter: type[Component] = CausalLM, auto: Any = None) -> Component:  # type: ignore[assignment]
    """A model folder's component on the paged engine; `adapter` is its class, `auto` transformers' own of its model."""
    return adapter(*read_model(context, auto))


def load_any(context: LoadContext) -> ARComponent:
    """The component of a model folder: on the paged engine, or where that cannot be with transformers' own cache."""
    model, tokenizer = read_model(context)
    try:
        return CausalLM(model, tokenizer)
    except UnsupportedModelError as error:
        reason = str(error)
    # Read again: what was tried has changed the model's attention and its layers. Two copies need not fit.
    del model
    gc.collect()
    model, tokenizer = read_model(context)
    settings = model.generation_config
    try:
        return OwnForwardLM(model, tokenizer, reason=reason)
    except UnsupportedModelError:
        model.generation_config = settings  # what was tried has put its own there, without the end tokens
        return OwnCacheLM(model, tokenizer, reason=reason)


def read_model(context: LoadContext, auto: Any = None) -> tuple[PreTrainedModel, PreTrainedTokenizerFast | None]:
    """The model of a folder with its tokenizer; on the `meta` device without both weights and tokenizer."""
    folder = context.model.folder
    auto = auto or transformers.AutoModelForCausalLM
    if context.device.type == "meta":
        return _skeleton(folder, None, auto).to(context.dtype), None
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} has no safetensors weights; convert the model first")
    generation = loading.read_generation_config(folder)
    options: dict[str, Any] = {
        "dtype": context.dtype,
        "ignore_mismatched_sizes": True,  # so that we can name them
        "output_loading_info": True,
        **loading.straight_to(context.device),
    }
    checkpoint = loading.Checkpoint(folder)
    skeleton = _skeleton(folder, checkpoint, auto)
    try:
        straight = loading.straight_to(context.device) and not check_quantisation(skeleton.config)
        if straight or checkpoint.is_quantised:
            tensors = loading.read_weights(context)
            model, info = type(skeleton).from_pretrained(None, config=skeleton.config, state_dict=tensors, **options)
        else:
            options |= {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
            model, info = auto.from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"transformers cannot load {folder}: {error}") from error
    loading.check_complete(type(model).__name__, info)
    if generation is not None:
        model.generation_config = generation
    return loading.on_device(model, context.device), load_tokenizer(folder)


def _skeleton(folder: Path, weights: loading.Checkpoint | None, auto: Any) -> PreTrainedModel:
    """The model without weights; with those of its checkpoint, a config that asks for far more is found out here."""
    config = loading.read_auto_config(folder)
    loading.check_repeats(config.to_dict(), 0 if weights is None else len(list(weights.names())))
    try:
        with torch.device("meta"):
            skeleton: PreTrainedModel = auto.from_config(config, trust_remote_code=False)
    except (ImportError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError) as error:
        loading.check_sizes(config)
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} cannot make the {config.model_type} that config.json describes "
            f"({type(error).__name__}: {reason})"
        ) from error
    if weights is not None:
        # Up to sixteen quantised numbers lie packed in one.
        loading.check_size(skeleton, weights.num_elements() * (16 if check_quantisation(config) else 1))
    return skeleton
