"""The starter describes an image step by step: other requests run in between, and the text stays the same."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

pytest.importorskip("onnxruntime", reason="text is read by ONNX Runtime")

from omnistage_starter import hear, image_description
from omnistage_starter.image_description import LABEL_FILES, OCR_FILES, ImageDescriber
from omnistage_starter.ocr import MAX_BOXES, Box, TextReader, group_rows, run_to_end
from omnistage_starter.parts.manifest import STARTER
from omnistage_starter.parts.store import Store

from omnistage.core.messages import ImagePart, TextPart
from omnistage.core.types import FinishReason, StageChunk
from tests.unit import starter_harness
from tests.unit.starter_harness import HearStageHarness
from tests.unit.starter_harness import think as think

LINE = 20
"""Pixels from one of a page's lines to the next."""


class ScriptedReader(TextReader):
    """Reads fixed texts, row by row, each at its place; counts the network runs that it replaces."""

    def __init__(self, *rows: Sequence[str]) -> None:
        self.texts = {
            (50 * place, LINE * number): text for number, row in enumerate(rows) for place, text in enumerate(row)
        }
        self.detections = 0
        self.read_at: list[tuple[int, int]] = []
        self.broken_at: tuple[int, int] | None = None

    def detect(self, image: Image.Image) -> list[Box]:
        self.detections += 1
        return [Box(left, top, left + 40, top + 10) for left, top in self.texts]

    def read_box(self, image: Image.Image, box: Box) -> Generator[None, None, str]:
        yield
        place = (box.left, box.top)
        if place == self.broken_at:
            raise RuntimeError("boom")
        self.read_at.append(place)
        return self.texts[place]

    def all_lines(self) -> list[str]:
        """Every line, whatever was read so far."""
        rows = group_rows(self.detect(Image.new("RGB", (1, 1))))
        texts = ([self.texts[box.left, box.top] for box in row] for row in rows)
        return [line for row in texts if (line := " ".join(filter(None, row)))]


class CountingLabeller:
    def __init__(self) -> None:
        self.images = 0

    def labels(self, image: Image.Image) -> list[tuple[str, float]]:
        self.images += 1
        return [("page", 0.5)]


def describer_of(reader: TextReader, labels: CountingLabeller | None = None) -> ImageDescriber:
    describer = ImageDescriber.__new__(ImageDescriber)  # without the files of the networks
    describer._reader, describer._labeller = reader, labels  # type: ignore[assignment]
    return describer


def picture(shade: int = 0, size: tuple[int, int] = (4, 4)) -> ImagePart:
    return ImagePart(Image.new("RGB", size, (shade, 0, 0)))


def prompts(chunks: Sequence[StageChunk]) -> dict[str, tuple[int, ...]]:
    return {name: prompt.token_ids for name, prompt in starter_harness.prompts(chunks).items()}


def count_steps(steps: Generator[None, None, str]) -> tuple[int, str]:
    """How often a generator yields, and its result."""
    stops = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return stops, end.value
        stops += 1


# -------------------------------------------------------------------------------------------------- interleaving


def test_a_text_request_waits_for_one_line_of_a_dense_image_at_most(think: Path) -> None:
    reader = ScriptedReader(*([f"line {number}"] for number in range(MAX_BOXES)))
    labels = CountingLabeller()
    describer = describer_of(reader, labels)
    harness = HearStageHarness(think, describer)
    harness.submit("picture", picture())
    work, result = [], {}
    for number in range(MAX_BOXES + 2):  # labels, detection, and each line
        result |= prompts(harness.stage.step())
        work.append((labels.images, reader.detections, len(reader.read_at)))
        harness.submit(f"text{number}", TextPart("Hello!"))
        assert set(prompts(harness.stage.step())) == {f"text{number}"}
    assert work == [(1, 0, 0), (1, 1, 0), *((1, 1, read) for read in range(1, MAX_BOXES + 1))]
    assert result == {"picture": harness.tokens(describer.describe(np.asarray(picture().image)))}


def test_dense_images_are_interleaved(think: Path) -> None:
    reader = ScriptedReader(*([f"line {number}"] for number in range(5)))
    harness = HearStageHarness(think, describer_of(reader))
    harness.submit("one", picture(1))
    harness.submit("two", picture(2))
    while harness.stage.has_work():
        harness.stage.step()
    assert reader.read_at == [(0, LINE * number) for number in range(5) for _ in range(2)]


def test_an_aborted_request_is_not_read_further(think: Path) -> None:
    reader = ScriptedReader(*([f"line {number}"] for number in range(10)))
    describer = describer_of(reader)
    harness = HearStageHarness(think, describer)
    harness.submit("gone", picture())
    for _ in range(4):  # detection, and three lines
        harness.stage.step()
    assert set(harness.component._running) == {"gone"}
    harness.stage.abort("gone")
    assert (reader.detections, len(reader.read_at)) == (1, 3)
    assert not harness.stage.has_work()
    assert not harness.component._running
    # A partial description is not cached: the image is described from the beginning.
    harness.submit("again", picture())
    assert prompts(harness.stage.drain())["again"] == harness.tokens(describer.describe(np.asarray(picture().image)))
    assert reader.read_at[3:13] == [(0, LINE * number) for number in range(10)]


