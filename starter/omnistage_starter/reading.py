"""Text in pictures: one network finds where it stands, another reads it. Both are PP-OCRv4's, run by ONNX Runtime.

Lines are taken to lie flat: boxes are upright rectangles. Text at an angle of more than a few degrees is not read well.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image

from omnistage.core.errors import CheckpointError
from omnistage.engines.codec.onnx import OnnxModule

LONG_SIDE = 1280
"""Most pixels of a picture's longer side that are searched; larger pictures are made smaller."""
_SHORT_SIDE = 384  # smaller pictures are made larger: the detector was trained on pages and photographs
_STRIDE = 32  # the detector's pictures are multiples of it
_INK = 0.3  # of the detector's map, a pixel that belongs to text
_BOX = 0.6  # mean over a box's pixels
_LEAST = 3  # pixels of a box's shorter side
_GROW = 1.6  # the detector marks the core of a line; PP-OCR's ratio of area to border gives the rest back
_SURE = 0.7  # mean over a line's characters
_SPACE = 0.1  # where the reader sees no character, the chance from which it is a space
MAX_BOXES = 24
"""Most boxes that are read: the largest ones."""
_HEIGHT = 48  # the reader's line
_WIDTHS = (320, 1920)  # narrower lines are filled up, longer ones squeezed
_PIXELS, _MAP, _CHANCES = "x", "sigmoid_0.tmp_0", "softmax_11.tmp_0"  # as the files name them
_TALL = 2.0  # height over width from which a box may hold a line that runs upwards or downwards

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Box:
    """Where a line stands, in pixels; `right` and `bottom` are the first ones outside."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def width(self) -> int:
        return self.right - self.left

    @property
    def height(self) -> int:
        return self.bottom - self.top


class Reader:
    """Reads the text in pictures."""

    def __init__(self, find: Path, read: Path, characters: Path, threads: int = 1) -> None:
        try:
            listed = characters.read_text(encoding="utf-8").split("\n")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{characters} cannot be read ({error}); fetch it again") from error
        # Class 0 is "no character", the last one a space that the list leaves out.
        self._characters = ["", *listed, " "]
        self._find = OnnxModule(
            find,
            inputs={_PIXELS: "float32[batch, 3, height, width]"},
            outputs={_MAP: "float32[batch, 1, height, width]"},
            threads=threads,
        )
        self._read = OnnxModule(
            read,
            inputs={_PIXELS: f"float32[batch, 3, {_HEIGHT}, width]"},
            outputs={_CHANCES: f"float32[batch, steps, {len(self._characters)}]"},
            threads=threads,
        )

    def read(self, picture: Image.Image) -> list[str]:
        """The lines of a picture, from top to bottom and from left to right in a row."""
        return whole(self.reading(picture))

    def reading(self, picture: Image.Image, most: int = sys.maxsize) -> Generator[None, None, list[str]]:
        """Gives what `read` gives, and stops before each run of a network.

        Nothing is read behind the line with which there are `most` characters, nor in it once there are more.
        """
        yield
        boxes = sorted(self.find(picture), key=lambda box: box.width * box.height, reverse=True)[:MAX_BOXES]
        lines: list[str] = []
        for row in in_rows(boxes):
            line = yield from self._row(picture, row, most)
            if line:
                lines.append(line)
            most -= len(line)
            if most <= 0:
                break
        return lines

    def find(self, picture: Image.Image) -> list[Box]:
        """Where text stands."""
        width, height = picture.size
        scale = min(max(_SHORT_SIDE / min(width, height), 1.0), LONG_SIDE / max(width, height))
        across, down = (max(round(size * scale / _STRIDE), 1) * _STRIDE for size in (width, height))
        pixels = _planes(picture.resize((across, down), Image.Resampling.BILINEAR))
        chance = self._find.run({_PIXELS: pixels[None]})[_MAP][0, 0]
        boxes = []
        for box, mean in components(chance > _INK, chance):
            if mean < _BOX or min(box.width, box.height) < _LEAST:
                continue
            more = box.width * box.height * _GROW / (2 * (box.width + box.height))
            boxes.append(
                Box(
                    max(int((box.left - more) * width / across), 0),
                    max(int((box.top - more) * height / down), 0),
                    min(-int(-(box.right + more) * width // across), width),
                    min(-int(-(box.bottom + more) * height // down), height),
                )
            )
        return boxes

    def line(self, picture: Image.Image, box: Box) -> Generator[None, None, str]:
        """What a box says; empty where that is not sure. Stops before each run of the network."""
        crop = picture.crop((box.left, box.top, box.right, box.bottom))
        ways = [crop]
        if box.height >= _TALL * box.width:
            ways += [crop.transpose(Image.Transpose.ROTATE_90), crop.transpose(Image.Transpose.ROTATE_270)]
        read = []
        for way in ways:
            yield
            read.append(self._recognise(way))
        text, sure = max(read, key=lambda found: found[1])
        return text if sure >= _SURE else ""

    def _row(self, picture: Image.Image, boxes: list[Box], most: int) -> Generator[None, None, str]:
        """What the boxes beside each other say; without the rest once that is more than `most` characters."""
        line = ""
        for box in boxes:
            text = yield from self.line(picture, box)
            line = " ".join(filter(None, (line, text)))
            if len(line) > most:
                break
        return line

    def _recognise(self, line: Image.Image) -> tuple[str, float]:
        least, most = _WIDTHS
        width = min(max(round(line.width * _HEIGHT / line.height), 1), most)
        pixels = np.zeros((1, 3, _HEIGHT, max(width, least)), np.float32)
        pixels[0, :, :, :width] = _planes(line.resize((width, _HEIGHT), Image.Resampling.BILINEAR))
        chances = self._read.run({_PIXELS: pixels})[_CHANCES][0]
        best = chances.argmax(axis=-1)
        # The network learnt from Chinese, which has no spaces: it rarely prefers one, but it knows where they are.
        space = len(self._characters) - 1
        best[(best == 0) & (chances[:, space] >= _SPACE)] = space
        # One character may take several steps in a row; two of the same have a step of "no character" between them.
        first = (best != 0) & (best != np.concatenate(([0], best[:-1])))
        # NFKC: Chinese commas and full-width letters become plain ones.
        text = unicodedata.normalize("NFKC", "".join(self._characters[index] for index in best[first]))
        text = " ".join(text.split())
        if not any(character.isalnum() for character in text):
            return "", 0.0
        return text, float(chances.max(axis=-1)[first & (best != space)].mean())


def whole(work: Generator[None, None, T]) -> T:
    """What comes of work that is done piece by piece, without a stop."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def in_rows(boxes: list[Box]) -> list[list[Box]]:
    """Boxes in reading order. Those beside each other share a row."""
    rows: list[list[Box]] = []
    for box in sorted(boxes, key=lambda box: (box.top + box.bottom, box.left)):
        if rows and all(_beside(box, other) for other in rows[-1]):
            rows[-1].append(box)
        else:
            rows.append([box])
    return [sorted(row, key=lambda box: box.left) for row in rows]


