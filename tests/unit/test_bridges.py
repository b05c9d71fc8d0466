"""thinker2talker and talker2codec: folds whose result depends on what was said, not on how it was cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnistage.core.registry import check_bridge
from omnistage.core.types import (
    ARInput,
    AudioChunk,
    CodecFrames,
    CodecInput,
    FinishReason,
    RequestInfo,
    SideRows,
    StageChunk,
    TokenChunk,
)
from omnistage.models._qwen_omni.bridges import _PendingTalker, talker2codec, thinker2talker

INFO = RequestInfo("r")
CONTEXT = {"image_grid_thw": torch.tensor([[1, 2, 2]])}
WIDTH = 4


def rows_of(count: int) -> torch.Tensor:
    """Row i is filled with i, so that a row out of place is seen."""
    return torch.arange(count, dtype=torch.float32)[:, None].expand(count, WIDTH).clone()


def fold(bridge: Any, chunks: Sequence[StageChunk]) -> list[Any]:
    state: object = None
    found: list[Any] = []
    for chunk in chunks:
        state, inputs = bridge(INFO, state, chunk)
        found.extend(inputs)
    return found


def thinker_chunks(prompt: int, reply: Sequence[int], cuts: Sequence[int], finish: FinishReason) -> list[StageChunk]:
    """A thinker's chunks for a reply. `cuts` are the sizes of the chunks of prompt rows; the last token has no row.

    As the engine does it: the prompt's last chunk brings the first token; each further chunk brings the row of the
    token before and the next token.
    """
    rows = rows_of(prompt + len(reply) - 1)
    given = ARInput(tuple(range(100, 100 + prompt)), context=CONTEXT)
    chunks, start = [StageChunk("r", "thinker")], 0  # the marker that says that the stage has started
    for cut in cuts:
        ends = start + cut == prompt
        payload = TokenChunk(
            token_ids=(reply[0],) if ends else (),
            hidden=rows[start : start + cut],
            hidden_start=start,
            prompt=given if start == 0 else None,
        )
        last = ends and len(reply) == 1
        chunks.append(StageChunk("r", "thinker", payload, finish=finish if last else None))
        start += cut
    for index, token in enumerate(reply[1:], start=1):
        at = prompt + index - 1
        payload = TokenChunk(token_ids=(token,), hidden=rows[at : at + 1], hidden_start=at)
        chunks.append(StageChunk("r", "thinker", payload, finish=finish if index == len(reply) - 1 else None))
    return chunks


def side_rows(inputs: Sequence[Any]) -> torch.Tensor:
    start, *feeds = inputs
    return torch.cat([start.side_rows, *(feed.rows for feed in feeds)])


@st.composite
def cut_prompts(draw: st.DrawFn) -> tuple[int, list[int]]:
    cuts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    return sum(cuts), cuts


class TestThinker2Talker:
    def test_it_has_the_signature_of_a_bridge(self) -> None:
        check_bridge("thinker2talker", thinker2talker)
        check_bridge("talker2codec", talker2codec)

    @given(
        cut=cut_prompts(),
        reply=st.lists(st.integers(0, 50), min_size=2, max_size=8),
        finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    )
    def test_the_talker_gets_the_same_whatever_the_cuts(self, cut, reply, finish) -> None:
        prompt, cuts = cut
        inputs = fold(thinker2talker, thinker_chunks(prompt, reply, cuts, finish))
        start = inputs[0]
        assert isinstance(start, ARInput)
        assert start.token_ids == (*range(100, 100 + prompt), reply[0])
        assert start.streaming
        assert start.context is CONTEXT
        assert start.embeds is not None
        assert torch.equal(start.embeds, rows_of(prompt + 1))
        assert all(isinstance(feed, SideRows) for feed in inputs[1:])
        # One row for each reply token but the first, which is in the prompt, and the last, which was never computed.
        assert torch.equal(side_rows(inputs), rows_of(prompt + len(reply) - 1)[prompt + 1 :])
        assert [feed.final for feed in inputs[1:]] == [False] * (len(inputs) - 2) + [True]

    @given(reply=st.lists(st.integers(0, 50), min_size=2, max_size=8), data=st.data())
    def test_rows_that_come_in_bulk_or_late_are_the_same_rows(self, reply, data) -> None:
        """After a preemption, or where a prefix was reused, one chunk may bring many rows, or a token brings none."""
        prompt, total = 5, 5 + len(reply) - 1
        rows = rows_of(total)
        cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=6)))
        borders = [0, *cuts, total]
        given = ARInput(tuple(range(prompt)), context={})
        chunks, said = [], 0
        for number, (low, high) in enumerate(itertools.pairwise(borders)):
            last = number == len(borders) - 2
            known = len(reply) if last else min(len(reply) - 1, max(0, high - prompt + 1))
            payload = TokenChunk(
                token_ids=tuple(reply[said:known]),
                hidden=rows[low:high] if high > low else None,
                hidden_start=low,
                prompt=given if number == 0 else None,
            )
            said = max(said, known)
            chunks.append(StageChunk("r", "thinker", payload, finish=FinishReason.STOP if last else None))
        inputs = fold(thinker2talker, chunks)
        assert torch.equal(inputs[0].embeds, rows[: prompt + 1])
        assert torch.equal(side_rows(inputs), rows[prompt + 1 :])
        assert inputs[-1].final

    def test_it_starts_as_soon_as_the_first_reply_token_is_computed_and_no_earlier(self) -> None:
        chunks = thinker_chunks(4, (7, 8, 9), (2, 2), FinishReason.LENGTH)
        state: object = None
        counts = []
        for chunk in chunks:
            state, inputs = thinker2talker(INFO, state, chunk)
            counts.append(len(inputs))
        assert counts == [0, 0, 0, 1, 1]

    @pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
    def test_a_reply_of_one_token_never_starts_the_talker(self, finish: FinishReason) -> None:
        assert fold(thinker2talker, thinker_chunks(6, (3,), (4, 2), finish)) == []

    def test_a_reply_of_two_tokens_starts_it_and_ends_its_input_at_once(self) -> None:
        start, end = fold(thinker2talker, thinker_chunks(3, (3, 4), (3,), FinishReason.STOP))
        assert len(start.embeds) == 4
        assert (len(start.side_rows), len(end.rows), end.final) == (0, 0, True)
        assert end.rows.shape[1] == WIDTH

    def test_the_prompts_rows_are_not_held_while_the_reply_is_spoken(self) -> None:
        state: object = None
        for chunk in thinker_chunks(100, (3, 4, 5), (100,), FinishReason.STOP)[:-1]:
            state, inputs = thinker2talker(INFO, state, chunk)
        assert isinstance(state, _PendingTalker)
        for tensor in (*state.rows, inputs[0].side_rows):
            assert tensor.untyped_storage().nbytes() == 0

    def test_an_end_without_rows_still_ends_the_input(self) -> None:
        chunks = thinker_chunks(3, (3, 4, 5), (3,), FinishReason.STOP)[:-1]
        chunks.append(StageChunk("r", "thinker", TokenChunk(text="!"), finish=FinishReason.STOP))
        inputs = fold(thinker2talker, chunks)
        assert inputs[-1].final
        assert inputs[-1].rows.shape == (0, WIDTH)

    def test_requests_do_not_share_state(self) -> None:
        one, other = (thinker_chunks(3, reply, (3,), FinishReason.STOP) for reply in ((1, 2, 3), (4, 5, 6)))
        states: list[object] = [None, None]
        found: list[list[Any]] = [[], []]
        for pair in zip(one, other, strict=True):
            for index, chunk in enumerate(pair):
                states[index], inputs = thinker2talker(INFO, states[index], chunk)
                found[index].extend(inputs)
        assert [inputs[0].token_ids[-1] for inputs in found] == [1, 4]


def talker_chunk(*codes: int, finish: FinishReason | None = None, ended_by: int | None = None) -> StageChunk:
    return StageChunk("r", "talker", TokenChunk(token_ids=codes, ended_by=ended_by), finish=finish)


class TestTalker2Token2Wav:
    @given(codes=st.lists(st.integers(0, 8191), min_size=1, max_size=30), data=st.data(), ended=st.booleans())
    def test_codes_arrive_in_order_and_the_end_token_is_no_code(self, codes, data, ended) -> None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(codes)), max_size=6)))
        pieces = [codes[low:high] for low, high in zip([0, *cuts], [*cuts, len(codes)], strict=True)]
        chunks = [StageChunk("r", "talker"), *(talker_chunk(*piece) for piece in pieces[:-1])]
        if ended:
            chunks.append(talker_chunk(*pieces[-1], 8294, finish=FinishReason.STOP, ended_by=8294))
        else:
            chunks.append(talker_chunk(*pieces[-1], finish=FinishReason.LENGTH))
        inputs = fold(talker2codec, chunks)
        assert isinstance(inputs[0], CodecInput)
        assert all(isinstance(value, CodecFrames) for value in inputs[1:])
        assert [code for value in inputs for code in value.codes] == codes
        assert [value.final for value in inputs] == [False] * (len(inputs) - 1) + [True]

    def test_a_talker_that_ends_at_once_gives_an_empty_utterance(self) -> None:
        inputs = fold(talker2codec, [talker_chunk(8294, finish=FinishReason.STOP, ended_by=8294)])
        assert inputs == [CodecInput((), final=True)]

    def test_chunks_without_codes_start_nothing(self) -> None:
        assert fold(talker2codec, [StageChunk("r", "talker"), talker_chunk()]) == []

    def test_a_failed_talker_completes_nothing(self) -> None:
        """An error or an abort must not become a short but complete utterance."""
        for reason in (FinishReason.ERROR, FinishReason.ABORT, FinishReason.DEADLINE):
            assert fold(talker2codec, [talker_chunk(finish=reason)]) == []

    def test_sound_is_not_taken_for_codes(self) -> None:
        chunk = StageChunk("r", "talker", AudioChunk(samples=None, sample_rate=1))  # type: ignore[arg-type]
        assert fold(talker2codec, [chunk]) == []
