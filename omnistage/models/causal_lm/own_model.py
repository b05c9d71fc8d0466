"""What the two slow ways to run a causal LM share: both call transformers' own forward, not the flattened batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from omnistage.core.errors import InvalidRequestError, StageError, UnsupportedModelError
from omnistage.core.types import ARInput, RequestInfo
from omnistage.engines.ar.attention import PagedContext
from omnistage.engines.ar.component import ARComponent
from omnistage.hf import transformers
from omnistage.models.loading import end_token_ids, freeze

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

USUAL_LENGTH = 4096
"""Tokens of the longest sequence where `max_model_len` does not say: a prompt is computed whole, in one forward."""
NEW_TOKENS = 3
"""That a model generates when it is checked."""
MODEL_ERRORS = (
    TypeError,
    LookupError,
    AttributeError,
    ValueError,
    RuntimeError,
    AssertionError,
    NotImplementedError,
)
"""What a model's own code may raise."""

_FORBIDDEN = -1e4
"""Logits below are of tokens that a model never gives; float16 ends at -65,504."""

Inputs = Mapping[str, torch.Tensor]
"""What a model's forward takes of a prompt beside its token ids."""
Generated = tuple[torch.Tensor, Sequence[torch.Tensor]]
"""Tokens `[n]`, and the logits `[V]` of each."""


class OwnModelLM(ARComponent):
    """Adapter around `AutoModelForCausalLM`, which gets token ids and gives logits."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None, keep: Sequence[str] = ()
    ) -> None:
        """`keep`: settings of the checkpoint for generating that stay."""
        self.config = model.config.get_text_config()
        if not model.can_generate():
            raise UnsupportedModelError(
                f"transformers cannot generate text with {type(model).__name__}; it is no language model"
            )
        self.model, self.decoder = freeze(model), model.base_model
        self.device, self.dtype, self.tokenizer = model.device, model.dtype, tokenizer
        self.eos_token_ids = end_token_ids(model.generation_config, self.config, tokenizer)
        # A checkpoint's own settings (beams, forced tokens, another cache) are none of a stage's.
        model.generation_config = transformers.GenerationConfig(
            do_sample=False,
            pad_token_id=0,
            use_cache=True,
            **{name: getattr(model.generation_config, name) for name in keep},
        )

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.model,)

    @property
    def attention_modules(self) -> Sequence[nn.Module]:
        return ()

    @property
    def decoders(self) -> tuple[nn.Module, ...]:
        return ()

    def check(self, info: RequestInfo, payload: ARInput) -> None:
        del info
        if payload.embeds is not None:
            raise InvalidRequestError("this model takes token ids, not embeddings", param="prompt_embeds")

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        raise StageError("this model takes token ids")

    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, paged: PagedContext) -> torch.Tensor:
        raise StageError("this model does not run in a flattened batch")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise StageError("this model gives logits itself")


def generated(model: PreTrainedModel, ids: torch.Tensor, inputs: Inputs | None = None) -> Generated:
    """Greedy tokens of `generate` and the logits `[V]` of each."""
    out = model.generate(
        input_ids=ids[None],
        attention_mask=torch.ones_like(ids[None]),
        max_new_tokens=NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
        **(inputs or {}),
    )
    return out.sequences[0, -len(out.logits) :], [logits[0] for logits in out.logits]


def difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the range of `expected`; infinite for other shapes and for what is no number.

    Tokens that a model forbids itself have the lowest number there is: they count only where one side forbids them.
    """
    if logits.shape != expected.shape:
        return float("inf")
    logits, expected = logits.float(), expected.float()
    allowed = ~(expected <= _FORBIDDEN)
    if not torch.equal(~(logits <= _FORBIDDEN), allowed):
        return float("inf")
    gap = (logits - expected).masked_fill(~allowed, 0.0)
    worst = float(gap.abs().max()) / (float(expected.masked_fill(~allowed, 0.0).abs().max()) or 1.0)
    return worst if worst == worst else float("inf")
