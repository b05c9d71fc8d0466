"""The starter looks at a picture piece by piece: others have their turns in between, and the words stay the same."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

pytest.importorskip("onnxruntime", reason="text is read by ONNX Runtime")

from omnistage_starter import hear, seeing
from omnistage_starter.parts.manifest import STARTER
from omnistage_starter.parts.store import Store
from omnistage_starter.reading import MAX_BOXES, Box, Reader, in_rows, whole
from omnistage_starter.seeing import LABELLER, READER, Observer

from omnistage.core.messages import ImagePart, TextPart
from omnistage.core.types import FinishReason, StageChunk
from tests.unit import starter_harness
from tests.unit.starter_harness import HearStageHarness
from tests.unit.starter_harness import think as think

LINE = 20
"""Pixels from one of a page's lines to the next."""


class Lines(Reader):
    """Reads texts that are given: row after row, each at its place. No network runs, and what would run is counted."""

    def __init__(self, *rows: Sequence[str]) -> None:
        self.texts = {
            (50 * place, LINE * number): text for number, row in enumerate(rows) for place, text in enumerate(row)
        }
        self.searched = 0
        self.read_at: list[tuple[int, int]] = []
        self.broken_at: tuple[int, int] | None = None

    def find(self, picture: Image.Image) -> list[Box]:
        self.searched += 1
        return [Box(left, top, left + 40, top + 10) for left, top in self.texts]

    def line(self, picture: Image.Image, box: Box) -> Generator[None, None, str]:
        yield
        place = (box.left, box.top)
        if place == self.broken_at:
            raise RuntimeError("boom")
        self.read_at.append(place)
        return self.texts[place]

    def all_lines(self) -> list[str]:
        """Every line, whatever was read so far."""
        rows = in_rows(self.find(Image.new("RGB", (1, 1))))
        texts = ([self.texts[box.left, box.top] for box in row] for row in rows)
        return [line for row in texts if (line := " ".join(filter(None, row)))]


class Labels:
    def __init__(self) -> None:
        self.pictures = 0

    def labels(self, picture: Image.Image) -> list[tuple[str, float]]:
        self.pictures += 1
        return [("page", 0.5)]


def eyes_of(reader: Reader, labels: Labels | None = None) -> Observer:
    eyes = Observer.__new__(Observer)  # without the files of the networks
    eyes._reader, eyes._labeller = reader, labels  # type: ignore[assignment]
    return eyes


def picture(shade: int = 0, size: tuple[int, int] = (4, 4)) -> ImagePart:
    return ImagePart(Image.new("RGB", size, (shade, 0, 0)))


def prompts(chunks: Sequence[StageChunk]) -> dict[str, tuple[int, ...]]:
    return {name: prompt.token_ids for name, prompt in starter_harness.prompts(chunks).items()}


def turns(work: Generator[None, None, str]) -> tuple[int, str]:
    """How often work stops, and what comes of it."""
    stops = 0
    while True:
        try:
            next(work)
        except StopIteration as end:
            return stops, end.value
        stops += 1


# -------------------------------------------------------------------------------------------------- the turns


def test_who_writes_waits_for_one_line_of_a_dense_picture_at_most(think: Path) -> None:
    lines = Lines(*([f"line {number}"] for number in range(MAX_BOXES)))
    labels = Labels()
    eyes = eyes_of(lines, labels)
    harness = HearStageHarness(think, eyes)
    harness.submit("picture", picture())
    work, made = [], {}
    for number in range(MAX_BOXES + 2):  # labels, finding the lines, and each line
        made |= prompts(harness.stage.step())
        work.append((labels.pictures, lines.searched, len(lines.read_at)))
        harness.submit(f"text{number}", TextPart("Hello!"))
        assert set(prompts(harness.stage.step())) == {f"text{number}"}
    assert work == [(1, 0, 0), (1, 1, 0), *((1, 1, read) for read in range(1, MAX_BOXES + 1))]
    assert made == {"picture": harness.tokens(eyes.describe(np.asarray(picture().image)))}


def test_dense_pictures_take_turns_with_each_other(think: Path) -> None:
    lines = Lines(*([f"line {number}"] for number in range(5)))
    harness = HearStageHarness(think, eyes_of(lines))
    harness.submit("one", picture(1))
    harness.submit("two", picture(2))
    while harness.stage.has_work():
        harness.stage.step()
    assert lines.read_at == [(0, LINE * number) for number in range(5) for _ in range(2)]


def test_nothing_more_is_read_for_a_request_that_was_aborted(think: Path) -> None:
    lines = Lines(*([f"line {number}"] for number in range(10)))
    eyes = eyes_of(lines)
    harness = HearStageHarness(think, eyes)
    harness.submit("gone", picture())
    for _ in range(4):  # finding the lines, and three of them
        harness.stage.step()
    assert set(harness.component._underway) == {"gone"}
    harness.stage.abort("gone")
    assert (lines.searched, len(lines.read_at)) == (1, 3)
    assert not harness.stage.has_work()
    assert not harness.component._underway
    # Half of a picture's words are no picture's words: it is looked at anew.
    harness.submit("again", picture())
    assert prompts(harness.stage.drain())["again"] == harness.tokens(eyes.describe(np.asarray(picture().image)))
    assert lines.read_at[3:13] == [(0, LINE * number) for number in range(10)]


