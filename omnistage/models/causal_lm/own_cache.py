"""A causal LM as `transformers` itself runs it: its own forward and its own cache, one sequence at a time.

For models that cannot run in a flattened batch over the paged cache: recurrent layers, attention in their own code,
positions or masks that only their own cache knows. Exact, and slow.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from omnistage.core.errors import UnsupportedModelError
from omnistage.core.types import MediaSpan
from omnistage.engines.ar.component import ARSpec, OwnSequence, OwnState
from omnistage.hf import transformers
from omnistage.models.causal_lm.own_model import (
    MODEL_ERRORS,
    NEW_TOKENS,
    USUAL_LENGTH,
    Generated,
    Inputs,
    OwnModelLM,
    difference,
    generated,
)
from omnistage.models.loading import max_sequence_length, positive

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_PROMPTS = ((5, 9, 2, 7, 3, 8, 4, 6, 1, 5, 3), (8, 2, 6, 4, 7, 3))
_TOLERANCE = 1e-3
"""Of the logits' range: both sides run the same operators over the same shapes."""
_CUTS = (5, 9)
_CAUSAL_TOLERANCE, _ROUNDED_TOLERANCE = 1e-3, 0.05
"""Of the same text cut there, in float32 and in narrower dtypes; sparse attention may differ at one of the cuts."""

Prompt = tuple[torch.Tensor, Inputs]
"""Token ids `int64 [n]`, and media."""

logger = logging.getLogger(__name__)


