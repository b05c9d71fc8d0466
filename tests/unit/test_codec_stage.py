"""The codec stage on a component without a network: its contract, errors and isolation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from omnistage.config import CodecStageConfig
from omnistage.core.errors import ConfigError, InvalidRequestError, LimitExceededError, OmniError, StageError
from omnistage.core.params import CodecParams, SamplingParams
from omnistage.core.types import (
    ARInput,
    AudioChunk,
    CodecFrames,
    CodecInput,
    FinishReason,
    RequestInfo,
    SideRows,
    StageChunk,
    StageInput,
)
from omnistage.engines.codec import CodecComponent, CodecLayout, CodecStage, Window
from omnistage.engines.codec.receptive_field import Conv, Parallel, Transposed, frame_context
from omnistage.pipeline.engine_stage import engine_stage

BUDGET = SimpleNamespace(
    max_batch=4,
    max_batch_blocks=64,
    max_running=8,
    first_chunk_blocks=1,
    max_chunk_blocks=4,
    lookahead_blocks=1,
    max_hold_seconds=0.0,
)
POISON = 13


class Echo(CodecComponent):
    """Two samples a code, each the code's value; `POISON` breaks the whole batch that holds it."""

    sample_rate = 100
    layout = CodecLayout(block_codes=2, codebook_size=50, max_codes=40, history_blocks=1, max_lookahead_blocks=4)

    def __init__(self, voices: tuple[str, ...] = ("ada", "bob")) -> None:
        self._names = voices
        self.opened: list[tuple[str, str | None]] = []
        self.batches: list[int] = []
        self.closed = False
        self.error: Exception = RuntimeError("boom")

    @property
    def voices(self) -> tuple[str, ...]:
        return self._names

    def group(self, params: CodecParams) -> Hashable:
        return params.num_steps

    def open(self, request_id: str, params: CodecParams, voice: str | None) -> object:
        self.opened.append((request_id, voice))
        return request_id

    def decode(self, windows: Sequence[Window]) -> list[np.ndarray]:
        self.batches.append(len(windows))
        new = [w.codes[w.history : w.history + w.emit] for w in windows]
        if any(POISON in codes for codes in new):
            raise self.error
        return [np.repeat(np.array(codes, dtype=np.float32), 2) for codes in new]

    def close(self) -> None:
        self.closed = True


def start(
    name: str, codes: Sequence[int] = (), *, final: bool = False, voice: str | None = None, **params: object
) -> StageInput:
    info = RequestInfo(name, voice=voice)
    return StageInput(info, CodecParams.parse(params), CodecInput(tuple(codes), final))


def audio(chunks: list[StageChunk], name: str) -> list[float]:
    return [
        float(x)
        for c in chunks
        if c.request_id == name and isinstance(c.payload, AudioChunk)
        for x in c.payload.samples
    ]


def ends(chunks: list[StageChunk]) -> dict[str, FinishReason]:
    finished = [c for c in chunks if c.finish is not None]
    assert len({c.request_id for c in finished}) == len(finished)
    return {c.request_id: c.finish for c in finished if c.finish is not None}


def test_codes_stream_through_in_order_and_the_last_chunk_ends_the_request() -> None:
    stage = CodecStage("codec", Echo(), BUDGET)
    stage.submit(start("a", [1], voice="bob"))
    chunks: list[StageChunk] = []
    for code in range(2, 12):
        stage.feed("a", CodecFrames((code,), final=code == 11))
        chunks += stage.drain()
    assert audio(chunks, "a") == [c for code in range(1, 12) for c in (code, code)]
    assert ends(chunks) == {"a": FinishReason.STOP}
    assert chunks[-1].finish is FinishReason.STOP
    markers = [i for i, c in enumerate(chunks) if c.payload is None]
    assert markers == [0]
    assert stage.stats().tokens == 11
    assert stage.stats().extra["audio_seconds"] == pytest.approx(0.22)
    assert (stage.stats().running, stage.stats().waiting) == (0, 0)


def test_requests_of_one_shape_share_a_forward() -> None:
    component = Echo()
    stage = CodecStage("codec", component, BUDGET)
    for name in "abc":
        stage.submit(start(name, [1, 2, 3], final=True))
    stage.submit(start("d", [1, 2, 3], final=True, num_steps=4))
    assert set(ends(stage.drain())) == set("abcd")
    assert component.batches == [3, 1]


def test_an_empty_utterance_ends_with_an_empty_chunk() -> None:
    stage = CodecStage("codec", Echo(), BUDGET)
    stage.submit(start("a"))
    assert not stage.has_work()
    stage.feed("a", CodecFrames((), final=True))
    marker, chunk = stage.drain()
    assert marker.payload is None
    assert marker.finish is None
    assert chunk.finish is FinishReason.STOP
    assert isinstance(chunk.payload, AudioChunk)
    assert chunk.payload.samples.size == 0


