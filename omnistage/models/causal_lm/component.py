"""A `transformers` causal LM, unpatched, on the autoregressive engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from omnistage.engines.ar.attention import BatchLayout, PagedContext
from omnistage.engines.ar.attention.sdpa import SdpaBackend
from omnistage.engines.ar.component import ARComponent, ARSpec
from omnistage.errors import CheckpointError, UnsupportedModelError
from omnistage.hf import transformers
from omnistage.models.causal_lm.processor import load_tokenizer
from omnistage.models.loading import end_token_ids, freeze, kv_shape, use_paged_attention
from omnistage.pipeline.registry import LoadContext

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_TOKENS = 12


class CausalLM(ARComponent):
    """Adapter around `AutoModelForCausalLM`'s decoder and head."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None) -> None:
        config = model.config.get_text_config()
        layers, kv_heads, head_dim = kv_shape(config)
        self.model = freeze(model)
        self.decoder = model.get_decoder()
        self._embedding = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        self.device, self.dtype = model.device, model.dtype
        self.tokenizer = tokenizer
        self.spec = ARSpec(
            num_layers=layers,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=int(config.vocab_size),
            embed_size=int(config.hidden_size),
            max_length=int(config.max_position_embeddings),
        )
        self.eos_token_ids = end_token_ids(model.generation_config, config, tokenizer)
        expected = _stock_logits(model, self.spec.vocab_size)
        use_paged_attention(self.decoder)
        self._check_same(expected)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._embedding(token_ids)  # type: ignore[no-any-return]

    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, paged: PagedContext) -> torch.Tensor:
        out = self.decoder(inputs_embeds=embeds[None], position_ids=positions, use_cache=False, paged=paged)
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def _check_same(self, expected: torch.Tensor) -> None:
        """Models that do more than a plain decoder and head are found out before they give wrong answers."""
        ids = torch.arange(_PROBE_TOKENS, device=self.device) % self.spec.vocab_size
        shape = (1, _PROBE_TOKENS, self.spec.num_kv_heads, self.spec.head_dim)
        caches = [
            (torch.zeros(shape, device=self.device, dtype=self.dtype), torch.zeros(shape, device=self.device, dtype=self.dtype))
            for _ in range(self.spec.num_layers)
        ]
        backend, count = SdpaBackend(), np.asarray([_PROBE_TOKENS], dtype=np.int32)
        layout = BatchLayout(count, count, [np.arange(_PROBE_TOKENS)], [np.zeros(1, dtype=np.int32)])
        slots = torch.arange(_PROBE_TOKENS, device=self.device)
        paged = PagedContext(backend, caches, slots, backend.plan(layout, self.device))
        name = type(self.model).__name__
        try:
            got = self.logits(self.forward(self.embed(ids), ids[None], paged))
        except (TypeError, IndexError, AttributeError) as error:
            raise UnsupportedModelError(f"{name} cannot run on the paged engine: {error}") from error
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.1
        scale = float(expected.abs().max()) or 1.0
        worst = float((got.float() - expected.float()).abs().max()) / scale
        if not worst < tolerance:
            raise UnsupportedModelError(
                f"{name} gives other logits on the paged engine than in transformers (by {worst:.1e} of their range), "
                "so it needs a family of its own"
            )


@torch.inference_mode()
def _stock_logits(model: PreTrainedModel, vocab_size: int) -> torch.Tensor:
    ids = torch.arange(_PROBE_TOKENS, device=model.device)[None] % vocab_size
    return model(input_ids=ids, use_cache=False).logits[0]  # type: ignore[no-any-return]


def load(context: LoadContext) -> CausalLM:
    """The component of a model folder."""
    folder = context.model.folder
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} has no safetensors weights; convert the model first")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=context.dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"transformers cannot load {folder}: {error}") from error
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    return CausalLM(model.to(context.device), load_tokenizer(folder))
