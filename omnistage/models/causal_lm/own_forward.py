"""A causal LM by its own forward, with a cache of transformers' kind whose keys and values are in the engine's pool.

For models that do not run in a flattened batch: attention in their own code, masks and positions of their own. The
tokens that several sequences generate are one padded batch, as `generate` has it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from omnistage.core.errors import UnsupportedModelError
from omnistage.engines.ar.attention import bind_caches
from omnistage.engines.ar.component import ARSpec
from omnistage.engines.ar.group import Group
from omnistage.hf import transformers
from omnistage.models.causal_lm.own_model import (
    MODEL_ERRORS,
    USUAL_LENGTH,
    Generated,
    OwnModelLM,
    difference,
    generated,
)
from omnistage.models.causal_lm.pooled_cache import CachePlace, PooledLayer, counts_in_cache
from omnistage.models.causal_lm.probe import in_float32
from omnistage.models.loading import max_sequence_length, positive

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_PROMPTS, _CUT = (13, 6, 6), 4
"""Lengths of prompts, two alike, for models whose groups must be; where each is cut."""
_LONGEST_WINDOW = 2048
"""Whose edge is looked at when a model is loaded; scores of attention grow with its square."""
_TOLERANCE, _ROUNDED_TOLERANCE = 1e-4, 0.05
"""Of the logits' range, in float32 and in narrower dtypes: prompts are cut where `generate` computes them whole."""

logger = logging.getLogger(__name__)