def test_one_poisonous_request_does_not_take_its_neighbours_along() -> None:
    component = Echo()
    stage = CodecStage("codec", component, BUDGET)
    for name, code in (("a", 1), ("bad", POISON), ("c", 3)):
        stage.submit(start(name, [code], final=True))
    chunks = stage.drain()
    assert ends(chunks) == {"a": FinishReason.STOP, "bad": FinishReason.ERROR, "c": FinishReason.STOP}
    error = next(c.error for c in chunks if c.request_id == "bad" and c.finish)
    assert isinstance(error, StageError)
    assert isinstance(error.__cause__, RuntimeError)
    assert component.batches == [3, 1, 1, 1]
    assert audio(chunks, "a") == [1, 1]


def test_a_request_that_fails_alone_is_not_run_again() -> None:
    component = Echo()
    component.error = InvalidRequestError("no")
    stage = CodecStage("codec", component, BUDGET)
    stage.submit(start("bad", [POISON], final=True))
    chunks = stage.drain()
    assert component.batches == [1]
    assert chunks[-1].error is component.error


def test_a_component_that_answers_short_is_an_error() -> None:
    component = Echo()
    component.decode = lambda windows: []  # type: ignore[method-assign]
    stage = CodecStage("codec", component, BUDGET)
    stage.submit(start("a", [1], final=True))
    assert isinstance(stage.drain()[-1].error, StageError)


def test_a_frame_with_several_codebooks_is_one_entry_of_codes() -> None:
    class Frames(Echo):
        layout = replace(Echo.layout, num_codebooks=3)

        def decode(self, windows: Sequence[Window]) -> list[np.ndarray]:
            return [np.array(w.codes[w.history : w.history + w.emit], dtype=np.float32).reshape(-1) for w in windows]

    stage = CodecStage("codec", Frames(), BUDGET)
    stage.submit(StageInput(RequestInfo("a"), CodecParams(), CodecInput(((1, 2, 3),))))
    stage.feed("a", CodecFrames(((4, 5, 6), (7, 8, 9)), final=True))
    chunks = stage.drain()
    assert audio(chunks, "a") == list(range(1, 10))
    assert stage.stats().tokens == 3
    for wrong in (1, (1, 2), (1, 2, 3, 4), (1, 2, 50)):
        with pytest.raises(InvalidRequestError):
            stage.submit(StageInput(RequestInfo("b"), CodecParams(), CodecInput((wrong,))))
    with pytest.raises(InvalidRequestError, match="a frame has 1 codes"):
        CodecStage("codec", Echo(), BUDGET).submit(StageInput(RequestInfo("b"), CodecParams(), CodecInput(((1,),))))


@pytest.mark.parametrize(
    ("feed", "kind"),
    [
        (CodecFrames((50,)), InvalidRequestError),
        (CodecFrames((-1,)), InvalidRequestError),
        (CodecFrames((1,) * 40), LimitExceededError),
        (SideRows(rows=None), StageError),  # type: ignore[arg-type]
    ],
)
def test_wrong_feeds_raise_and_change_nothing(feed: CodecFrames, kind: type[OmniError]) -> None:
    stage = CodecStage("codec", Echo(), BUDGET)
    stage.submit(start("a", [1]))
    stage.submit(start("b", [1], final=True))
    with pytest.raises(kind):
        stage.feed("a", feed)
    with pytest.raises(InvalidRequestError, match="already"):
        stage.submit(start("a"))
    stage.abort("a")  # what the loop does with a request whose feed raises
    assert ends(stage.drain()) == {"b": FinishReason.STOP}
    assert not stage.has_work()


@pytest.mark.parametrize(
    ("bad", "kind", "param"),
    [
        (start("a", voice="eve"), InvalidRequestError, "voice"),
        (start("a", [50]), InvalidRequestError, "codes"),
        (start("a", [1] * 41), LimitExceededError, None),
        (StageInput(RequestInfo("a"), CodecParams(), ARInput(())), StageError, None),
        (StageInput(RequestInfo("a"), SamplingParams(), CodecInput()), InvalidRequestError, None),
    ],
)
def test_what_can_never_run_is_refused(bad: StageInput, kind: type[OmniError], param: str | None) -> None:
    stage = CodecStage("codec", Echo(), BUDGET)
    with pytest.raises(kind) as caught:
        stage.submit(bad)
    assert caught.value.param == param
    stage.submit(start("a", [1] * 40, final=True))
    assert ends(stage.drain()) == {"a": FinishReason.STOP}


