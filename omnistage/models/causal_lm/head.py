"""Logits as the model itself computes them from hidden states: its head, then soft caps, scalings and biases."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import nn

from omnistage.hf import transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def model_head(model: PreTrainedModel, decoder: nn.Module, head: nn.Module) -> nn.Module:
    """What turns hidden states `[..., H]` of `decoder` into logits: `head` where the model does nothing else."""
    names = [name for name, child in model.named_children() if any(module is decoder for module in child.modules())]
    if len(names) != 1 or model.device.type == "meta":
        return head
    path = ModelHead(model, names[0])
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, int(model.config.get_text_config().hidden_size), generator=generator)
    with torch.inference_mode():
        # Large ones too, which a soft cap changes.
        for scale in (1.0, 100.0):
            hidden = (rows * scale).to(model.device, model.dtype)
            try:
                if not torch.equal(head(hidden).float(), path(hidden).float()):
                    return path
            except (TypeError, RuntimeError, ValueError, AttributeError, IndexError):
                return head  # what the model does before its head cannot be left out; the probe compares the rest
        # Mamba's hidden states are float32 whatever its dtype, and its own forward converts them for its head.
        wide = rows.to(model.device)
        return path if not _takes(head, wide) and _takes(path, wide) else head


def _takes(head: nn.Module, hidden: torch.Tensor) -> bool:
    try:
        head(hidden)
    except RuntimeError:
        return False
    return True


class ModelHead(nn.Module):
    """The model's own forward with its decoder, and what leads to it, left out: hidden states are its output."""

    def __init__(self, model: PreTrainedModel, decoder_name: str) -> None:
        super().__init__()
        self._name = decoder_name
        self._model = [copy.copy(model)]  # in a list: its weights are the model's, and belong to that
        self._model[0]._modules = {**model._modules, decoder_name: _HiddenStates()}

    def rebuilt(self, model: PreTrainedModel) -> ModelHead:
        """The same for a model whose modules were exchanged."""
        return ModelHead(model, self._name)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(1, -1, hidden.shape[-1])
        logits = self._model[0](inputs_embeds=rows, use_cache=False, return_dict=True).logits
        return logits.view(*hidden.shape[:-1], -1)  # type: ignore[no-any-return]


class _HiddenStates(nn.Module):
    """In the decoder's place: gives back what it is given."""

    def forward(self, *args: object, inputs_embeds: torch.Tensor, **kwargs: object) -> object:
        del args, kwargs
        return _Outputs(last_hidden_state=inputs_embeds)


class _Outputs(transformers.modeling_outputs.BaseModelOutput):  # type: ignore[misc]
    """Hidden states alone: all else that a model passes on from its decoder is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
