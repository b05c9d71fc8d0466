"""What a user sends to a drawing pipeline, as its encoding stage takes it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omnistage.core.errors import UnsupportedModalityError
from omnistage.core.params import DiffusionParams
from omnistage.core.types import DiffusionInput, Modality


class DrawingProcessor:
    """Prompts and pictures become a `DiffusionInput`. Whether the pictures fit is the encoder's to say."""

    def __init__(self, *, takes_images: bool) -> None:
        self.input_modalities = frozenset({Modality.TEXT, Modality.IMAGE} if takes_images else {Modality.TEXT})

    def draw(
        self, prompt: str, images: Sequence[np.ndarray], mask: np.ndarray | None, params: DiffusionParams
    ) -> DiffusionInput:
        if images and Modality.IMAGE not in self.input_modalities:
            raise UnsupportedModalityError("this model draws from text alone; leave the image out", param="image")
        return DiffusionInput(prompt, tuple(images), mask)

    def voices(self) -> tuple[str, ...]:
        return ()