def test_a_line_that_breaks_ends_its_own_request(think: Path) -> None:
    lines = Lines(*([f"line {number}"] for number in range(4)))
    harness = HearStageHarness(think, eyes_of(lines))
    harness.submit("bad", picture(1))
    for _ in range(3):
        harness.stage.step()
    lines.broken_at = (0, 2 * LINE)
    [chunk] = harness.stage.step()
    assert (chunk.request_id, chunk.finish) == ("bad", FinishReason.ERROR)
    assert not harness.component._underway
    lines.broken_at = None
    harness.submit("good", picture(1))
    assert set(prompts(harness.stage.drain())) == {"good"}


def test_a_picture_that_is_known_is_not_looked_at_again(think: Path) -> None:
    lines = Lines(["once"])
    harness = HearStageHarness(think, eyes_of(lines))
    for name in ("first", "later"):
        harness.submit(name, picture())
        assert harness.tokens('(A picture. The text in it says: "once".)') == prompts(harness.stage.drain())[name]
    assert (lines.searched, len(lines.read_at)) == (1, 1)


def test_large_pictures_that_are_known_are_not_all_compared_in_one_turn(
    think: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hear, "_LARGE", 100)
    harness = HearStageHarness(think, eyes_of(Lines(["once"])))
    large = [picture(shade, size=(11, 10)) for shade in range(3)]
    harness.submit("first", *large)
    first = prompts(harness.stage.drain())["first"]
    compared: list[int] = []
    key = hear.content_key
    monkeypatch.setattr(hear, "content_key", lambda *given: compared.append(1) or key(*given))
    harness.submit("later", *large)
    for number in range(1, 4):
        chunks = harness.stage.step()
        assert len(compared) == number
    assert prompts(chunks)["later"] == first


# ------------------------------------------------------------------------------------------------ the same words


TEXTS = st.text(st.sampled_from('ab "<|>'), max_size=12).map(lambda text: " ".join(text.split()))
ROWS = st.lists(st.lists(TEXTS, min_size=1, max_size=4), max_size=6)


@given(ROWS, st.integers(1, 40))
def test_what_is_not_read_would_not_have_been_quoted(rows: list[list[str]], most: int) -> None:
    lines = Lines(*rows)
    everything = lines.all_lines()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seeing, "_CHARACTERS", most)
        assert seeing._bounded(whole(lines.reading(Image.new("RGB", (1, 1)), most))) == seeing._bounded(everything)
    assert lines.read_at == list(lines.texts)[: len(lines.read_at)]


@pytest.mark.parametrize(
    ("rows", "most", "read", "quoted"),
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
def test_reading_stops_where_there_is_no_more_room(
    rows: list[list[str]], most: int, read: int, quoted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeing, "_CHARACTERS", most)
    lines = Lines(*rows)
    said = eyes_of(lines).describe(np.asarray(picture().image))
    assert said == "(A picture. The text in it says: " + ", ".join(f'"{line}"' for line in quoted) + ".)"
    assert len(lines.read_at) == read


def test_whole_and_by_turns_give_the_same_sentence() -> None:
    lines = Lines(["ab", "ba"], [""], ["a" * 500], ["never read"])
    eyes = eyes_of(lines, Labels())
    pixels = np.asarray(picture().image)
    stops, sentence = turns(eyes.look(pixels))
    assert stops == 1 + 1 + 4  # labels, finding the lines, and all boxes but the last
    assert sentence == eyes.describe(pixels)
    assert sentence == f'(A picture. It may show: page (50%). The text in it says: "ab ba", "{"a" * 395}...".)'


@pytest.mark.slow
def test_the_real_eyes_read_a_dense_page_by_turns() -> None:
    folder = Store.of(STARTER).root / "see"
    if not all((folder / name).is_file() for name in (*LABELLER, *READER)):
        pytest.skip("the starter's eyes are not here: `omnistage pull starter` gets them")
    eyes = Observer(folder)
    page = Image.new("RGB", (640, 640), "white")
    for number in range(20):
        ImageDraw.Draw(page).text(
            (20, 4 + 32 * number), f"Line {number} of a page", "black", ImageFont.load_default(20)
        )
    stops, sentence = turns(eyes.look(np.asarray(page)))
    assert stops == 2 + 20
    assert eyes._reader is not None
    everything = ", ".join(f'"{line}"' for line in seeing._bounded(eyes._reader.read(page)))
    assert everything.startswith('"Line')
    assert f"The text in it says: {everything}." in sentence