class OwnCacheLM(OwnModelLM):
    """Adapter around `AutoModelForCausalLM` and what its `generate` does for one token after the other."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None = None, *, reason: str = ""
    ) -> None:
        """`reason`: why it is not served from the paged cache."""
        # An answer of an encoder's decoder begins with these.
        super().__init__(model, tokenizer, keep=("bos_token_id", "decoder_start_token_id"))
        config, name = self.config, type(model).__name__
        vocab_size, width = positive(config, "vocab_size"), 0
        if model.device.type == "meta":
            state = _planned_state(model, config)
        else:
            try:
                width, state = self._probe(vocab_size)
            except torch.OutOfMemoryError:
                raise
            except MODEL_ERRORS as error:
                raise UnsupportedModelError(
                    f"{name} cannot be served: transformers' own generate fails with it ({type(error).__name__})"
                ) from error
            self._warn(name, reason and f": {reason}")
        self.spec = ARSpec(
            num_layers=0,
            num_kv_heads=0,
            head_dim=0,
            vocab_size=width or vocab_size,
            prompt_vocab_size=vocab_size,
            embed_size=positive(config, "hidden_size"),
            max_length=max_sequence_length(config),
            usual_length=USUAL_LENGTH,
            own_state=state,
        )

    def _warn(self, name: str, reason: str) -> None:
        logger.warning(
            "%s is served slowly, one sequence at a time with transformers' own cache and without prefix reuse%s",
            name,
            reason,
        )

    def open_sequence(self, media: Sequence[MediaSpan] = ()) -> OwnSequence:
        del media
        return GeneratedSequence(self.model)

    def _prompts(self, vocab_size: int) -> list[Prompt]:
        """What the model is tried with, text first."""
        return [(torch.tensor(ids, device=self.device) % vocab_size, {}) for ids in _PROMPTS]

    @torch.inference_mode()
    def _probe(self, vocab_size: int) -> tuple[int, OwnState]:
        """Compare what will be served with `generate`; the width of logits and what a sequence takes."""
        model, name, prompts = self.model, type(self.model).__name__, self._prompts(vocab_size)
        expected = [generated(model, *prompt) for prompt in prompts]
        # In turn: a model that remembers anywhere but in its cache, as RecurrentGemma does, takes one for the other.
        alone = not _same(model, prompts, expected)
        if alone and not all(_same(model, prompts[i : i + 1], expected[i : i + 1]) for i in range(len(prompts))):
            raise UnsupportedModelError(f"{name} gives other logits each time; it cannot be served")
        self._check_causal(prompts[0][0])
        (ids, inputs), sizes = prompts[-1], []
        sequence = GeneratedSequence(model, inputs)
        for part in (ids, ids[:1], ids[:1]):
            sequence.forward(part)
            sizes.append(sequence.num_bytes())
        growth = max(0, sizes[2] - sizes[1])
        return expected[0][1][0].shape[-1], OwnState(growth, max(0, sizes[2] - growth * (len(ids) + 2)), alone)

    def _check_causal(self, ids: torch.Tensor) -> None:
        model, whole = self.model, self.model(input_ids=ids[None], use_cache=False).logits[0]
        gaps = [difference(whole[cut - 1], GeneratedSequence(model).forward(ids[:cut])) for cut in _CUTS]
        if not min(gaps) < (_CAUSAL_TOLERANCE if self.dtype == torch.float32 else _ROUNDED_TOLERANCE):
            raise UnsupportedModelError(
                f"{type(model).__name__} gives other logits for the same text where the prompt ends elsewhere, as an "
                "encoder does: its tokens attend to later ones, and only causal models are served"
            )


def _same(model: PreTrainedModel, prompts: Sequence[Prompt], expected: Sequence[Generated]) -> bool:
    """Whether the sequences, computed in turn, give what `generate` gives for each."""
    sequences = [GeneratedSequence(model, inputs) for _, inputs in prompts]
    for step in range(NEW_TOKENS):
        for (ids, _), sequence, (tokens, logits) in zip(prompts, sequences, expected, strict=True):
            row = sequence.forward(tokens[step - 1, None] if step else ids)
            if not difference(row, logits[step]) < _TOLERANCE:
                return False
    return True


class GeneratedSequence(OwnSequence):
    """One sequence, prepared and continued as `generate` does it."""

    def __init__(self, model: PreTrainedModel, inputs: Inputs | None = None) -> None:
        """`inputs`: the media of its prompt, which comes first and whole."""
        self._model = model
        """That which generates: with media some models have another one inside do it."""
        self._inputs = dict(inputs or {})
        self._ids: torch.Tensor | None = None
        """`[1, n]`: all tokens so far; of an encoder's decoder, its own."""
        self._arguments: dict[str, Any] = {}
        """Of the next forward: the cache, and what else the model keeps between two."""
        # Offsets of positions that Qwen's models keep in a module for the prompt that came last.
        self._keepers = [module for module in model.modules() if "rope_deltas" in vars(module)]
        self._offsets: list[Any] = [None] * len(self._keepers)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if token_ids.device.type == "meta":  # `generate` looks at its data
            forward = self._model.forward
            last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(forward).parameters else {}
            return self._model(input_ids=token_ids[None], use_cache=True, **last).logits[0, -1]  # type: ignore[no-any-return]
        for module, offset in zip(self._keepers, self._offsets, strict=True):
            module.rope_deltas = offset
        logits = self._next(token_ids)
        self._offsets = [module.rope_deltas for module in self._keepers]
        return logits

    def _next(self, token_ids: torch.Tensor) -> torch.Tensor:
        inputs = self.prepare(token_ids)  # it may find another model
        return self.accept(self._model(**inputs, return_dict=True))

    def prepare(self, token_ids: torch.Tensor) -> dict[str, Any]:
        """What the model's forward gets for the tokens that come next."""
        first, count = self._ids is None, len(token_ids)
        if self._ids is None:
            self._model, self._ids, self._arguments = self._open(token_ids[None])
            self._inputs, count = {}, self._ids.shape[1]
        else:
            self._ids = torch.cat((self._ids, token_ids[None]), dim=1)
        embedded = first and self._arguments.get("inputs_embeds") is not None
        return self._model.prepare_inputs_for_generation(  # type: ignore[no-any-return]
            self._ids, next_sequence_length=None if embedded else count, is_first_iteration=first, **self._arguments
        )

    def accept(self, out: Any) -> torch.Tensor:
        """Keep what the next forward needs of this one's output; the logits `[V]` after its last token."""
        self._arguments = self._model._update_model_kwargs_for_generation(
            out, self._arguments, is_encoder_decoder=self._model.config.is_encoder_decoder
        )
        # A copy: the logits of a whole prompt would stay with those of its last token.
        return out.logits[0, -1].clone()  # type: ignore[no-any-return]

    def _open(self, ids: torch.Tensor) -> tuple[PreTrainedModel, torch.Tensor, dict[str, Any]]:
        """For a prompt `[1, n]`."""
        return _prepared(self._model, ids, self._inputs)

    @property
    def cache(self) -> Any:
        """That which transformers made for it."""
        return self._arguments["past_key_values"]

    def num_bytes(self) -> int:
        """Of its cache."""
        items = [item for item in self._arguments.values() if not isinstance(item, torch.Tensor)]  # no masks
        storages = [tensor.untyped_storage() for tensor in _tensors(items, set())]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def _prepared(
    model: PreTrainedModel, ids: torch.Tensor, inputs: Inputs
) -> tuple[PreTrainedModel, torch.Tensor, dict[str, Any]]:
    """What `generate` hands to its loop for a prompt `[1, n]`: the model, the first ids, and a new cache above all."""
    calls: list[tuple[PreTrainedModel, torch.Tensor, dict[str, Any]]] = []

    def take(model: PreTrainedModel, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        for name in ("logits_processor", "stopping_criteria", "generation_config"):
            options.pop(name, None)
        calls.append((model, input_ids, options))
        return input_ids

    # With 1 new token a cache may be made too short: none of the dynamic ones is, and only these are used here.
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), custom_generate=take, max_new_tokens=1, **inputs)
    return calls[0]


def _tensors(item: object, visited: set[int]) -> Iterator[torch.Tensor]:
    """All tensors that an object holds, in whatever it is made of; networks are left out."""
    if id(item) in visited or isinstance(item, (nn.Module, transformers.PreTrainedConfig)):
        return
    visited.add(id(item))
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, dict):
        for value in item.values():
            yield from _tensors(value, visited)
    elif isinstance(item, (list, tuple, set)):
        for value in item:
            yield from _tensors(value, visited)
    elif hasattr(item, "__dict__"):
        yield from _tensors(vars(item), visited)


def _planned_state(model: PreTrainedModel, config: Any) -> OwnState:
    """What a sequence takes, from a run without data; where the model looks at its data, an estimate."""
    sizes = []
    try:
        with torch.inference_mode():
            for length in (8, 16):
                ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
                out = model(input_ids=ids, use_cache=True, return_dict=True)
                tensors = [t for t in _tensors(dict(out), set()) if t is not out.logits]
                sizes.append(sum(t.numel() * t.element_size() for t in tensors))
    except MODEL_ERRORS:
        layers = getattr(config, "num_hidden_layers", 32)
        row = int(layers) * positive(config, "hidden_size") * model.dtype.itemsize
        return OwnState(2 * row, 64 * row)
    growth = max(0, sizes[1] - sizes[0]) // 8
    return OwnState(growth, max(0, sizes[0] - 8 * growth))
