"""The language model: a causal LM that also emits the hidden states of an intermediate layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from omnistage.core.errors import UnsupportedModelError
from omnistage.core.family import LoadContext
from omnistage.engines.ar.attention import PagedContext
from omnistage.hf import transformers
from omnistage.models.causal_lm.component import CausalLM, load

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DRAW_LAYER = 10
"""Images are drawn from `hidden_states[DRAW_LAYER]`, in the numbering of transformers."""


class Thinker(CausalLM):
    """Hidden states are `[T, 2H]`: the last layer's, for logits, and beside them those that are emitted."""

    pure_forward = True

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None) -> None:
        layers = int(model.config.get_text_config().num_hidden_layers)
        if layers <= DRAW_LAYER:
            raise UnsupportedModelError(
                f"images are drawn from layer {DRAW_LAYER} of the language model, and this one has {layers} layers; "
                "use a deeper one"
            )
        super().__init__(model, tokenizer)
        # The same message and seed must give the same image, whatever the conversation before it.
        self.spec = replace(self.spec, emit_size=self.spec.embed_size, emit_anew=True)

    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, paged: PagedContext) -> torch.Tensor:
        out = self.decoder(
            inputs_embeds=embeds[None], position_ids=positions, use_cache=False, paged=paged, output_hidden_states=True
        )
        return torch.cat((out.last_hidden_state[0], out.hidden_states[DRAW_LAYER][0]), dim=-1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden[:, : self.spec.embed_size])

    def emit(self, embeds: torch.Tensor, hidden: torch.Tensor, media: torch.Tensor) -> torch.Tensor:
        del embeds, media
        return hidden[:, self.spec.embed_size :]


def load_think(context: LoadContext) -> CausalLM:
    """The language model of a starter's folder."""
    transformers.utils.logging.disable_progress_bar()  # the caller shows progress
    inner = replace(context.model, folder=context.model.folder / "think")
    return load(replace(context, model=inner), Thinker)
