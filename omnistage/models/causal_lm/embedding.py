"""The embedding as a decoder itself computes it from token ids: some scale it, unless they are given embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = 4


class ScaledEmbedding(nn.Module):
    """An embedding times a number of the config."""

    def __init__(self, embedding: nn.Module, scale: float) -> None:
        super().__init__()
        self._embedding = [embedding]  # in a list: its weights are the model's, and belong to that
        self._scale = scale

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._embedding[0](token_ids) * self._scale  # type: ignore[no-any-return]


class _FirstLayer(Exception):
    """Ends a forward where its first layer begins, with what that is given."""

    def __init__(self, rows: object) -> None:
        self.rows = rows


@torch.inference_mode()
def model_embedding(decoder: PreTrainedModel, embedding: nn.Module) -> nn.Module:
    """What gives the decoder's `inputs_embeds`: `embedding` where the decoder does nothing else with token ids.

    Whatever more than a scale it does shows in the logits.
    """
    layers = getattr(decoder, "layers", None)
    if decoder.device.type == "meta" or not isinstance(layers, nn.ModuleList) or not len(layers):
        return embedding
    ids = torch.arange(1, 1 + _TOKENS, device=decoder.device)[None]
    plain = embedding(ids)
    from_ids, from_rows = _first_rows(decoder, input_ids=ids), _first_rows(decoder, inputs_embeds=plain)
    if from_ids is None or from_rows is None or torch.equal(from_ids, from_rows) or not torch.equal(from_rows, plain):
        return embedding
    scales = [value for value in vars(decoder.config).values() if isinstance(value, float)]
    scale = next((value for value in scales if torch.equal(plain * value, from_ids)), None)
    return embedding if scale is None else ScaledEmbedding(embedding, scale)


def _first_rows(decoder: PreTrainedModel, **inputs: torch.Tensor) -> torch.Tensor | None:
    """Hidden states that the first layer gets."""

    def stop(module: nn.Module, args: tuple[object, ...], options: dict[str, object]) -> None:
        del module
        raise _FirstLayer(args[0] if args else options.get("hidden_states"))

    handle = decoder.layers[0].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        decoder(**inputs, use_cache=False)
    except _FirstLayer as reached:
        return reached.rows if isinstance(reached.rows, torch.Tensor) else None
    finally:
        handle.remove()
    return None