def _beside(one: Box, two: Box) -> bool:
    """Whether they share half of the lower one's height, and less than half of the narrower one's width."""
    down = min(one.bottom, two.bottom) - max(one.top, two.top)
    across = min(one.right, two.right) - max(one.left, two.left)
    return 2 * down >= min(one.height, two.height) and 2 * across < min(one.width, two.width)


def components(mask: np.ndarray, values: np.ndarray) -> Iterator[tuple[Box, float]]:
    """The connected areas of a mask (diagonals count): the rectangle around each, and the mean of its values."""
    edges = np.diff(np.pad(mask.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    rows, begins = np.nonzero(edges == 1)
    ends = np.nonzero(edges == -1)[1]
    # Sums of runs as differences of one running sum.
    total = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    sums = total[rows * mask.shape[1] + ends] - total[rows * mask.shape[1] + begins]
    parents = _joined(rows.tolist(), begins.tolist(), ends.tolist())
    order = np.argsort(parents, kind="stable")
    starts = np.nonzero(np.diff(parents[order], prepend=-1))[0]
    if not len(starts):
        return
    lefts, tops = (np.minimum.reduceat(some[order], starts) for some in (begins, rows))
    rights, bottoms = (np.maximum.reduceat(some[order], starts) for some in (ends, rows + 1))
    means = np.add.reduceat(sums[order], starts) / np.add.reduceat((ends - begins)[order], starts)
    for left, top, right, bottom, mean in zip(lefts, tops, rights, bottoms, means, strict=True):
        yield Box(int(left), int(top), int(right), int(bottom)), float(mean)


def _joined(rows: list[int], begins: list[int], ends: list[int]) -> np.ndarray:
    """For each run of pixels, the number of the first run of its area. Runs come row by row."""
    parent = list(range(len(rows)))

    def root(run: int) -> int:
        while parent[run] != run:
            parent[run] = run = parent[parent[run]]
        return run

    above = 0
    for run, row in enumerate(rows):
        # Runs above that end before this one begins touch nothing that follows in this row.
        while rows[above] < row - 1 or (rows[above] == row - 1 and ends[above] < begins[run]):
            above += 1
        other = above
        while rows[other] == row - 1 and begins[other] <= ends[run]:
            one, two = root(run), root(other)
            parent[max(one, two)] = min(one, two)
            other += 1
    return np.array([root(run) for run in range(len(rows))], np.int64)


def _planes(picture: Image.Image) -> np.ndarray:
    """`[3, height, width]` from -1 to 1, blue first, as both networks were trained."""
    pixels = np.asarray(picture.convert("RGB"), np.float32)[:, :, ::-1]
    return np.ascontiguousarray((pixels / 127.5 - 1.0).transpose(2, 0, 1))