def test_the_error_for_an_unknown_voice_lists_the_voices() -> None:
    with pytest.raises(InvalidRequestError, match="ada, bob"):
        CodecStage("codec", Echo(), BUDGET).check(start("a", voice="eve"))
    with pytest.raises(InvalidRequestError, match="single voice"):
        CodecStage("codec", Echo(voices=()), BUDGET).check(start("a", voice="eve"))


def test_abort_silences_a_request_at_any_time() -> None:
    stage = CodecStage("codec", Echo(), BUDGET)
    stage.abort("nobody")
    stage.submit(start("waiting", [1], final=True))
    stage.abort("waiting")
    stage.submit(start("running", [1, 2, 3, 4]))
    stage.drain()
    stage.abort("running")
    stage.feed("running", CodecFrames((5, 6, 7, 8)))
    assert not stage.has_work()
    assert stage.step() == []


def test_codes_after_the_end_are_ignored() -> None:
    stage = CodecStage("codec", Echo(), BUDGET)
    stage.submit(start("a", [1], final=True))
    stage.feed("a", CodecFrames((2,), final=True))
    stage.feed("a", CodecFrames((99,)))
    chunks = stage.drain()
    assert audio(chunks, "a") == [1, 1]
    stage.feed("a", CodecFrames((2,)))
    assert not stage.has_work()


def test_a_stage_forgets_what_ended() -> None:
    component = Echo()
    stage = CodecStage("codec", component, BUDGET)
    for voice in ("ada", "bob"):
        stage.submit(start("a", [1], final=True, voice=voice))
        stage.drain()
    assert component.opened == [("a", "ada"), ("a", "bob")]
    stage.close()
    assert component.closed


def test_receptive_fields_are_exact_on_known_stacks() -> None:
    assert frame_context([Conv.same(7)], 1) == (3, 3)
    assert frame_context([Conv.same(3, dilation=5), Conv.same(3)], 1) == (6, 6)
    # Kernel 4, stride 2, crop 1: the two samples of a frame see one neighbour each.
    assert frame_context([Transposed(4, 2, crop=1)], 2) == (1, 1)
    assert frame_context([Parallel(((), (Conv.same(5),), (Conv(3, 2, 0),)))], 1) == (2, 2)


def test_samples_that_are_not_numbers_end_their_own_request_only() -> None:
    class Broken(Echo):
        def decode(self, windows: Sequence[Window]) -> list[np.ndarray]:
            parts = super().decode(windows)
            return [part * (np.nan if 7 in w.codes else 1) for part, w in zip(parts, windows, strict=True)]

    stage = CodecStage("codec", Broken(), BUDGET)
    stage.submit(start("bad", [1, 7], final=True))
    stage.submit(start("good", [1, 2], final=True))
    chunks = stage.drain()
    assert ends(chunks) == {"bad": FinishReason.ERROR, "good": FinishReason.STOP}
    assert audio(chunks, "good") == [1, 1, 2, 2]


def test_first_sound_is_held_back_until_more_follows_in_time_and_no_longer_than_the_limit() -> None:
    now = [0.0]
    stage = CodecStage("codec", Echo(), SimpleNamespace(**{**vars(BUDGET), "max_hold_seconds": 3.0}))
    stage._scheduler._clock = lambda: now[0]
    for name in ("slow", "quick", "ends"):
        stage.submit(start(name, [1]))
    now[0] = 0.054
    stage.feed("slow", CodecFrames((1, 2, 3), final=False))  # a code every 18 ms, for 20 ms of sound
    assert audio(stage.drain(), "slow") == []
    assert stage.wait_limit() == pytest.approx(2.946)
    stage.feed("quick", CodecFrames(tuple(range(1, 40)), final=False))
    assert len(audio(stage.drain(), "quick")) > 4
    stage.feed("ends", CodecFrames((2, 3, 4), final=True))
    assert audio(stage.drain(), "ends") == [1, 1, 2, 2, 3, 3, 4, 4]
    now[0] = 3.0
    assert stage.has_work()
    assert audio(stage.step(), "slow") == [1, 1, 1, 1]
    stage.abort("slow")
    assert stage._pending_samples == {}


def test_a_vocoder_that_is_to_give_text_is_refused() -> None:
    settings = {"engine": "codec", "component": "echo", "output": "text"}
    with pytest.raises(ConfigError, match="'echo' outputs audio, not text; use audio, or null") as caught:
        engine_stage("speak", CodecStageConfig.model_validate(settings), Echo())
    assert caught.value.param == "pipeline.stages.speak.output"