def test_a_line_that_fails_ends_its_own_request(think: Path) -> None:
    reader = ScriptedReader(*([f"line {number}"] for number in range(4)))
    harness = HearStageHarness(think, describer_of(reader))
    harness.submit("bad", picture(1))
    for _ in range(3):
        harness.stage.step()
    reader.broken_at = (0, 2 * LINE)
    [chunk] = harness.stage.step()
    assert (chunk.request_id, chunk.finish) == ("bad", FinishReason.ERROR)
    assert not harness.component._running
    reader.broken_at = None
    harness.submit("good", picture(1))
    assert set(prompts(harness.stage.drain())) == {"good"}


def test_an_image_is_described_once(think: Path) -> None:
    reader = ScriptedReader(["once"])
    harness = HearStageHarness(think, describer_of(reader))
    for name in ("first", "later"):
        harness.submit(name, picture())
        assert harness.tokens('(A picture. The text in it says: "once".)') == prompts(harness.stage.drain())[name]
    assert (reader.detections, len(reader.read_at)) == (1, 1)


def test_large_images_that_are_cached_are_hashed_one_per_step(think: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hear, "_LARGE_PIXELS", 100)
    harness = HearStageHarness(think, describer_of(ScriptedReader(["once"])))
    large = [picture(shade, size=(11, 10)) for shade in range(3)]
    harness.submit("first", *large)
    first = prompts(harness.stage.drain())["first"]
    hashed: list[int] = []
    key = hear.content_key
    monkeypatch.setattr(hear, "content_key", lambda *arguments: hashed.append(1) or key(*arguments))
    harness.submit("later", *large)
    for number in range(1, 4):
        chunks = harness.stage.step()
        assert len(hashed) == number
    assert prompts(chunks)["later"] == first


# ------------------------------------------------------------------------------------------------ the same text


TEXTS = st.text(st.sampled_from('ab "<|>'), max_size=12).map(lambda text: " ".join(text.split()))
ROWS = st.lists(st.lists(TEXTS, min_size=1, max_size=4), max_size=6)


@given(ROWS, st.integers(1, 40))
def test_lines_that_are_not_read_would_not_have_been_quoted(rows: list[list[str]], limit: int) -> None:
    reader = ScriptedReader(*rows)
    everything = reader.all_lines()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_description, "_MAX_CHARACTERS", limit)
        assert image_description._quotable(
            run_to_end(reader.read_steps(Image.new("RGB", (1, 1)), limit))
        ) == image_description._quotable(everything)
    assert reader.read_at == list(reader.texts)[: len(reader.read_at)]


@pytest.mark.parametrize(
    ("rows", "limit", "read", "quoted"),
    [
        ([["ab"], ["aba"], ["bb"]], 100, 3, ["ab", "aba", "bb"]),
        ([["ab"], ["aba"], ["bb"]], 6, 3, ["ab", "aba", "b..."]),
        ([["ab"], ["aba"], ["bb"]], 5, 2, ["ab", "aba"]),
        ([["ab", "ba", "aa"], ["bb"]], 4, 2, ["ab b..."]),
        ([["ab", "ba", "aa"], ["bb"]], 5, 3, ["ab ba..."]),  # just full, and whether the line goes on must be known
        ([["ab", "ba", ""], ["bb"]], 5, 3, ["ab ba"]),
        ([['""', "b"], ["bb"]], 4, 2, ["'' b"]),
    ],
)
def test_reading_stops_at_the_limit_of_characters(
    rows: list[list[str]], limit: int, read: int, quoted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_description, "_MAX_CHARACTERS", limit)
    reader = ScriptedReader(*rows)
    text = describer_of(reader).describe(np.asarray(picture().image))
    assert text == "(A picture. The text in it says: " + ", ".join(f'"{line}"' for line in quoted) + ".)"
    assert len(reader.read_at) == read


def test_steps_and_describe_give_the_same_sentence() -> None:
    reader = ScriptedReader(["ab", "ba"], [""], ["a" * 500], ["never read"])
    describer = describer_of(reader, CountingLabeller())
    pixels = np.asarray(picture().image)
    stops, sentence = count_steps(describer.describe_steps(pixels))
    assert stops == 1 + 1 + 4  # labels, detection, and all boxes but the last
    assert sentence == describer.describe(pixels)
    assert sentence == f'(A picture. It may show: page (50%). The text in it says: "ab ba", "{"a" * 395}...".)'


@pytest.mark.slow
def test_the_real_networks_read_a_dense_page_in_steps() -> None:
    folder = Store.of(STARTER).root / "see"
    if not all((folder / name).is_file() for name in (*LABEL_FILES, *OCR_FILES)):
        pytest.skip("image recognition is not here: `omnistage pull starter` fetches it")
    describer = ImageDescriber(folder)
    page = Image.new("RGB", (640, 640), "white")
    for number in range(20):
        ImageDraw.Draw(page).text(
            (20, 4 + 32 * number), f"Line {number} of a page", "black", ImageFont.load_default(20)
        )
    stops, sentence = count_steps(describer.describe_steps(np.asarray(page)))
    assert stops == 2 + 20
    assert describer._reader is not None
    everything = ", ".join(f'"{line}"' for line in image_description._quotable(describer._reader.read(page)))
    assert everything.startswith('"Line')
    assert f"The text in it says: {everything}." in sentence
