"""hear2think, think2speak and think2draw: folds whose result depends on what was said, not on how it was cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omnistage_starter.bridges import (
    BRIDGES,
    SIZE,
    SUBJECT,
    TEXT_ROWS,
    VERBATIM,
    condition_of,
    hear2think,
    think2draw,
    think2speak,
)

from omnistage.core.errors import BridgeError
from omnistage.core.registry import check_bridge
from omnistage.core.types import (
    ARInput,
    AudioChunk,
    Condition,
    FinishReason,
    ModuleInput,
    ModuleOutput,
    RequestInfo,
    StageChunk,
    TokenChunk,
)

INFO = RequestInfo("r")
WIDTH = 4
TEXT = "The fox is red. It sleeps under the old tree, near the school! Does it dream? Perhaps it does"


def fold(bridge: Any, chunks: Sequence[StageChunk]) -> list[Any]:
    state: object = None
    outputs: list[Any] = []
    for chunk in chunks:
        state, inputs = bridge(INFO, state, chunk)
        outputs += inputs
    return outputs


def written(texts: Sequence[str], finish: FinishReason | None = FinishReason.STOP, **first: Any) -> list[StageChunk]:
    chunks = []
    for number, text in enumerate(texts):
        payload = TokenChunk((number,), text, **(first if number == 0 else {}))
        last = number == len(texts) - 1
        chunks.append(StageChunk("r", "think", payload, finish=finish if last else None))
    return chunks


def test_every_bridge_has_the_signature_that_the_registry_asks_for() -> None:
    for name, bridge in BRIDGES.items():
        check_bridge(name, bridge)


# ---------------------------------------------------------------------------------------------------- hear2think


def test_the_prompt_is_passed_on_unchanged() -> None:
    prompt = ARInput((1, 2, 3))
    assert fold(hear2think, [StageChunk("r", "hear", ModuleOutput(prompt=prompt, text="heard"))]) == [prompt]


def test_other_chunks_give_no_prompt() -> None:
    chunks = [StageChunk("r", "hear"), StageChunk("r", "hear", ModuleOutput(text="only words"))]
    assert fold(hear2think, chunks) == []


# --------------------------------------------------------------------------------------------------- think2speak


def test_a_sentence_is_emitted_before_the_next_is_generated() -> None:
    state, first = think2speak(INFO, None, StageChunk("r", "think", TokenChunk((1,), "The fox is red. It")))
    assert [(piece.text, piece.final) for piece in first] == [("The fox is red.", False)]
    _, rest = think2speak(INFO, state, StageChunk("r", "think", TokenChunk((2,), " sleeps"), finish=FinishReason.STOP))
    assert [(piece.text, piece.final) for piece in rest] == [("It sleeps", True)]


@given(st.lists(st.integers(1, len(TEXT) - 1), max_size=12))
def test_the_chunking_of_text_does_not_matter(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(TEXT)]
    pieces = fold(think2speak, written([TEXT[a:b] for a, b in itertools.pairwise(edges)]))
    whole = fold(think2speak, written([TEXT]))
    assert [piece.text for piece in pieces if piece.text] == [piece.text for piece in whole if piece.text]
    assert " ".join(piece.text for piece in pieces).split() == TEXT.split()
    assert [piece.final for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_an_end_without_words_is_an_empty_final_piece() -> None:
    state, pieces = think2speak(INFO, None, StageChunk("r", "think", TokenChunk((1,), "All is said.\n\n")))
    assert [(piece.text, piece.final) for piece in pieces] == [("All is said.", False)]
    _, last = think2speak(INFO, state, StageChunk("r", "think", TokenChunk(), finish=FinishReason.LENGTH))
    assert [(piece.text, piece.final) for piece in last] == [("", True)]


def test_an_empty_answer_is_not_spoken_at_all() -> None:
    assert fold(think2speak, written(["", "  \n"])) == []


@pytest.mark.parametrize("finish", [FinishReason.ERROR, FinishReason.ABORT, FinishReason.DEADLINE])
def test_an_aborted_answer_is_not_completed(finish: FinishReason) -> None:
    assert fold(think2speak, written(["Half of a sen", "tence"], finish)) == []


def test_other_answers_and_chunks_are_ignored() -> None:
    second = StageChunk("r", "think", TokenChunk((1,), "Another answer. And"), index=1)
    other = StageChunk("r", "think", AudioChunk(torch.zeros(1).numpy(), 24_000))
    assert fold(think2speak, [second, other, *written(["Mine."])])[-1].text == "Mine."


def test_a_text_that_came_with_the_prompt_is_spoken_instead_of_the_answer() -> None:
    said = torch.tensor(list("Grüße an alle. Bis bald".encode()), dtype=torch.uint8)
    pieces = fold(think2speak, written(["nonsense. More", " of it"], prompt=ARInput((1,), context={VERBATIM: said})))
    assert [piece.text for piece in pieces] == ["Grüße an alle.", "Bis bald"]
    assert isinstance(pieces[-1], ModuleInput)
    assert pieces[-1].final


# ---------------------------------------------------------------------------------------------------- think2draw


def prompt_of(length: int, start: int) -> ARInput:
    return ARInput(tuple(range(length)), context={SUBJECT: torch.tensor([start, length])})


def rows_of(count: int) -> torch.Tensor:
    """Rows that differ in direction, so that scaling them does not make them equal."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(3)) * 50 + torch.arange(WIDTH)


