"""Image classification: the most likely of ImageNet's 1,000 classes, by their names in WordNet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from omnistage.core.errors import CheckpointError
from omnistage_starter.efficientnet import CLASSES, SIDE, EfficientNetLite0

_MIN_PROBABILITY = 0.2
"""Of the best label; below it there are no labels."""
_MIN_OTHER_PROBABILITY = 0.1
_MAX_LABELS = 3


class Labeller:
    """Names the main object of an image."""

    def __init__(self, weights: Path, synsets: Path, lemmas: Path) -> None:
        self._network = EfficientNetLite0.load(weights)
        self.names = class_names(synsets, lemmas)

    def labels(self, image: Image.Image) -> list[tuple[str, float]]:
        """The most likely classes and their probabilities; none where the best is too unlikely."""
        views = np.stack([np.asarray(view, np.float32) for view in _views(image)])
        # As in its training: 127 and 128, not ImageNet's mean and standard deviation.
        inputs = torch.from_numpy((views - 127.0) / 128.0).permute(0, 3, 1, 2)
        with torch.inference_mode():
            probabilities = self._network(inputs).softmax(dim=-1).mean(dim=0)
        best, classes = (result.tolist() for result in probabilities.topk(_MAX_LABELS))
        if best[0] < _MIN_PROBABILITY:
            return []
        labels = zip(classes, best, strict=True)
        return [(self.names[index], share) for index, share in labels if share >= _MIN_OTHER_PROBABILITY]


def class_names(synsets: Path, lemmas: Path) -> list[str]:
    """A common name for each class."""
    try:
        words = dict(line.split("\t", 1) for line in lemmas.read_text(encoding="utf-8").splitlines())
        names = [_common_name(words[synset].split(", ")) for synset in synsets.read_text(encoding="utf-8").split()]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{synsets} and {lemmas} do not name the classes ({error}); run `omnistage pull starter --force`"
        ) from error
    if len(names) != CLASSES:
        raise CheckpointError(f"{synsets} has {len(names)} classes, and the network {CLASSES}")
    return names


def _common_name(lemmas: list[str]) -> str:
    """The first lemma, or a longer one with the same word: "tabby cat" for "tabby", but not "Canis dingo"."""
    first = lemmas[0]
    longer = (other for other in lemmas[1:] if first in other.split())
    return next((other for other in longer if other.startswith(first) or other[0].islower()), first)


def _views(image: Image.Image) -> list[Image.Image]:
    """The centre square, and seven eighths of it as in the network's evaluation; their probabilities are averaged."""
    views = []
    for share in (1.0, 7 / 8):
        side = min(image.size) * share
        left, top = ((size - side) / 2 for size in image.size)
        box = (left, top, left + side, top + side)
        views.append(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=box))
    return views
