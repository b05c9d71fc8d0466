"""A multimodal LM by its own forward, with keys and values in the engine's pool and generated tokens in batches.

For models that do not run in a flattened batch: pictures that attend both ways, attention to what stands beside the
tokens, decoders behind an encoder, masks and positions of their own. A prompt is one forward with all of its media, as
in `generate`; what sequences generate is one padded batch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from omnistage.core.errors import InternalError, OmniError, UnsupportedModelError
from omnistage.core.types import MediaSpan, Modality
from omnistage.engines.ar.attention import KVCache, bind_caches
from omnistage.engines.ar.component import GroupedSequence
from omnistage.models.causal_lm.own_cache import GeneratedSequence, Prompt
from omnistage.models.causal_lm.own_model import MODEL_ERRORS, NEW_TOKENS, Generated, Inputs, difference, generated
from omnistage.models.causal_lm.pooled_cache import counts_in_cache
from omnistage.models.causal_lm.pooled_sequence import CachePlan, PooledSequence, advance, plan_cache, planned_cache
from omnistage.models.causal_lm.probe import in_float32
from omnistage.models.multimodal_lm.own_cache import OwnCacheMultimodalLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from omnistage.models.multimodal_lm.processor import MultimodalProcessor

_TOLERANCE, _ROUNDED_TOLERANCE = 1e-4, 0.05
"""Of the logits' range, in float32 and in narrower dtypes: batches round otherwise than one sequence."""

logger = logging.getLogger(__name__)


