"""Optical character recognition: PP-OCRv4's text detector and text recogniser, run by ONNX Runtime.

Boxes are upright rectangles: text that is rotated by more than a few degrees is not read well.
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

MAX_SIDE = 1280
"""Pixels of the longer side in the detector; larger images are scaled down."""
MAX_BOXES = 24
"""Boxes that are recognised: the largest ones."""
_MIN_SIDE = 384  # of the shorter side; smaller images are scaled up: the detector was trained on pages and photographs
_STRIDE = 32  # sides in the detector are multiples of it
_TEXT_THRESHOLD = 0.3  # of a pixel in the detector's map
_BOX_THRESHOLD = 0.6  # of the mean over a box's pixels
_MIN_BOX_SIDE = 3  # pixels
_UNCLIP_RATIO = 1.6  # the detector marks the core of a line; PP-OCR expands it by this ratio of area to perimeter
_LINE_THRESHOLD = 0.7  # of the mean over a line's characters
_SPACE_THRESHOLD = 0.1  # of a space where the recogniser sees no character
_LINE_HEIGHT = 48  # pixels in the recogniser
_MIN_LINE_WIDTH, _MAX_LINE_WIDTH = 320, 1920  # narrower lines are padded, wider ones squeezed
_PIXELS, _MAP, _PROBABILITIES = "x", "sigmoid_0.tmp_0", "softmax_11.tmp_0"  # names in the files
_VERTICAL_RATIO = 2.0  # height over width from which a box is also tried as a vertical line

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels; `right` and `bottom` are exclusive."""

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


