"""What a user asks to be drawn, as a prompt of the language model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from omnistage.compat import prepare_torchvision
from omnistage.core.cancellation import locked
from omnistage.core.errors import CheckpointError, InvalidRequestError, MediaError, UnsupportedModelError
from omnistage.core.params import DiffusionParams
from omnistage.core.types import ARInput, DiffusionInput, Modality
from omnistage.models._diffusers.loading import Parts
from omnistage.models.chat_template import template_refusal
from omnistage.models.glm_image.layout import CELL, DEFAULT_SIZE, check_params, fitted_size, target_grids, target_size
from omnistage.models.prompts import PromptTokenizer

if TYPE_CHECKING:
    from transformers import GlmImageProcessor

_PROBE = "A cup of tea that says 'Good morning', 100%"


class GlmImageInputProcessor:
    """Prompts, and pictures to look at, become an `ARInput`. Thread-safe: transformers' processor is used by one
    thread at a time."""

    input_modalities = frozenset({Modality.TEXT, Modality.IMAGE})

    def __init__(self, processor: GlmImageProcessor) -> None:
        self._processor = processor
        self._prompts = PromptTokenizer(processor.tokenizer)
        self._lock = threading.Lock()
        self._check_same()

    @classmethod
    def load(cls, folder: Path) -> GlmImageInputProcessor:
        prepare_torchvision()
        return cls(Parts(folder).load("processor"))

    # --------------------------------------------------------------------------------------------- inputs

    def draw(
        self, prompt: str, images: Sequence[np.ndarray], mask: np.ndarray | None, params: DiffusionParams
    ) -> ARInput:
        """The language model's prompt for a picture of the size that `params` asks for."""
        check_params(params, num_images=len(images), masked=mask is not None)
        pictures = tuple(self._resized(image) for image in images)
        width, height = target_size(params, pictures, DEFAULT_SIZE)
        grids = target_grids(width, height, edits=bool(pictures))
        context = {"image_grid_thw": torch.tensor([[1, *grid] for grid in grids])}
        lengths: list[int] = []
        if pictures:
            pixels, sources = self._pixels(pictures)
            lengths = sources.prod(-1).tolist()
            context = {"pixel_values": pixels, "image_grid_thw": torch.cat((sources, context["image_grid_thw"]))}
        ids = self._encode(prompt, grids, lengths)
        return ARInput(
            ids,
            context=context,
            drawing=DiffusionInput(prompt, pictures),
            num_tokens=sum(rows * columns for rows, columns in grids),
            seed=params.seed,
        )

    def voices(self) -> tuple[str, ...]:
        return ()

    # --------------------------------------------------------------------------------------------- pieces

    def _encode(self, prompt: str, grids: Sequence[tuple[int, int]], lengths: Sequence[int]) -> tuple[int, ...]:
        """Token ids: input pictures of `lengths` tokens, the prompt, the grids to write, and the first one's start."""
        guarded, processor = self._prompts.guarded(), self._processor
        content = [{"type": "image", "image": ""} for _ in lengths] + [{"type": "text", "text": guarded.guard(prompt)}]
        try:
            text = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        except Exception as error:  # the template is a program of the checkpoint's: it may raise anything
            raise InvalidRequestError(template_refusal(error), param="prompt") from error
        pieces = str(text[0] if isinstance(text, list) else text).split(processor.image_token)
        if len(pieces) != len(lengths) + 1:
            raise CheckpointError("the model's chat template does not name each picture once")
        rendered = pieces[0]
        for length, piece in zip(lengths, pieces[1:], strict=True):
            rendered += processor.image_token * length + piece
        for rows, columns in grids:
            rendered += f"{processor.grid_bos_token}{rows} {columns}{processor.grid_eos_token}"
        return self._prompts.encode(rendered + processor.bos_token, guarded)

    def _resized(self, image: np.ndarray) -> np.ndarray:
        from PIL import Image

        bounds = self._processor.image_processor.size
        height, width = image.shape[:2]
        # The processor's bounds are areas, and it takes their roots as sides.
        shortest, longest = (round(bounds[name] ** 0.5) for name in ("shortest_edge", "longest_edge"))
        size = fitted_size(width, height, shortest, longest)
        if size == (width, height):
            return image
        return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS))

    def _pixels(self, pictures: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        """Patches of all pictures, and their grids."""
        from PIL import Image

        try:
            with locked(self._lock):
                features = self._processor.image_processor(
                    images=[Image.fromarray(picture) for picture in pictures], return_tensors="pt"
                )
        except ValueError as error:
            raise MediaError(f"the processor cannot take these pictures: {error}", param="image") from error
        grids: torch.Tensor = features["image_grid_thw"]
        for picture, (_, rows, columns) in zip(pictures, grids.tolist(), strict=True):
            if picture.shape[:2] != (rows * CELL, columns * CELL):
                height, width = picture.shape[:2]
                raise MediaError(f"the processor rounds a picture of {width}x{height} otherwise", param="image")
        return features["pixel_values"], grids

    def _check_same(self) -> None:
        """Refuse a checkpoint whose prompts are laid out in another way: it would draw something else."""
        size = DEFAULT_SIZE
        messages = [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
        stock = self._processor.apply_chat_template(
            [messages],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"target_h": size, "target_w": size},
        )
        grids = target_grids(size, size, edits=False)
        same = tuple(stock["input_ids"][0].tolist()) == self._encode(_PROBE, grids, ())
        if not same or stock["image_grid_thw"][:, 1:].tolist() != [list(grid) for grid in grids]:
            raise UnsupportedModelError("this checkpoint's prompts differ from those of the known GLM-Image")
