"""The text stage: an unpatched `transformers` decoder behind the autoregressive engine."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerFast

from omnistage.core.family import LoadContext
from omnistage.engines.ar.attention import PagedContext
from omnistage.engines.ar.component import ARComponent, ARSpec
from omnistage.hf import transformers
from omnistage.models.causal_lm.processor import load_tokenizer
from omnistage.models.loading import Checkpoint, end_token_ids, kv_shape, load_model, use_paged_attention


class Thinker(ARComponent):
    """A Llama decoder and its head."""

    def __init__(self, model: transformers.LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        layers, kv_heads, head_dim = kv_shape(model.config)
        self.model, self.decoder, self.tokenizer = model, model.model, tokenizer
        self.device, self.dtype = model.device, model.dtype
        self.spec = ARSpec(
            num_layers=layers,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=model.config.vocab_size,
            embed_size=model.config.hidden_size,
            max_length=model.config.max_position_embeddings,
        )
        self.eos_token_ids = end_token_ids(model.config)
        use_paged_attention(self.decoder)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.decoder.embed_tokens(token_ids)

    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, paged: PagedContext) -> torch.Tensor:
        out = self.decoder(inputs_embeds=embeds[None], position_ids=positions, use_cache=False, paged=paged)
        return out.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(hidden)


def load(context: LoadContext) -> Thinker:
    folder = context.model.folder
    config = transformers.LlamaConfig.from_pretrained(folder, local_files_only=True)
    tensors = Checkpoint(folder).tensors()
    model = load_model(transformers.LlamaForCausalLM, config, tensors, context.device, context.dtype)
    return Thinker(model, load_tokenizer(folder))
