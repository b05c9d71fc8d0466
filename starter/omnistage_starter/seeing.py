"""What a picture shows, in words for a language model that has no eyes: labels of ImageNet, and text that stands in it.

That is much less than sight: a label is one of 1,000 words, of which many are breeds of dogs and few are about people,
and it says nothing of where things are, how many, or what happens.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from omnistage.core.errors import CheckpointError, LimitExceededError, MediaError
from omnistage_starter.efficientnet import CLASSES, SIDE, EfficientNetLite0
from omnistage_starter.reading import Reader, whole

LABELLER = ("labels.safetensors", "synsets.txt", "lemmas.txt")
"""Files that labels need: the network, ImageNet's classes by their number in WordNet, and WordNet's words for them."""
READER = ("find.onnx", "read.onnx", "characters.txt")
"""Files that text needs: the network that finds it, the one that reads it, and what that one's classes mean."""
MAX_PIXELS = 2**26
_LONG_SIDE = 2048  # of what is looked at; larger pictures are made smaller first
_SURE = 0.2  # chance of the best label from which there is anything to say
_ALSO = 0.1  # chance of the others
_LABELS = 3
_CHARACTERS = 400  # of all text together: the language model's attention is short


class Observer:
    """Looks at pictures with the parts that lie in a folder. Threads may share one."""

    def __init__(self, folder: Path, threads: int = 1) -> None:
        """`threads` is for the ONNX networks; the other one has as many as torch has in the thread that asks."""
        weights, synsets, lemmas = (folder / name for name in LABELLER)
        find, read, characters = (folder / name for name in READER)
        self._labeller = Labeller(weights, synsets, lemmas) if _there(folder, LABELLER) else None
        self._reader = Reader(find, read, characters, threads) if _there(folder, READER) else None
        if self._labeller is None and self._reader is None:
            raise CheckpointError(f"{folder} holds nothing to see with; `omnistage pull starter` fetches it")

    @staticmethod
    def present(folder: Path) -> bool:
        """Whether a folder holds what labels need, or what text needs."""
        return _there(folder, LABELLER) or _there(folder, READER)

    def describe(self, pixels: np.ndarray) -> str:
        """A sentence in brackets about a picture, bytes `[height, width, 3]`."""
        return whole(self.look(pixels))

    def look(self, pixels: np.ndarray) -> Generator[None, None, str]:
        """Gives what `describe` gives, and stops before each run of a network."""
        picture = _picture(pixels)
        del pixels  # many may be looked at by turns, and what is looked at is often smaller by far
        labels: list[tuple[str, float]] = []
        lines: list[str] = []
        if self._labeller:
            yield
            labels = self._labeller.labels(picture)
        if self._reader:
            # What is quoted is never shorter than what was read: behind as many characters there is no room.
            lines = _bounded((yield from self._reader.reading(picture, _CHARACTERS)))
        said = ["A picture."]
        if labels:
            said.append("It may show: " + ", ".join(f"{name} ({chance:.0%})" for name, chance in labels) + ".")
        if lines:
            said.append("The text in it says: " + ", ".join(f'"{line}"' for line in lines) + ".")
        if not labels and not lines:
            said.append("It is not clear what it shows.")
        return f"({' '.join(said)})"


class Labeller:
    """Names what a picture shows most of."""

    def __init__(self, weights: Path, synsets: Path, lemmas: Path) -> None:
        self._network = EfficientNetLite0.load(weights)
        self.names = class_names(synsets, lemmas)

    def labels(self, picture: Image.Image) -> list[tuple[str, float]]:
        """The likeliest classes and their chances; none where the network has no idea."""
        views = np.stack([np.asarray(view, np.float32) for view in _views(picture)])
        # As in its training: 127 and 128, not ImageNet's mean and deviation.
        inputs = torch.from_numpy((views - 127.0) / 128.0).permute(0, 3, 1, 2)
        with torch.inference_mode():
            chances = self._network(inputs).softmax(dim=-1).mean(dim=0)
        best = chances.topk(_LABELS)
        found = [(self.names[index], chance) for chance, index in zip(*(some.tolist() for some in best), strict=True)]
        return [pair for pair in found if pair[1] >= _ALSO] if found[0][1] >= _SURE else []


def class_names(synsets: Path, lemmas: Path) -> list[str]:
    """A plain name for each class."""
    try:
        words = dict(line.split("\t", 1) for line in lemmas.read_text(encoding="utf-8").splitlines())
        names = [_plain(words[synset].split(", ")) for synset in synsets.read_text(encoding="utf-8").split()]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{synsets} and {lemmas} do not name the classes ({error}); `omnistage pull starter --force` fetches them"
        ) from error
    if len(names) != CLASSES:
        raise CheckpointError(f"{synsets} has {len(names)} classes, and the network {CLASSES}")
    return names


def _plain(lemmas: list[str]) -> str:
    """The first lemma, or one that says more around the same word: "tabby cat" for "tabby", but no "Canis dingo"."""
    first = lemmas[0]
    longer = (other for other in lemmas[1:] if first in other.split())
    return next((other for other in longer if other.startswith(first) or other[0].islower()), first)


def _views(picture: Image.Image) -> list[Image.Image]:
    """The square in the middle, and seven eighths of it as in the network's tests: what both show counts more."""
    views = []
    for share in (1.0, 7 / 8):
        side = min(picture.size) * share
        left, top = ((size - side) / 2 for size in picture.size)
        box = (left, top, left + side, top + side)
        views.append(picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=box))
    return views


def _picture(pixels: np.ndarray) -> Image.Image:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise MediaError(f"a picture is bytes [height, width, 3], not {pixels.dtype} {list(pixels.shape)}")
    if pixels.shape[0] * pixels.shape[1] > MAX_PIXELS:
        raise LimitExceededError(f"a picture of {pixels.shape[0] * pixels.shape[1]} pixels; at most {MAX_PIXELS}")
    picture = Image.fromarray(pixels)
    picture.thumbnail((_LONG_SIDE, _LONG_SIDE), Image.Resampling.BILINEAR, reducing_gap=2.0)
    return picture


def _bounded(lines: list[str]) -> list[str]:
    """Lines fit to be quoted in a chat, as many as there is room for: no quotes, and no marks of a chat template."""
    kept, room = [], _CHARACTERS
    for line in lines:
        plain = line.replace('"', "'").replace("<|", "< |").replace("|>", "| >")
        if len(plain) > room:
            kept += [f"{plain[:room]}..."] if room else []
            break
        kept.append(plain)
        room -= len(plain)
    return kept


def _there(folder: Path, names: tuple[str, ...]) -> bool:
    return all((folder / name).is_file() for name in names)
