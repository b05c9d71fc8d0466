"""The stage of one-shot modules on a module without a network: its contract, order, batching and isolation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Hashable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from omnistage.core.errors import InvalidRequestError, LimitExceededError, StageError
from omnistage.core.messages import ChatMessage, TextPart
from omnistage.core.params import CodecParams, SamplingParams
from omnistage.core.types import (
    AudioChunk,
    ChatInput,
    CodecFrames,
    CodecInput,
    FinishReason,
    ModuleInput,
    ModuleOutput,
    RequestInfo,
    StageChunk,
    StageInput,
)
from omnistage.engines.ageing import AGEING_STEPS
from omnistage.engines.codec import Job, ModuleComponent, ModuleStage
from omnistage.engines.codec.module import UNFINISHED, JobResult, ModulePayload

BUDGET = SimpleNamespace(max_batch=4)
STOP, ERROR = FinishReason.STOP, FinishReason.ERROR


class Shout(ModuleComponent):
    """Gives each text in capitals, as as many samples as it has letters where it speaks; `poison` breaks a batch."""

    max_batch = 3

    def __init__(self, *, speaks: bool = False) -> None:
        self.speaks = speaks
        self.batches: list[list[str]] = []
        self.numbers: list[int] = []
        self.closed = False
        self.error: Exception = RuntimeError("boom")

    @property
    def voices(self) -> tuple[str, ...]:
        return ("ada", "bob") if self.speaks else ()

    def check(self, info: RequestInfo, params: CodecParams, payload: ModulePayload) -> None:
        if isinstance(payload, ModuleInput) and len(payload.text) > 20:
            raise LimitExceededError("too long; say less", param="text")

    def group(self, job: Job) -> Hashable:
        return job.params.num_steps

    def run(self, jobs: Sequence[Job]) -> list[AudioChunk | ModuleOutput]:
        texts = [_text(job.payload) for job in jobs]
        self.batches.append([job.info.request_id for job in jobs])
        if "poison" in texts:
            raise self.error
        self.numbers += [job.number for job in jobs]
        if self.speaks:
            return [AudioChunk(np.full(len(text), 0.5, np.float32), 100) for text in texts]
        return [ModuleOutput(text=text.upper()) for text in texts]

    def close(self) -> None:
        self.closed = True


class Slow(ModuleComponent):
    """Needs a run for each letter of a text; an exclamation mark breaks every run that it is in."""

    max_batch = 1

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.ran: list[str] = []
        self.forgotten: list[str] = []

    def run(self, jobs: Sequence[Job]) -> Sequence[JobResult]:
        if len(jobs) > 1 and any("!" in _text(job.payload) for job in jobs):
            raise RuntimeError("boom")
        return [self._letter(job.info.request_id, _text(job.payload)) for job in jobs]

    def _letter(self, request_id: str, text: str) -> JobResult:
        done = self.kept.get(request_id, "")
        self.ran.append(request_id)
        if text[len(done)] == "!":
            raise RuntimeError("boom")
        done += text[len(done)].upper()
        if len(done) < len(text):
            self.kept[request_id] = done
            return UNFINISHED
        self.kept.pop(request_id, None)
        return ModuleOutput(text=done)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)
        self.kept.pop(request_id, None)


def _text(payload: ModulePayload) -> str:
    if isinstance(payload, ModuleInput):
        return payload.text
    part = payload.messages[-1].parts[-1]
    return part.text if isinstance(part, TextPart) else ""


def start(
    name: str, text: str = "", *, final: bool = True, voice: str | None = None, priority: int = 0, **params: object
) -> StageInput:
    info = RequestInfo(name, voice=voice, priority=priority)
    return StageInput(info, CodecParams.parse(params), ModuleInput(text=text, final=final))


def texts(chunks: list[StageChunk], name: str) -> list[str]:
    return [c.payload.text for c in chunks if c.request_id == name and isinstance(c.payload, ModuleOutput)]


def ends(chunks: list[StageChunk]) -> dict[str, FinishReason]:
    finished = [c for c in chunks if c.finish is not None]
    assert len({c.request_id for c in finished}) == len(finished)
    return {c.request_id: c.finish for c in finished if c.finish is not None}


def held(stage: ModuleStage) -> int:
    stats = stage.stats()
    return stats.waiting + stats.running + stats.starved


def test_a_piece_gives_a_started_marker_and_a_chunk_that_ends_the_request() -> None:
    stage = ModuleStage("hear", Shout(), BUDGET)
    stage.submit(start("a", "hello"))
    assert stage.stats().waiting == 1
    chunks = stage.drain()
    assert [(c.payload is None, c.finish) for c in chunks] == [(True, None), (False, STOP)]
    assert texts(chunks, "a") == ["HELLO"]
    assert held(stage) == 0
    assert stage.stats().tokens == 1


def test_pieces_run_in_order_one_a_step_and_the_last_carries_the_end() -> None:
    component = Shout()
    stage = ModuleStage("speak", component, BUDGET)
    stage.submit(start("a", "one", final=False))
    stage.feed("a", ModuleInput(text="two", final=False))
    stage.feed("a", ModuleInput(text="three"))
    steps = [stage.step() for _ in range(3)]
    assert [texts(chunks, "a") for chunks in steps] == [["ONE"], ["TWO"], ["THREE"]]
    assert [ends(chunks) for chunks in steps] == [{}, {}, {"a": STOP}]
    assert component.numbers == [0, 1, 2]
    assert not stage.has_work()


def test_a_request_without_pieces_is_starved_until_it_is_fed() -> None:
    stage = ModuleStage("speak", Shout(), BUDGET)
    stage.submit(start("a", "one", final=False))
    stage.drain()
    assert not stage.has_work()
    assert (stage.stats().running, stage.stats().starved) == (1, 1)
    stage.feed("a", ModuleInput(text="two"))
    assert ends(stage.drain()) == {"a": STOP}


def test_a_request_that_has_not_run_waits_and_is_not_starved() -> None:
    stage = ModuleStage("speak", Shout(), BUDGET)
    stage.submit(start("a", final=False))
    stats = stage.stats()
    assert (stats.waiting, stats.running, stats.starved) == (1, 0, 0)


def test_an_end_that_comes_alone_gives_an_empty_finish() -> None:
    component = Shout()
    stage = ModuleStage("speak", component, BUDGET)
    stage.submit(start("a", "one", final=False))
    stage.drain()
    stage.feed("a", ModuleInput())
    [chunk] = stage.drain()
    assert (chunk.payload, chunk.finish) == (None, STOP)
    assert component.batches == [["a"]]
    assert held(stage) == 0


def test_an_end_that_comes_alone_before_the_last_piece_ran_rides_on_that_piece() -> None:
    stage = ModuleStage("speak", Shout(), BUDGET)
    stage.submit(start("a", "one", final=False))
    stage.feed("a", ModuleInput())
    chunks = stage.drain()
    assert texts(chunks, "a") == ["ONE"]
    assert chunks[-1].finish is STOP
    assert ends(chunks) == {"a": STOP}


def test_a_request_with_nothing_at_all_ends_without_running() -> None:
    component = Shout()
    stage = ModuleStage("speak", component, BUDGET)
    stage.submit(start("a"))
    chunks = stage.drain()
    assert [(c.payload, c.finish) for c in chunks] == [(None, None), (None, STOP)]
    assert component.batches == []


def test_input_after_the_end_and_for_unknown_requests_is_ignored() -> None:
    stage = ModuleStage("speak", Shout(), BUDGET)
    stage.submit(start("a", "one"))
    stage.feed("a", ModuleInput(text="two"))
    stage.feed("nobody", ModuleInput(text="two"))
    assert texts(stage.drain(), "a") == ["ONE"]


def test_requests_share_a_run_by_group_up_to_the_smaller_of_both_limits() -> None:
    component = Shout()
    stage = ModuleStage("hear", component, BUDGET)
    for name in "abcd":
        stage.submit(start(name, "x"))
    stage.submit(start("e", "x", num_steps=4))
    assert set(ends(stage.drain())) == set("abcde")
    assert component.batches == [["a", "b", "c"], ["d"], ["e"]]
    alone = Shout()
    narrow = ModuleStage("hear", alone, SimpleNamespace(max_batch=1))
    for name in "ab":
        narrow.submit(start(name, "x"))
    narrow.drain()
    assert alone.batches == [["a"], ["b"]]


def test_a_batch_never_holds_two_pieces_of_one_request() -> None:
    component = Shout()
    stage = ModuleStage("speak", component, BUDGET)
    for name in "ab":
        stage.submit(start(name, "one", final=False))
        stage.feed(name, ModuleInput(text="two"))
    stage.drain()
    assert component.batches == [["a", "b"], ["a", "b"]]


def test_lower_priorities_run_first_and_equals_take_turns() -> None:
    component = Shout()
    component.max_batch = 1
    stage = ModuleStage("speak", component, BUDGET)
    stage.submit(start("long", "one", final=False))
    for text in ("two", "three"):
        stage.feed("long", ModuleInput(text=text, final=text == "three"))
    stage.step()
    stage.submit(start("new", "x"))
    stage.submit(start("urgent", "x", priority=-1))
    stage.drain()
    assert [ids for [ids] in component.batches] == ["long", "urgent", "long", "new", "long"]


def test_what_was_passed_over_long_enough_goes_before_a_higher_priority() -> None:
    component = Shout()
    component.max_batch = 1
    stage = ModuleStage("speak", component, BUDGET)
    stage.submit(start("low", "x", priority=2))
    for number in range(2 * AGEING_STEPS + 2):
        stage.submit(start(f"high{number}", "x"))
        stage.step()
    stage.drain()
    order = [ids for [ids] in component.batches]
    assert order.index("low") == 2 * AGEING_STEPS


def test_a_failing_piece_ends_its_own_request_and_the_others_are_run_alone() -> None:
    component = Shout()
    stage = ModuleStage("hear", component, BUDGET)
    for name, text in (("a", "one"), ("b", "poison"), ("c", "three")):
        stage.submit(start(name, text))
    chunks = stage.drain()
    assert ends(chunks) == {"a": STOP, "b": ERROR, "c": STOP}
    [failed] = [c for c in chunks if c.finish is ERROR]
    assert isinstance(failed.error, StageError)
    assert str(failed.error) == "stage 'hear' failed: RuntimeError"  # a message may quote what the user said
    assert component.batches == [["a", "b", "c"], ["a"], ["b"], ["c"]]
    assert held(stage) == 0


def test_a_module_s_own_errors_are_told_as_they_are() -> None:
    component = Shout()
    component.error = InvalidRequestError("no words in it; speak up", param="messages.0")
    stage = ModuleStage("hear", component, BUDGET)
    stage.submit(start("a", "poison"))
    [failed] = [c for c in stage.drain() if c.finish is ERROR]
    assert failed.error is component.error


def test_a_failing_piece_takes_the_pieces_behind_it_along() -> None:
    component = Shout()
    stage = ModuleStage("speak", component, BUDGET)
    stage.submit(start("a", "poison", final=False))
    stage.feed("a", ModuleInput(text="two", final=False))
    assert ends(stage.drain()) == {"a": ERROR}
    stage.feed("a", ModuleInput(text="three"))
    assert not stage.has_work()
    assert held(stage) == 0


@pytest.mark.parametrize(
    ("results", "says"),
    [
        ([], "0 results for 1 inputs"),
        (["text"], "returned a str"),
        ([AudioChunk(np.array([0.0, np.nan], np.float32), 100)], "not finite"),
    ],
)
def test_results_that_make_no_sense_are_the_module_s_fault(
    results: list[object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    component = Shout()
    monkeypatch.setattr(component, "run", lambda jobs: results)
    stage = ModuleStage("hear", component, BUDGET)
    stage.submit(start("a", "x"))
    [failed] = [c for c in stage.drain() if c.finish is not None]
    assert isinstance(failed.error, StageError)
    assert says in str(failed.error)


def test_pieces_are_checked_before_they_are_taken_first_ones_and_later_ones() -> None:
    component = Shout()
    stage = ModuleStage("speak", component, BUDGET)
    long = "x" * 21
    for call in (stage.check, stage.submit):
        with pytest.raises(LimitExceededError):
            call(start("a", long))
    assert held(stage) == 0
    stage.submit(start("a", "one", final=False))
    with pytest.raises(LimitExceededError):
        stage.feed("a", ModuleInput(text=long))
    stage.abort("a")
    assert component.batches == []
    assert held(stage) == 0


def test_a_group_that_cannot_be_told_leaves_the_stage_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    component = Shout()
    stage = ModuleStage("speak", component, BUDGET)
    with monkeypatch.context() as patch:
        patch.setattr(component, "group", lambda job: {}["missing"])
        with pytest.raises(KeyError):
            stage.submit(start("a", "one"))
    assert held(stage) == 0
    stage.submit(start("a", "one"))
    assert ends(stage.drain()) == {"a": STOP}


def test_wrong_types_are_refused_by_name() -> None:
    stage = ModuleStage("speak", Shout(), BUDGET)
    with pytest.raises(StageError, match="takes ModuleInput, not CodecInput"):
        stage.check(StageInput(RequestInfo("a"), CodecParams(), CodecInput()))
    with pytest.raises(InvalidRequestError, match="SamplingParams"):
        stage.check(StageInput(RequestInfo("a"), SamplingParams(), ModuleInput(text="x")))
    stage.submit(start("a", "x", final=False))
    with pytest.raises(StageError, match="cannot be fed CodecFrames"):
        stage.feed("a", CodecFrames((1,)))
    with pytest.raises(InvalidRequestError, match="already"):
        stage.submit(start("a", "x"))


def test_a_module_that_takes_conversations_is_never_fed() -> None:
    component = Shout()
    component.input_type = ChatInput
    stage = ModuleStage("hear", component, BUDGET)
    chat = ChatInput((ChatMessage("user", (TextPart("hi"),)),))
    stage.submit(StageInput(RequestInfo("a"), CodecParams(), chat))
    stage.feed("a", ModuleInput(text="late"))  # it is complete: what comes later is ignored
    chunks = stage.drain()
    assert texts(chunks, "a") == ["HI"]
    assert ends(chunks) == {"a": STOP}
    with pytest.raises(StageError, match="takes ChatInput"):
        stage.submit(start("b", "x"))


def test_voices_are_those_of_a_module_that_speaks() -> None:
    speaking = ModuleStage("speak", Shout(speaks=True), BUDGET)
    speaking.check(start("a", "x", voice="bob"))
    with pytest.raises(InvalidRequestError, match="ada, bob"):
        speaking.check(start("a", "x", voice="eve"))
    # A stage that hears has no use for the voice that the request will be answered in.
    ModuleStage("hear", Shout(), BUDGET).check(start("a", "x", voice="eve"))


def test_sound_is_counted_in_seconds() -> None:
    stage = ModuleStage("speak", Shout(speaks=True), BUDGET)
    stage.submit(start("a", "1234567890"))
    stage.drain()
    assert stage.stats().extra["audio_seconds"] == pytest.approx(0.1)


def test_an_aborted_request_is_forgotten_at_once() -> None:
    stage = ModuleStage("speak", Shout(), BUDGET)
    stage.submit(start("a", "one", final=False))
    stage.abort("a")
    stage.abort("nobody")
    assert not stage.has_work()
    assert held(stage) == 0
    stage.submit(start("a", "again"))
    assert ends(stage.drain()) == {"a": STOP}


# ------------------------------------------------------------------------------------------ jobs of several steps


def test_a_job_that_is_not_done_comes_again_until_it_is() -> None:
    component = Slow()
    stage = ModuleStage("hear", component, BUDGET)
    stage.submit(start("a", "abc", final=False))
    stage.feed("a", ModuleInput(text="d"))
    chunks = stage.drain()
    assert component.ran == ["a"] * 4
    assert texts(chunks, "a") == ["ABC", "D"]
    assert [c.finish for c in chunks] == [None, None, STOP]  # the started marker comes once
    assert stage.stats().tokens == 2
    assert component.forgotten == ["a"]
    assert held(stage) == 0


def test_what_comes_later_goes_before_the_rest_of_long_jobs() -> None:
    component = Slow()
    stage = ModuleStage("hear", component, BUDGET)
    for name in ("long1", "long2", "long3"):
        stage.submit(start(name, "abcd"))
    for _ in range(3):
        stage.step()
    stage.submit(start("short", "x"))
    assert ends(stage.step()) == {"short": STOP}
    assert set(ends(stage.drain())) == {"long1", "long2", "long3"}
    assert component.ran[4:] == ["long1", "long2", "long3"] * 3  # and they take turns


def test_the_rest_of_a_long_job_is_not_passed_over_for_ever() -> None:
    component = Slow()
    stage = ModuleStage("hear", component, BUDGET)
    stage.submit(start("long", "ab"))
    stage.step()
    for number in range(AGEING_STEPS + 5):
        stage.submit(start(f"short{number}", "x"))
        stage.step()
    stage.drain()
    assert component.ran.index("long", 1) == AGEING_STEPS + 1


def test_an_urgent_request_is_served_between_the_steps_of_a_job() -> None:
    component = Slow()
    stage = ModuleStage("hear", component, BUDGET)
    stage.submit(start("long", "abc"))
    stage.step()
    stage.submit(start("urgent", "xy", priority=-1))
    stage.drain()
    assert component.ran == ["long", "urgent", "urgent", "long", "long"]


def test_a_request_that_is_aborted_between_the_steps_of_its_job_leaves_nothing() -> None:
    component = Slow()
    stage = ModuleStage("hear", component, BUDGET)
    stage.submit(start("a", "abc"))
    stage.step()
    assert component.kept == {"a": "A"}
    stage.abort("a")
    stage.abort("a")
    assert component.forgotten == ["a"]
    assert not component.kept
    assert not stage.has_work()
    assert held(stage) == 0
    stage.submit(start("a", "xy"))
    assert texts(stage.drain(), "a") == ["XY"]


def test_a_step_that_fails_ends_its_own_request_and_forgets_it() -> None:
    component = Slow()
    stage = ModuleStage("hear", component, BUDGET)
    stage.submit(start("bad", "ab!"))
    stage.submit(start("good", "abcd"))
    chunks = stage.drain()
    assert ends(chunks) == {"bad": ERROR, "good": STOP}
    assert texts(chunks, "good") == ["ABCD"]
    assert sorted(component.forgotten) == ["bad", "good"]
    assert not component.kept


def test_a_batch_that_fails_is_run_one_by_one_and_unfinished_ones_go_on() -> None:
    component = Slow()
    component.max_batch = 4
    stage = ModuleStage("hear", component, BUDGET)
    for name, text in (("a", "abc"), ("b", "a!"), ("c", "x")):
        stage.submit(start(name, text))
    chunks = stage.step()
    assert component.ran == ["a", "b", "c"]
    assert ends(chunks) == {"c": STOP}
    chunks += stage.drain()
    assert ends(chunks) == {"a": STOP, "b": ERROR, "c": STOP}
    assert texts(chunks, "a") == ["ABC"]


def test_a_request_that_ends_without_a_piece_is_forgotten_too() -> None:
    component = Slow()
    stage = ModuleStage("speak", component, BUDGET)
    stage.submit(start("a", "x", final=False))
    stage.drain()
    assert component.forgotten == []
    stage.feed("a", ModuleInput())
    assert ends(stage.drain()) == {"a": STOP}
    assert component.forgotten == ["a"]


def test_a_module_that_cannot_forget_does_no_harm_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    component = Slow()
    component.max_batch = 4
    monkeypatch.setattr(component, "forget", lambda request_id: {}["missing"])
    stage = ModuleStage("hear", component, BUDGET)
    for name in "ab":
        stage.submit(start(name, "x"))
    assert ends(stage.drain()) == {"a": STOP, "b": STOP}
    assert component.ran == ["a", "b"]


def test_closing_the_stage_closes_the_module() -> None:
    component = Shout()
    ModuleStage("speak", component, BUDGET).close()
    assert component.closed


def test_modules_need_neither_torch_nor_onnx_runtime() -> None:
    code = (
        "import sys, omnistage.engines.codec.module, omnistage.engines.codec.onnx; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'onnxruntime', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