class GroupedMultimodalLM(OwnCacheMultimodalLM):
    """Adapter around `AutoModelForMultimodalLM`, prepared as its `generate` does, for several sequences at once."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast | None,
        processor: MultimodalProcessor | None,
        *,
        reason: str = "",
    ) -> None:
        super().__init__(model, tokenizer, processor, reason=reason)
        name, state = type(model).__name__, self.spec.own_state
        if state is None or state.alone or any("rope_deltas" in vars(module) for module in model.modules()):
            raise UnsupportedModelError(f"{name} keeps part of a sequence's state in its modules")
        try:
            planned = processor is None or model.device.type == "meta"
            samples = [] if processor is None or planned else self._samples(processor)
            self._plan = self._plan_of(*samples[-1]) if samples else planned_cache(model, self._media_prompts())
            self._holders = [nn.Module() for _ in self._plan.pooled]
            shapes = tuple(place[:3] for place in self._plan.pooled)
            self.spec = replace(
                self.spec,
                num_layers=len(shapes),
                num_kv_heads=shapes[0][0],
                head_dim=shapes[0][1],
                layer_shapes=shapes,
                own_state=None,
                grouped=True,
                whole_prompts=True,
                held_bytes=self._plan.held_bytes,
            )
            if samples:
                self.spec = replace(self.spec, padded_groups=self._check_precisely(samples))
        except torch.OutOfMemoryError:
            raise
        except MODEL_ERRORS as error:
            raise UnsupportedModelError(
                f"{name} does not run in batches with a cache in the engine's pool ({type(error).__name__})"
            ) from error
        if model.device.type != "meta":
            logger.warning(
                "%s is served by its own forward, prompts one by one and generated tokens of sequences %sat a time, "
                "which is slower than in a flattened batch and without prefix reuse%s",
                name,
                "" if self.spec.padded_groups else "of one length ",
                reason and f": {reason}",
            )

    def _warn(self, name: str, reason: str) -> None:
        """Nothing: it is not served one sequence at a time."""

    @property
    def attention_modules(self) -> Sequence[nn.Module]:
        """Holders of the caches alone: the model's modules get these with its own cache."""
        return self._holders

    def open_sequence(self, media: Sequence[MediaSpan] = ()) -> PooledSequence:
        inputs = {name: value for span in media for name, value in span.inputs.items()}
        return PooledSequence(self.model, self._plan, self._pools, self._on_device(inputs))

    def advance_group(
        self, sequences: Sequence[GroupedSequence], token_ids: torch.Tensor, slots: Sequence[np.ndarray]
    ) -> torch.Tensor:
        own = [sequence for sequence in sequences if isinstance(sequence, PooledSequence)]
        if len(own) < len(sequences):
            raise InternalError("a batch holds sequences of another component")
        return advance(own, token_ids, slots, padded=self.spec.padded_groups)

    def _pools(self) -> list[KVCache]:
        return [holder.kv_cache for holder in self._holders]  # type: ignore[misc]

    # ---------------------------------------------------------------------------------------------- checks

    def _samples(self, processor: MultimodalProcessor) -> list[Prompt]:
        """Prompts of several lengths, some of them alike."""
        prompts = self._prompts(self.spec.prompt_vocab_size)
        prompts += [(ids.flip(0), inputs) for ids, inputs in prompts if not inputs]
        for kind in sorted(processor.input_modalities - {Modality.TEXT, *self.unsupported}):
            prompts.append(self._prompt(processor, kind, changed=True))
            prompts.append(self._prompt(processor, kind, changed=True, words="c d e f", count=1))
        return prompts

    def _media_prompts(self) -> list[Prompt]:
        """A chat with one item of each kind, where the processor takes it."""
        processor, prompts = self._processor, list[Prompt]()
        if processor is None:
            return prompts
        for kind in sorted(processor.input_modalities - {Modality.TEXT}):
            with contextlib.suppress(OmniError):  # it is refused by name when the model is loaded
                prompts.append(self._prompt(processor, kind, changed=True, words="c d e f", count=1))
        return prompts

    def _plan_of(self, ids: torch.Tensor, inputs: Inputs) -> CachePlan:
        return plan_cache(GeneratedSequence(self.model, inputs), ids, type(self.model).__name__)

    def _check_precisely(self, prompts: Sequence[Prompt]) -> bool:
        """In float32 where the model runs in it: rounding hides what is wrong in narrower dtypes."""
        if self.dtype != torch.float32 and getattr(self.model.config, "quantization_config", None) is None:
            dtype, self.dtype = self.dtype, torch.float32
            try:
                with in_float32(self.model):
                    return self._check([(ids, _widened(inputs)) for ids, inputs in prompts])
            except (RuntimeError, TypeError):  # kernels for one dtype, a tower that narrows its input, no memory
                logger.debug("%s cannot be compared in float32", type(self.model).__name__, exc_info=True)
            finally:
                self.dtype = dtype
        return self._check(prompts)

    @torch.inference_mode()
    def _check(self, prompts: Sequence[Prompt]) -> bool:
        """Compare what will be served with `generate`; whether groups may be padded."""
        expected = [generated(self.model, *prompt) for prompt in prompts]
        tolerance = _TOLERANCE if self.dtype == torch.float32 else _ROUNDED_TOLERANCE
        worst = float("inf")
        for padded in (True, False):
            if padded and counts_in_cache(self.model):
                continue
            worst = self._difference(prompts, expected, padded)
            if worst < tolerance:
                return padded
        raise UnsupportedModelError(
            f"{type(self.model).__name__} gives other logits in a batch of sequences (by {worst:.1e} of their range)"
        )

    def _difference(self, prompts: Sequence[Prompt], expected: Sequence[Generated], padded: bool) -> float:
        """The largest, over prompts whose further tokens are computed together."""
        size = max(len(ids) for ids, _ in prompts) + NEW_TOKENS
        new = self.spec.empty_caches(
            len(prompts), size, lambda shape: torch.zeros(shape, device=self.device, dtype=self.dtype)
        )
        bind_caches(self._holders, new)
        slots = [np.arange(size) + number * size for number in range(len(prompts))]
        sequences = [PooledSequence(self.model, self._plan, self._pools, inputs) for _, inputs in prompts]
        worst = 0.0
        for sequence, (ids, _), own, (_, logits) in zip(sequences, prompts, slots, expected, strict=True):
            worst = max(worst, difference(sequence.begin(ids, own), logits[0]))
        steps = [0] * len(prompts)
        # Every other one begins a step later: those of an encoder's decoder would else be of one length.
        for turn in range(NEW_TOKENS):
            rows = [i for i in range(len(prompts)) if turn >= i % 2 and steps[i] < NEW_TOKENS - 1]
            tokens = torch.stack([expected[i][0][steps[i]] for i in rows])
            outputs = advance([sequences[i] for i in rows], tokens, [slots[i] for i in rows], padded=padded)
            for i, row in zip(rows, outputs, strict=True):
                steps[i] += 1
                worst = max(worst, difference(row, expected[i][1][steps[i]]))
        return worst


def _widened(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