def computed(rows: torch.Tensor, prompt: ARInput, cuts: Sequence[int]) -> list[StageChunk]:
    edges = [0, *cuts, len(rows)]
    return [
        StageChunk("r", "think", TokenChunk(hidden=rows[a:b], hidden_start=a, prompt=prompt if a == 0 else None))
        for a, b in itertools.pairwise(edges)
    ]


@pytest.mark.parametrize(("length", "start"), [(40, 31), (40, 20), (40, 0), (9, 2), (1, 0), (TEXT_ROWS, 0)])
@pytest.mark.parametrize("more", [0, 3])
def test_the_last_rows_of_the_message_are_drawn(length: int, start: int, more: int) -> None:
    rows, prompt = rows_of(length + more), prompt_of(length, start)
    (drawn,) = fold(think2draw, computed(rows, prompt, ()))
    wanted = rows[max(start, length - TEXT_ROWS) : length]
    embeds = drawn.positive["embeds"]
    assert embeds.shape == (TEXT_ROWS, WIDTH)
    assert (drawn.width, drawn.height) == (SIZE, SIZE)
    torch.testing.assert_close(embeds[: len(wanted)].square().mean(-1), torch.ones(len(wanted)))
    lengths = wanted.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(embeds[: len(wanted)] * lengths, wanted)
    assert not embeds[len(wanted) :].any()
    assert drawn.negative is not None
    assert not drawn.negative["embeds"].any()
    assert drawn.negative["embeds"].shape == embeds.shape


@given(st.sets(st.integers(1, 44), max_size=8))
def test_the_chunking_of_rows_does_not_matter(cuts: set[int]) -> None:
    rows, prompt = rows_of(45), prompt_of(40, 18)
    (whole,) = fold(think2draw, computed(rows, prompt, ()))
    (pieces,) = fold(think2draw, computed(rows, prompt, sorted(cuts)))
    assert torch.equal(whole.positive["embeds"], pieces.positive["embeds"])


def test_the_condition_is_emitted_once_with_the_last_row_of_the_prompt() -> None:
    rows, prompt = rows_of(12), prompt_of(10, 4)
    chunks = computed(rows, prompt, (9, 10, 11))
    state: object = None
    emitted = []
    for chunk in chunks:
        state, inputs = think2draw(INFO, state, chunk)
        emitted.append([type(value) for value in inputs])
    assert emitted == [[], [Condition], [], []]


def test_rows_out_of_order_are_an_error() -> None:
    first, _, third = computed(rows_of(12), prompt_of(10, 4), (4, 8))
    state, _ = think2draw(INFO, None, first)
    with pytest.raises(BridgeError, match="missing or repeated"):
        think2draw(INFO, state, third)


def test_a_prompt_without_a_subject_is_an_error() -> None:
    with pytest.raises(BridgeError, match="which of its rows"):
        fold(think2draw, computed(rows_of(3), ARInput((1, 2, 3)), ()))


def test_rows_in_half_precision_are_widened() -> None:
    rows = rows_of(6).half()
    assert condition_of(rows).positive["embeds"].dtype == torch.float32
