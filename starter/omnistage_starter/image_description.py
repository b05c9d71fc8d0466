"""A sentence about an image for a language model that takes no images: ImageNet labels, and the text in it.

That is much less than image understanding: a label is one of 1,000 classes, many of them dog breeds and few about
people, and it says nothing about positions, counts or actions.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import numpy as np
from PIL import Image

from omnistage.core.errors import CheckpointError, LimitExceededError, MediaError
from omnistage_starter.image_labels import Labeller
from omnistage_starter.ocr import TextReader, run_to_end

LABEL_FILES = ("labels.safetensors", "synsets.txt", "lemmas.txt")
"""The network, ImageNet's classes as WordNet numbers, and WordNet's words for them."""
OCR_FILES = ("find.onnx", "read.onnx", "characters.txt")
"""The text detector, the recogniser, and the recogniser's characters."""
MAX_PIXELS = 2**26
_MAX_SIDE = 2048  # larger images are scaled down first
_MAX_CHARACTERS = 400  # of all text in an image: the language model has a short attention


class ImageDescriber:
    """Describes images with the parts in a folder. Thread-safe."""

    def __init__(self, folder: Path, threads: int = 1) -> None:
        """`threads` is for the ONNX networks; the classifier uses torch's threads of the calling thread."""
        weights, synsets, lemmas = (folder / name for name in LABEL_FILES)
        detector, recogniser, characters = (folder / name for name in OCR_FILES)
        self._labeller = Labeller(weights, synsets, lemmas) if _present(folder, LABEL_FILES) else None
        self._reader = TextReader(detector, recogniser, characters, threads) if _present(folder, OCR_FILES) else None
        if self._labeller is None and self._reader is None:
            raise CheckpointError(f"{folder} has no parts for image recognition; run `omnistage pull starter`")

    @staticmethod
    def present(folder: Path) -> bool:
        """Whether a folder has the files for labels, or those for text."""
        return _present(folder, LABEL_FILES) or _present(folder, OCR_FILES)

    def describe(self, pixels: np.ndarray) -> str:
        """A sentence in brackets about an image, `uint8 [height, width, 3]`."""
        return run_to_end(self.describe_steps(pixels))

    def describe_steps(self, pixels: np.ndarray) -> Generator[None, None, str]:
        """Returns what `describe` returns, and yields before each run of a network."""
        image = _image(pixels)
        del pixels  # many images may be interleaved, and the scaled one is often far smaller
        labels: list[tuple[str, float]] = []
        lines: list[str] = []
        if self._labeller:
            yield
            labels = self._labeller.labels(image)
        if self._reader:
            # Quoting never shortens a line: beyond as many characters nothing is kept.
            lines = _quotable((yield from self._reader.read_steps(image, _MAX_CHARACTERS)))
        sentences = ["A picture."]
        if labels:
            sentences.append("It may show: " + ", ".join(f"{name} ({share:.0%})" for name, share in labels) + ".")
        if lines:
            sentences.append("The text in it says: " + ", ".join(f'"{line}"' for line in lines) + ".")
        if not labels and not lines:
            sentences.append("It is not clear what it shows.")
        return f"({' '.join(sentences)})"


def _image(pixels: np.ndarray) -> Image.Image:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise MediaError(f"an image must be uint8 [height, width, 3], got {pixels.dtype} {list(pixels.shape)}")
    if (count := pixels.shape[0] * pixels.shape[1]) > MAX_PIXELS:
        raise LimitExceededError(
            f"the image has {count} pixels and at most {MAX_PIXELS} are allowed: send a smaller one"
        )
    image = Image.fromarray(pixels)
    image.thumbnail((_MAX_SIDE, _MAX_SIDE), Image.Resampling.BILINEAR, reducing_gap=2.0)
    return image


def _quotable(lines: list[str]) -> list[str]:
    """Lines to quote in a chat, within the limit of characters: without quotes and marks of a chat template."""
    words, room = [], _MAX_CHARACTERS
    for line in lines:
        plain = line.replace('"', "'").replace("<|", "< |").replace("|>", "| >")
        if len(plain) > room:
            words += [f"{plain[:room]}..."] if room else []
            break
        words.append(plain)
        room -= len(plain)
    return words


def _present(folder: Path, names: tuple[str, ...]) -> bool:
    return all((folder / name).is_file() for name in names)