class TextReader:
    """Reads the text in images."""

    def __init__(self, detector: Path, recogniser: Path, characters: Path, threads: int = 1) -> None:
        try:
            alphabet = characters.read_text(encoding="utf-8").split("\n")
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{characters} cannot be read ({error}); run `omnistage pull starter` again"
            ) from error
        # Class 0 is "no character"; the last one is a space, which the file does not list.
        self._characters = ["", *alphabet, " "]
        self._detector = OnnxModule(
            detector,
            inputs={_PIXELS: "float32[batch, 3, height, width]"},
            outputs={_MAP: "float32[batch, 1, height, width]"},
            threads=threads,
        )
        self._recogniser = OnnxModule(
            recogniser,
            inputs={_PIXELS: f"float32[batch, 3, {_LINE_HEIGHT}, width]"},
            outputs={_PROBABILITIES: f"float32[batch, steps, {len(self._characters)}]"},
            threads=threads,
        )

    def read(self, image: Image.Image) -> list[str]:
        """The lines of an image, from top to bottom and from left to right in a row."""
        return run_to_end(self.read_steps(image))

    def read_steps(self, image: Image.Image, max_characters: int = sys.maxsize) -> Generator[None, None, list[str]]:
        """Returns what `read` returns, and yields before each run of a network.

        Reading ends with the line that reaches `max_characters`, and within it once there are more.
        """
        yield
        boxes = sorted(self.detect(image), key=lambda box: box.width * box.height, reverse=True)[:MAX_BOXES]
        lines: list[str] = []
        for row in group_rows(boxes):
            line = yield from self._read_row(image, row, max_characters)
            if line:
                lines.append(line)
            max_characters -= len(line)
            if max_characters <= 0:
                break
        return lines

    def detect(self, image: Image.Image) -> list[Box]:
        """The boxes of lines of text."""
        width, height = image.size
        scale = min(max(_MIN_SIDE / min(width, height), 1.0), MAX_SIDE / max(width, height))
        map_width, map_height = (max(round(size * scale / _STRIDE), 1) * _STRIDE for size in (width, height))
        pixels = _planes(image.resize((map_width, map_height), Image.Resampling.BILINEAR))
        probability = self._detector.run({_PIXELS: pixels[None]})[_MAP][0, 0]
        boxes = []
        for box, mean in components(probability > _TEXT_THRESHOLD, probability):
            if mean < _BOX_THRESHOLD or min(box.width, box.height) < _MIN_BOX_SIDE:
                continue
            margin = box.width * box.height * _UNCLIP_RATIO / (2 * (box.width + box.height))
            boxes.append(
                Box(
                    max(int((box.left - margin) * width / map_width), 0),
                    max(int((box.top - margin) * height / map_height), 0),
                    min(-int(-(box.right + margin) * width // map_width), width),
                    min(-int(-(box.bottom + margin) * height // map_height), height),
                )
            )
        return boxes

    def read_box(self, image: Image.Image, box: Box) -> Generator[None, None, str]:
        """The text in a box; empty below the threshold. Yields before each run of the network."""
        crop = image.crop((box.left, box.top, box.right, box.bottom))
        orientations = [crop]
        if box.height >= _VERTICAL_RATIO * box.width:
            orientations += [crop.transpose(Image.Transpose.ROTATE_90), crop.transpose(Image.Transpose.ROTATE_270)]
        results = []
        for orientation in orientations:
            yield
            results.append(self._recognise(orientation))
        text, confidence = max(results, key=lambda result: result[1])
        return text if confidence >= _LINE_THRESHOLD else ""

    def _read_row(self, image: Image.Image, boxes: list[Box], max_characters: int) -> Generator[None, None, str]:
        """The text of boxes beside each other; ends once it has more than `max_characters`."""
        line = ""
        for box in boxes:
            text = yield from self.read_box(image, box)
            line = " ".join(filter(None, (line, text)))
            if len(line) > max_characters:
                break
        return line

    def _recognise(self, line: Image.Image) -> tuple[str, float]:
        width = min(max(round(line.width * _LINE_HEIGHT / line.height), 1), _MAX_LINE_WIDTH)
        pixels = np.zeros((1, 3, _LINE_HEIGHT, max(width, _MIN_LINE_WIDTH)), np.float32)
        pixels[0, :, :, :width] = _planes(line.resize((width, _LINE_HEIGHT), Image.Resampling.BILINEAR))
        probabilities = self._recogniser.run({_PIXELS: pixels})[_PROBABILITIES][0]
        best = probabilities.argmax(axis=-1)
        # Trained mostly on Chinese, which has no spaces, the network underrates them: a lower threshold restores them.
        space = len(self._characters) - 1
        best[(best == 0) & (probabilities[:, space] >= _SPACE_THRESHOLD)] = space
        # CTC: one character may take several steps in a row; two equal ones have a "no character" step between them.
        first = (best != 0) & (best != np.concatenate(([0], best[:-1])))
        # NFKC: Chinese commas and full-width letters become plain ones.
        text = unicodedata.normalize("NFKC", "".join(self._characters[index] for index in best[first]))
        text = " ".join(text.split())
        if not any(character.isalnum() for character in text):
            return "", 0.0
        return text, float(probabilities.max(axis=-1)[first & (best != space)].mean())


def run_to_end(steps: Generator[None, None, T]) -> T:
    """Run a generator to its end and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def group_rows(boxes: list[Box]) -> list[list[Box]]:
    """Boxes in reading order; boxes beside each other share a row."""
    rows: list[list[Box]] = []
    for box in sorted(boxes, key=lambda box: (box.top + box.bottom, box.left)):
        if rows and all(_same_row(box, other) for other in rows[-1]):
            rows[-1].append(box)
        else:
            rows.append([box])
    return [sorted(row, key=lambda box: box.left) for row in rows]


def _same_row(one: Box, two: Box) -> bool:
    """Whether they overlap by half of the smaller height, and by less than half of the smaller width."""
    vertical = min(one.bottom, two.bottom) - max(one.top, two.top)
    horizontal = min(one.right, two.right) - max(one.left, two.left)
    return 2 * vertical >= min(one.height, two.height) and 2 * horizontal < min(one.width, two.width)


def components(mask: np.ndarray, values: np.ndarray) -> Iterator[tuple[Box, float]]:
    """The bounding box and the mean value of each 8-connected component of a mask."""
    edges = np.diff(np.pad(mask.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    rows, starts = np.nonzero(edges == 1)
    ends = np.nonzero(edges == -1)[1]
    # Sums over runs as differences of one cumulative sum.
    total = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    sums = total[rows * mask.shape[1] + ends] - total[rows * mask.shape[1] + starts]
    labels = _label_runs(rows.tolist(), starts.tolist(), ends.tolist())
    order = np.argsort(labels, kind="stable")
    firsts = np.nonzero(np.diff(labels[order], prepend=-1))[0]
    if not len(firsts):
        return
    lefts, tops = (np.minimum.reduceat(bound[order], firsts) for bound in (starts, rows))
    rights, bottoms = (np.maximum.reduceat(bound[order], firsts) for bound in (ends, rows + 1))
    means = np.add.reduceat(sums[order], firsts) / np.add.reduceat((ends - starts)[order], firsts)
    for left, top, right, bottom, mean in zip(lefts, tops, rights, bottoms, means, strict=True):
        yield Box(int(left), int(top), int(right), int(bottom)), float(mean)


def _label_runs(rows: list[int], starts: list[int], ends: list[int]) -> np.ndarray:
    """For each run of pixels, in row order, the number of the first run of its component (union-find)."""
    parent = list(range(len(rows)))

    def root(run: int) -> int:
        while parent[run] != run:
            parent[run] = run = parent[parent[run]]
        return run

    above = 0
    for run, row in enumerate(rows):
        # Runs above that end before this one starts touch no later run of this row.
        while rows[above] < row - 1 or (rows[above] == row - 1 and ends[above] < starts[run]):
            above += 1
        other = above
        while rows[other] == row - 1 and starts[other] <= ends[run]:
            one, two = root(run), root(other)
            parent[max(one, two)] = min(one, two)
            other += 1
    return np.array([root(run) for run in range(len(rows))], np.int64)


def _planes(image: Image.Image) -> np.ndarray:
    """`[3, height, width]` from -1 to 1 in BGR order, as both networks were trained."""
    pixels = np.asarray(image.convert("RGB"), np.float32)[:, :, ::-1]
    return np.ascontiguousarray((pixels / 127.5 - 1.0).transpose(2, 0, 1))