class OwnForwardLM(OwnModelLM):
    """Adapter around `AutoModelForCausalLM`, whose forward gets token ids, positions, a mask and a cache."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None = None, *, reason: str = ""
    ) -> None:
        """`reason`: why it does not run in a flattened batch."""
        super().__init__(model, tokenizer)
        name, vocab_size = type(model).__name__, positive(self.config, "vocab_size")
        self._takes = inspect.signature(model.forward).parameters
        self._layers: list[CachePlace | None] = []
        self._holders: list[nn.Module] = []
        try:
            self.spec = self._plan(vocab_size)
            if model.device.type != "meta":
                padded = self._check(vocab_size) and not counts_in_cache(model)
                self.spec = replace(self.spec, padded_groups=padded)
                logger.warning(
                    "%s is served by its own forward, %s at a time, which is slower than in a flattened batch%s",
                    name,
                    "tokens of all sequences" if padded else "tokens of sequences of one length",
                    reason and f": {reason}",
                )
        except torch.OutOfMemoryError:
            raise
        except MODEL_ERRORS as error:
            raise UnsupportedModelError(
                f"{name} does not run with a cache in the engine's pool ({type(error).__name__} in its forward)"
            ) from error

    @property
    def attention_modules(self) -> Sequence[nn.Module]:
        """Nothing but holders of the caches: the model's modules get these with its own cache."""
        return self._holders

    def forward_group(self, token_ids: torch.Tensor, group: Group) -> torch.Tensor:
        inputs: dict[str, Any] = {"attention_mask": group.mask(), "use_cache": True}
        if "position_ids" in self._takes:
            inputs["position_ids"] = group.positions()
        if "logits_to_keep" in self._takes:
            inputs["logits_to_keep"] = 1
        caches: Iterator[Any] = iter([holder.kv_cache for holder in self._holders])
        cache = transformers.DynamicCache()
        cache.layers = [
            transformers.cache_utils.DynamicLayer() if layer is None else PooledLayer(next(caches), group, layer[3])
            for layer in self._layers
        ]
        return self.model(input_ids=token_ids, past_key_values=cache, **inputs).logits[:, -1]  # type: ignore[no-any-return]

    @torch.inference_mode()
    def _plan(self, vocab_size: int) -> ARSpec:
        """Shapes, from a run with the cache that transformers makes."""
        config, name = self.config, type(self.model).__name__
        ids = torch.arange(1, 5, device=self.device)[None] % vocab_size
        out = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True)
        cache = out.past_key_values
        if type(cache) is not transformers.DynamicCache:
            raise UnsupportedModelError(f"{name} has a cache of its own: {type(cache).__name__}")
        kinds = transformers.cache_utils
        for layer in cache.layers:
            if isinstance(layer, kinds.DummyLayer) or not getattr(layer, "is_initialized", True):
                self._layers.append(None)  # it uses the keys of another
            elif type(layer) in (kinds.DynamicLayer, kinds.DynamicSlidingWindowLayer):
                window = layer.sliding_window if layer.is_sliding else None
                self._layers.append((layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], window))
            else:
                raise UnsupportedModelError(f"{name} caches more than keys and values")
        shapes = tuple(layer[:3] for layer in self._layers if layer is not None)
        self._holders = [nn.Module() for _ in shapes]
        return ARSpec(
            num_layers=len(shapes),
            num_kv_heads=shapes[0][0],
            head_dim=shapes[0][1],
            vocab_size=out.logits.shape[-1],
            prompt_vocab_size=vocab_size,
            embed_size=positive(config, "hidden_size"),
            max_length=max_sequence_length(config),
            usual_length=USUAL_LENGTH,
            layer_shapes=shapes,
            grouped=True,
        )

    def _check(self, vocab_size: int) -> bool:
        """Compare what will be served with `generate`; whether groups may be padded."""
        if self.dtype != torch.float32 and getattr(self.model.config, "quantization_config", None) is None:
            try:
                with in_float32(self.model):
                    return self._check_as(vocab_size, torch.float32, _TOLERANCE)
            except (RuntimeError, TypeError) as error:  # kernels for one dtype, or no memory for weights in float32
                if isinstance(error, torch.OutOfMemoryError):
                    raise
        return self._check_as(vocab_size, self.dtype, _TOLERANCE if self.dtype == torch.float32 else _ROUNDED_TOLERANCE)

    @torch.inference_mode()
    def _check_as(self, vocab_size: int, dtype: torch.dtype, tolerance: float) -> bool:
        name = type(self.model).__name__
        self._check_windows(vocab_size, dtype, tolerance)
        prompts = [torch.arange(n * n, n * n + n, device=self.device) % vocab_size for n in _PROMPTS]
        prompts[-1] = prompts[-1].flip(0)
        expected = [generated(self.model, ids) for ids in prompts]
        for padded in (True, False):
            if (
                _largest_difference(self._run(prompts, [tokens for tokens, _ in expected], padded, dtype), expected)
                < tolerance
            ):
                return padded
        raise UnsupportedModelError(
            f"{name} gives other logits with a cache in the engine's pool, or where a prompt is cut"
        )

    def _check_windows(self, vocab_size: int, dtype: torch.dtype, tolerance: float) -> None:
        """Refuse masks that show more than a window leaves in the cache: what is seen would depend on the cut."""
        for window in {layer[3] for layer in self._layers if layer is not None and layer[3] is not None}:
            if window > _LONGEST_WINDOW:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} has a window of {window} tokens, too long to be looked at"
                )
            ids = torch.arange(window + 9, device=self.device) % vocab_size
            whole = self.model(input_ids=ids[None], use_cache=False).logits[0, -1:]
            ours = self._run([ids], [ids[:1]], True, dtype)
            if not difference(ours[0][0], whole[0]) < tolerance:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} keeps {window} tokens in its cache, but its mask shows others"
                )

    def _run(
        self, prompts: Sequence[torch.Tensor], tokens: Sequence[torch.Tensor], padded: bool, dtype: torch.dtype
    ) -> list[list[torch.Tensor]]:
        """Logits `[V]` of the tokens that follow each prompt, the prompts in two chunks."""
        size = max(map(len, prompts)) + len(tokens[0])
        bind_caches(
            self._holders,
            self.spec.empty_caches(
                len(prompts), size, lambda shape: torch.zeros(shape, device=self.device, dtype=dtype)
            ),
        )
        slots = [np.arange(size) + number * size for number in range(len(prompts))]
        results: list[list[torch.Tensor]] = []
        for ids, own in zip(prompts, slots, strict=True):
            for part, end in ((ids[:-_CUT], len(ids) - _CUT), (ids[-_CUT:], len(ids))):
                logits = self.forward_group(part[None], Group.of(len(part), [end], [own], self.device))
            results.append([logits[0]])
        alike = (
            [range(len(prompts))] if padded else [[i for i, p in enumerate(prompts) if len(p) == n] for n in _PROMPTS]
        )
        for step in range(len(tokens[0]) - 1):
            for group in alike:
                ids = torch.stack([tokens[i][step] for i in group])[:, None]
                lengths = [len(prompts[i]) + step + 1 for i in group]
                logits = self.forward_group(ids, Group.of(1, lengths, [slots[i] for i in group], self.device))
                for i, row in zip(group, logits, strict=True):
                    if len(results[i]) < step + 2:
                        results[i].append(row)
        return results


def _largest_difference(ours: Sequence[Sequence[torch.Tensor]], expected: Sequence[Generated]) -> float:
    pairs = [pair for mine, (_, theirs) in zip(ours, expected, strict=True) for pair in zip(mine, theirs, strict=True)]
    return max(difference(mine, theirs) for mine, theirs in pairs)
