"""A `transformers` causal LM, unpatched, on the autoregressive engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from omnistage.core.errors import CheckpointError, StageError, UnsupportedModelError
from omnistage.core.family import LoadContext
from omnistage.engines.ar.attention import BatchLayout, PagedContext, bind_caches
from omnistage.engines.ar.attention.sdpa import SdpaBackend
from omnistage.hf import transformers
from omnistage.models.causal_lm.processor import load_tokenizer
from omnistage.models.decoder import DecoderComponent
from omnistage.models.loading import (
    Checkpoint,
    check_complete,
    check_quantisation,
    check_repeats,
    check_size,
    end_token_ids,
    kv_shape,
    max_sequence_length,
    on_device,
    positive,
    read_auto_config,
    read_generation_config,
    read_weights,
    straight_to,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_PROBE_TOKENS = 12


class CausalLM(DecoderComponent):
    """Adapter around `AutoModelForCausalLM`'s decoder and head."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
        config = model.config.get_text_config()
        kv_shape(config)  # a config that is no transformer's is refused before it is run
        planned = model.device.type == "meta"  # there are no numbers to compare
        expected = None if planned else _stock_logits(model, positive(config, "vocab_size"))
        head = model.get_output_embeddings()
        super().__init__(model, model.get_decoder(), head, config, max_length=max_sequence_length(config))
        self.tokenizer = tokenizer
        self.eos_token_ids = end_token_ids(model.generation_config, config, tokenizer)
        if expected is not None:
            self._check_same(expected)

    def _check_same(self, expected: torch.Tensor) -> None:
        """Refuse a model that does more than a plain decoder and head: it would give wrong answers."""
        name = type(self.model).__name__
        windows: dict[int, int | None] = {}
        try:
            got = self._probe(windows)
        except torch.OutOfMemoryError:
            raise
        except (TypeError, IndexError, AttributeError, ValueError, RuntimeError, StageError) as error:
            raise UnsupportedModelError(f"{name} cannot run on the paged engine: {error}") from error
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.1
        scale = float(expected.abs().max()) or 1.0
        worst = float((got.float() - expected.float()).abs().max()) / scale
        if not worst < tolerance:
            raise UnsupportedModelError(
                f"{name} gives other logits on the paged engine than in transformers (by {worst:.1e} of their range), "
                "so it needs a family of its own"
            )
        if len(windows) != self.spec.num_layers:
            raise UnsupportedModelError(f"{name} has layers without paged attention, so it needs a family of its own")
        self._check_windows(name, windows)

    @torch.inference_mode()
    def _probe(self, windows: dict[int, int | None]) -> torch.Tensor:
        """Logits `[2, n, V]` of the probe, run twice side by side and in three steps.

        A model that remembers elsewhere than in the pool, or lets neighbours see each other, does not come through.
        """
        ids = torch.arange(_PROBE_TOKENS, device=self.device) % self.spec.vocab_size
        shape = (2, _PROBE_TOKENS, self.spec.num_kv_heads, self.spec.head_dim)
        caches = [
            (
                torch.zeros(shape, device=self.device, dtype=self.dtype),
                torch.zeros(shape, device=self.device, dtype=self.dtype),
            )
            for _ in range(self.spec.num_layers)
        ]
        backend = _RecordingBackend(caches, windows)
        bind_caches(self.decoder, caches)
        slots = [np.arange(_PROBE_TOKENS) + i * _PROBE_TOKENS for i in range(2)]
        tables = [np.asarray([i], dtype=np.int32) for i in range(2)]
        parts, last = [], _PROBE_TOKENS - 1
        for start, end in ((0, _PROBE_TOKENS // 2), (_PROBE_TOKENS // 2, last), (last, _PROBE_TOKENS)):
            positions = np.arange(start, end)
            counts, lengths = (np.full(2, n, dtype=np.int32) for n in (len(positions), end))
            where = torch.from_numpy(np.concatenate([s[positions] for s in slots])).to(self.device)
            plan = backend.plan(BatchLayout(counts, lengths, slots, tables), self.device)
            places = torch.from_numpy(np.concatenate([positions] * 2)).to(self.device)
            embeds = self.embed(ids[places])
            hidden = self.forward(embeds, places[None], PagedContext(backend, where, plan))
            parts.append(self.logits(hidden).view(2, len(positions), -1))
        return torch.cat(parts, dim=1)

    def _check_windows(self, name: str, windows: dict[int, int | None]) -> None:
        """The probe is shorter than most sliding windows, so these are compared with what the config says."""
        config = self.model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ()
        for layer, kind in enumerate(kinds[: self.spec.num_layers]):
            if kind not in ("full_attention", "sliding_attention"):
                raise UnsupportedModelError(f"{name} has layers of {kind!r}, so it needs a family of its own")
            expected = config.sliding_window if kind == "sliding_attention" else None
            if windows.get(layer) != expected:
                raise UnsupportedModelError(
                    f"layer {layer} of {name} attends over a window of {windows.get(layer)} tokens, but its config "
                    f"says {expected}, so it needs a family of its own"
                )


class _RecordingBackend(SdpaBackend):
    """Notes which window each layer asks for."""

    def __init__(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], windows: dict[int, int | None]) -> None:
        self._layer_of = {id(cache): layer for layer, cache in enumerate(caches)}
        self._windows = windows

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        paged: PagedContext,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        self._windows[self._layer_of[id(cache)]] = window
        return super().attend(query, key, value, cache, paged, scale=scale, window=window)


@torch.inference_mode()
def _stock_logits(model: PreTrainedModel, vocab_size: int) -> torch.Tensor:
    ids = torch.arange(_PROBE_TOKENS, device=model.device)[None] % vocab_size
    return model(input_ids=ids, use_cache=False).logits[0]  # type: ignore[no-any-return]


def load(context: LoadContext, adapter: type[CausalLM] = CausalLM) -> CausalLM:
    """The component of a model folder; `adapter` is the class of it."""
    folder = context.model.folder
    if context.device.type == "meta":
        return adapter(_skeleton(folder, None).to(context.dtype))
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} has no safetensors weights; convert the model first")
    generation = read_generation_config(folder)
    options: dict[str, Any] = {
        "dtype": context.dtype,
        "ignore_mismatched_sizes": True,  # so that we can name them
        "output_loading_info": True,
        **straight_to(context.device),
    }
    skeleton = _skeleton(folder, Checkpoint(folder))
    try:
        if straight_to(context.device) and not check_quantisation(skeleton.config):
            tensors = read_weights(context)
            model, info = type(skeleton).from_pretrained(None, config=skeleton.config, state_dict=tensors, **options)
        else:
            options |= {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
            model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"transformers cannot load {folder}: {error}") from error
    check_complete(type(model).__name__, info)
    if generation is not None:
        model.generation_config = generation
    return adapter(on_device(model, context.device), load_tokenizer(folder))


def _skeleton(folder: Path, weights: Checkpoint | None) -> PreTrainedModel:
    """The model without weights; with those of its checkpoint, a config that asks for far more is found out here."""
    config = read_auto_config(folder)
    kv_shape(config.get_text_config())
    check_repeats(config.to_dict(), 0 if weights is None else len(list(weights.names())))
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    if weights is not None:
        # Up to sixteen quantised numbers lie packed in one.
        check_size(skeleton, weights.num_elements() * (16 if check_quantisation(config) else 1))
    return skeleton
