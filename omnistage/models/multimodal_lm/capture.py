"""What a model hands to its decoder for a prompt with media: embeddings, positions and rows for deeper layers.

The model's own forward runs up to its decoder, on a copy of the modules that lead there. Weights are shared, nothing of
the model itself is touched, and what the model remembers between calls (`rope_deltas`) is the copy's.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from omnistage.core.errors import StageError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PLAIN = frozenset(
    {"input_ids", "inputs_embeds", "position_ids", "attention_mask", "past_key_values", "use_cache", "cache_position"}
    | {"output_attentions", "output_hidden_states", "return_dict", "logits_to_keep", "mm_token_type_ids"}
    | {"visual_pos_masks", "deepstack_visual_embeds"}
)
"""Arguments of a decoder that are read here or that the engine has another way for."""


class DependentItemsError(UnsupportedModelError):
    """A media item is not the same in every prompt: it has to be encoded with all that is around it."""


@dataclass(frozen=True, slots=True)
class DecoderInputs:
    """What arrived at the decoder for one prompt of n tokens."""

    embeds: torch.Tensor
    """`[n, E]`"""
    positions: torch.Tensor | None
    """As the decoder takes them; None: it counts by itself."""
    deep: torch.Tensor | None
    """`[n, levels * E]` that media add to the output of the first layers; zeros where there is none."""
    others: tuple[str, ...]
    """Names of further arguments, which a flattened batch does not carry."""

    def rows(self) -> torch.Tensor:
        """`[n, E]`, or `[n, E + levels * E]`: what a media item is on the engine."""
        return self.embeds if self.deep is None else torch.cat((self.embeds, self.deep), dim=1)


class _Reached(Exception):
    """The forward has come to the decoder."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.kwargs = kwargs


class DecoderCapture:
    """Runs a model's forward up to its decoder. The model must not be changed afterwards, but for its weights."""

    def __init__(self, model: PreTrainedModel, decoder: nn.Module) -> None:
        path = next((name for name, module in model.named_modules() if module is decoder), "")
        if not path:
            raise UnsupportedModelError(
                f"{type(model).__name__} is its own decoder, so media cannot be merged before it; it is not served"
            )
        self._model = _with_stub(model, path.split("."))
        signature = inspect.signature(model.forward).parameters
        self._accepted = frozenset(signature)

    def accepts(self, name: str) -> bool:
        return name in self._accepted

    @torch.inference_mode()
    def run(self, inputs: Mapping[str, torch.Tensor]) -> DecoderInputs:
        """`inputs` are a processor's, on the model's device; what the model does not take is left out."""
        accepted = {name: value for name, value in inputs.items() if name in self._accepted}
        try:
            self._model(**accepted, use_cache=False)
        except _Reached as reached:
            return _decoder_inputs(reached.kwargs)
        raise StageError(f"{type(self._model).__name__} never called its decoder")


def _with_stub(model: nn.Module, path: list[str]) -> nn.Module:
    """`model` with copies of the modules along `path`, the last of which ends the forward."""
    result = copy.copy(model)
    if path:
        inner = _with_stub(model.get_submodule(path[0]), path[1:])
        result._modules = {**model._modules, path[0]: inner}
    else:
        result.forward = _stop
    return result


def _stop(*args: object, **kwargs: Any) -> None:
    if args:
        kwargs["input_ids"] = args[0]
    raise _Reached(kwargs)


def _decoder_inputs(kwargs: dict[str, Any]) -> DecoderInputs:
    embeds = kwargs.get("inputs_embeds")
    if embeds is None:
        raise UnsupportedModelError("its decoder is given token ids instead of embeddings, so media cannot be merged")
    others = tuple(
        name
        for name, value in kwargs.items()
        if name not in _PLAIN and (isinstance(value, torch.Tensor) or value not in (None, False, {}, [], ()))
    )
    positions = kwargs.get("position_ids")
    return DecoderInputs(
        embeds[0],
        positions[..., 0, :] if isinstance(positions, torch.Tensor) else None,
        _deep_rows(kwargs, embeds[0]),
        others,
    )


def _deep_rows(kwargs: dict[str, Any], embeds: torch.Tensor) -> torch.Tensor | None:
    levels, places = kwargs.get("deepstack_visual_embeds"), kwargs.get("visual_pos_masks")
    if levels is None or places is None:
        return None
    deep = embeds.new_zeros(len(embeds), sum(level.shape[-1] for level in levels))
    deep[places[0]] = torch.cat(tuple(levels), dim=-1).to(deep)
    return deep
