"""The two front doors over fake stages."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path

import pytest
import torch

from omnistage.config import DeploymentConfig, LimitsConfig
from omnistage.core.cancellation import cancellation_scope, current_cancellation
from omnistage.core.errors import (
    InvalidRequestError,
    LimitExceededError,
    OmniError,
    PromptTooLongError,
    QueueFullError,
    ShutdownError,
    StageError,
    UnsupportedModalityError,
)
from omnistage.core.graph import PipelineGraph
from omnistage.core.params import CodecParams, SamplingParams, StructuredOutput
from omnistage.core.types import ARInput, FinishReason, OmniTokensPrompt, StageInput
from omnistage.omni import AsyncOmni, Omni, OmniLLM
from omnistage.pipeline.intake import RequestOptions
from omnistage.pipeline.output_assembler import Sink
from omnistage.pipeline.outputs import OutputChunk
from omnistage.pipeline.request import RequestPlan, RequestRun
from tests.hang_guard import HANG_SECONDS
from tests.unit.fakes import AUDIO, FakeProcessor, FakeStage, linear, make_graph, stream_into

pytestmark = pytest.mark.timeout(300)
HELLO = [{"role": "user", "content": "one two three"}]


class Rig:
    """Stages, a processor and a door of either kind over them."""

    def __init__(self, graph: PipelineGraph | None = None, **deployment: int) -> None:
        self.graph = graph or linear()
        audio = self.graph.outputs.get(AUDIO)
        self.stages = {name: FakeStage(name, audio=name == audio) for name in self.graph.order}
        self.bridges = {n: stream_into(audio=n == audio) for n in self.graph.order[1:]}
        self.processor = FakeProcessor()
        self.deployment = DeploymentConfig(**deployment)  # type: ignore[arg-type]
        self.limits = LimitsConfig(max_prompt_tokens=1)

    def omni(self) -> Omni:
        return Omni.from_parts(
            self.graph, self.stages, self.bridges, {}, self.processor, deployment=self.deployment, limits=self.limits
        )

    def async_omni(self) -> AsyncOmni:
        return AsyncOmni.from_parts(
            self.graph, self.stages, self.bridges, {}, self.processor, deployment=self.deployment, limits=self.limits
        )


def held(rig: Rig) -> tuple[threading.Event, threading.Event]:
    """Hold the thinker in its steps: events for having got there and for going on."""
    entered, release = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        if not release.wait(HANG_SECONDS):
            raise TimeoutError

    rig.stages["thinker"].before_step = hold
    return entered, release


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def omni(rig: Rig) -> Iterator[Omni]:
    with rig.omni() as omni:
        yield omni
        omni.orchestrator.check_idle()


# ---------------------------------------------------------------------------------------------------- sync


def test_one_prompt_gives_a_list_of_one(omni: Omni) -> None:
    (output,) = omni.generate("one two three")
    assert output.text == "a0 a1 a2 "
    assert output.finish_reason is FinishReason.STOP
    assert output.audio is None
    assert OmniLLM is Omni


def test_many_prompts_come_back_in_order_whatever_fits_in_flight() -> None:
    rig = Rig(max_inflight=2)
    with rig.omni() as omni:
        outputs = omni.generate([" ".join("x" * n) for n in range(1, 30)])
        assert [len(output.token_ids) for output in outputs] == list(range(1, 30))
        assert omni.generate([]) == []
        omni.orchestrator.check_idle()


@pytest.mark.parametrize(
    "prompt",
    [
        "one two three",
        {"prompt": "one two three"},
        {"prompt_token_ids": [3]},
        OmniTokensPrompt((3,)),
        HELLO,
    ],
)
def test_every_kind_of_prompt_is_taken(omni: Omni, prompt: object) -> None:
    assert len(omni.generate(prompt)[0].token_ids) == 3  # type: ignore[arg-type]
    assert [len(output.token_ids) for output in omni.generate([prompt, prompt])] == [3, 3]  # type: ignore[list-item]


def test_embeddings_go_through_the_processor(rig: Rig) -> None:
    rig.limits = LimitsConfig()
    with rig.omni() as omni:
        (output,) = omni.generate({"prompt_embeds": torch.zeros(4, 2)})
        assert output.usage.prompt_tokens == 4


def test_a_conversation_gives_one_output_and_a_list_gives_a_list(omni: Omni) -> None:
    assert omni.chat(HELLO, modalities=["text", "audio"]).audio is not None
    assert [output.text for output in omni.chat([HELLO, HELLO])] == ["a0 a1 a2 "] * 2


def test_a_model_without_text_gives_what_it_has_by_default() -> None:
    graph = make_graph(("reader", "voice"), {"voice": ("reader",)}, {AUDIO: "voice"})
    with Rig(graph).omni() as omni:
        assert omni.generate("one")[0].audio is not None


def test_parameters_may_be_one_for_all_one_each_or_by_stage(omni: Omni, rig: Rig) -> None:
    omni.generate(["a", "b"], SamplingParams(top_k=3))
    assert {i.params.top_k for i in rig.stages["thinker"].inputs.values()} == {3}  # type: ignore[attr-defined]
    outputs = omni.generate(["a", "b"], [SamplingParams(n=2), None])
    assert [len(output.outputs) for output in outputs] == [2, 1]
    (output,) = omni.generate(
        "a",
        {"thinker": {"seed": 7}, "vocoder": CodecParams(num_steps=2)},
        modalities=["audio"],
        voice="Ethan",
        priority=2,
    )
    thinker, vocoder = (rig.stages[name].inputs[output.request_id] for name in ("thinker", "vocoder"))
    assert thinker.params == SamplingParams(seed=7)
    assert vocoder.params == CodecParams(num_steps=2)
    assert (vocoder.info.voice, vocoder.info.priority) == ("Ethan", 2)


BAD_CALLS: dict[str, tuple[Callable[[Omni], object], type[OmniError], str]] = {
    "modality": (lambda o: o.generate("a", modalities=["image"]), UnsupportedModalityError, "its outputs: text, audio"),
    "modality as text": (lambda o: o.generate("a", modalities="smell"), UnsupportedModalityError, "'smell'"),
    "no modality": (lambda o: o.generate("a", modalities=[]), InvalidRequestError, "at least one"),
    "voice": (lambda o: o.generate("a", voice="Bob"), InvalidRequestError, "voice: .*Chelsie, Ethan"),
    "timeout": (lambda o: o.generate("a", timeout=-1), InvalidRequestError, "timeout"),
    "long timeout": (lambda o: o.generate("a", timeout=1e9), LimitExceededError, "3600"),
    "stage": (lambda o: o.generate("a", {"singer": {}}), InvalidRequestError, "stages: thinker"),
    "stage value": (lambda o: o.generate("a", {"thinker": 3}), InvalidRequestError, "mapping"),  # type: ignore[dict-item]
    "stage field": (
        lambda o: o.generate("a", {"thinker": {"top_p": 7}}),
        InvalidRequestError,
        r"sampling_params\.thinker\.top_p",
    ),
    "params type": (lambda o: o.generate("a", 3), InvalidRequestError, "SamplingParams"),  # type: ignore[arg-type]
    "params count": (lambda o: o.generate("a", [None, None]), InvalidRequestError, "one for each"),
    "prompt type": (lambda o: o.generate([3]), InvalidRequestError, "must be text"),  # type: ignore[list-item]
    "prompt key": (lambda o: o.generate({"multi_modal_data": 1}), InvalidRequestError, "chat messages"),
    "two prompts": (lambda o: o.generate({"prompt": "a", "prompt_token_ids": [1]}), InvalidRequestError, "either"),
    "prompt not text": (lambda o: o.generate({"prompt": 3}), InvalidRequestError, "either"),
    "nothing": (lambda o: o.generate({}), InvalidRequestError, "either"),
    "token ids": (lambda o: o.generate({"prompt_token_ids": ["a"]}), InvalidRequestError, "whole numbers"),
    "embeds": (lambda o: o.generate({"prompt_embeds": [1.0]}), InvalidRequestError, "tensor"),
    "empty prompt": (lambda o: o.generate(""), InvalidRequestError, "empty"),
    "long prompt": (lambda o: o.generate({"prompt_token_ids": [3, 3]}), PromptTooLongError, "limit of 1"),
    "no message": (lambda o: o.chat([]), InvalidRequestError, "conversation"),
    "no conversation": (lambda o: o.chat("hi"), InvalidRequestError, "conversation"),  # type: ignore[arg-type]
    "role": (lambda o: o.chat([{"role": "owner", "content": "x"}]), InvalidRequestError, r"messages\[0\]\.role"),
    "streams": (lambda o: o.stream_chat([HELLO]), InvalidRequestError, "one conversation"),  # type: ignore[list-item]
    "answers": (
        lambda o: o.generate("a", SamplingParams(n=2), modalities=["text", "audio"]),
        InvalidRequestError,
        "n > 1 is supported for text only",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_says_what_to_change(omni: Omni, rig: Rig, name: str) -> None:
    call, error, words = BAD_CALLS[name]
    with pytest.raises(error, match=words):
        call(omni)
    assert rig.stages["thinker"].calls == []


def test_long_text_is_refused_before_it_is_tokenised(rig: Rig) -> None:
    rig.limits = LimitsConfig.model_validate({"media": {"max_text_chars": 4}})
    with rig.omni() as omni, pytest.raises(LimitExceededError, match="limit of 4"):
        omni.generate("one two three")
    assert rig.processor.threads == set()


def test_media_that_the_model_does_not_take_are_refused_before_they_are_decoded(
    omni: Omni, monkeypatch: pytest.MonkeyPatch
) -> None:
    wav = {"type": "audio", "audio": (torch.zeros(1600).numpy(), 16000)}
    monkeypatch.setattr("omnistage.pipeline.messages.chat.decode_audio", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(UnsupportedModalityError, match="does not take audio; it takes text"):
        omni.chat([{"role": "user", "content": [wav]}])


def test_a_model_without_voices_says_so(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.processor, "voices", lambda: ())
    with rig.omni() as omni, pytest.raises(InvalidRequestError, match="has none"):
        omni.generate("a", voice="Ethan")


def test_one_bad_prompt_raises_before_any_of_the_batch_runs(omni: Omni, rig: Rig) -> None:
    with pytest.raises(InvalidRequestError):
        omni.generate(["one", "two", ""])
    assert rig.stages["thinker"].calls == []


def test_a_failure_while_running_marks_its_output_only(omni: Omni, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    thinker = rig.stages["thinker"]
    accept, count = thinker.submit, itertools.count()

    def submit(stage_input: StageInput) -> None:
        if next(count) == 1:
            raise StageError("no luck")
        accept(stage_input)

    monkeypatch.setattr(thinker, "submit", submit)
    outputs = omni.generate(["one"] * 4)
    stop, error = FinishReason.STOP, FinishReason.ERROR
    assert [output.finish_reason for output in outputs] == [stop, error, stop, stop]
    assert [isinstance(output.error, StageError) for output in outputs] == [False, True, False, False]


def test_a_single_prompt_that_fails_raises_and_a_list_does_not(omni: Omni, rig: Rig) -> None:
    rig.stages["thinker"].fail_step = RuntimeError("x")
    with pytest.raises(StageError):
        omni.generate("one")
    rig.stages["thinker"].fail_step = RuntimeError("x")
    with pytest.raises(StageError):
        omni.chat(HELLO)
    rig.stages["thinker"].fail_step = RuntimeError("x")
    (output,) = omni.generate(["one"])
    assert isinstance(output.error, StageError)
    assert omni.generate("one")[0].error is None


def test_a_timeout_gives_what_there_was(rig: Rig) -> None:
    rig.deployment = DeploymentConfig(max_inflight=1)
    _, release = held(rig)
    with rig.omni() as omni:
        # The first holds the only place until its time is up; the second is too late before it can start.
        outputs = omni.generate(["one", "two"], timeout=0.05)
        release.set()
        assert [output.finish_reason for output in outputs] == [FinishReason.DEADLINE] * 2
        assert [output.error for output in outputs] == [None, None]


def test_a_timeout_ends_a_preparation_too(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    text, prepared = rig.processor.text, []

    def slow(prompt: str) -> ARInput:
        while prompt == "slow":
            current_cancellation().check()
        prepared.append(prompt)
        return text(prompt)

    monkeypatch.setattr(rig.processor, "text", slow)
    with rig.omni() as omni:
        for seconds in (0.2, 2.0, 20.0):  # again with more where the other one was not prepared by then
            late, early = omni.generate(["slow", "other"], timeout=seconds)
            assert (late.finish_reason, late.error) == (FinishReason.DEADLINE, None)
            if prepared:
                break
        assert prepared == ["other"]
        assert early.finish_reason in (FinishReason.STOP, FinishReason.DEADLINE)
        (late,) = omni.generate("slow", timeout=0.01)
        assert late.finish_reason is FinishReason.DEADLINE
        omni.orchestrator.check_idle()


def test_an_interrupt_aborts_what_is_in_flight(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    _, release = held(rig)

    def interrupt(self: object, timeout: float) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr("omnistage.pipeline.batch.Batch.wait", interrupt)
    with rig.omni() as omni:
        with pytest.raises(KeyboardInterrupt):
            omni.generate(["one", "two"])
        release.set()
        omni.orchestrator.check_idle()
        assert omni.stats().finished[FinishReason.ABORT] == 2


def test_a_closed_door_refuses(rig: Rig) -> None:
    omni = rig.omni()
    omni.close()
    omni.close()
    with pytest.raises(ShutdownError):
        omni.generate("one")
    assert isinstance(omni.generate(["one"])[0].error, ShutdownError)


def test_streaming_gives_items_and_then_the_whole(omni: Omni) -> None:
    items = list(omni.stream_chat(HELLO, modalities=["text", "audio"]))
    final = items[-1].final
    assert final is not None
    assert "".join(item.text for item in items) == final.text == "a0 a1 a2 "
    assert omni.trace(final.request_id) is final.trace


def test_leaving_a_stream_aborts_it(omni: Omni, rig: Rig) -> None:
    stream = omni.stream_chat([{"role": "user", "content": "x " * 5000}])
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    omni.orchestrator.check_idle()
    assert omni.stats().finished[FinishReason.ABORT] == 1


def test_cancelling_the_scope_of_a_stream_aborts_it(rig: Rig) -> None:
    entered, release = held(rig)

    def cancel() -> None:
        assert entered.wait(HANG_SECONDS)
        cancellation.cancel()

    thread = threading.Thread(target=cancel)
    with rig.omni() as omni, cancellation_scope() as cancellation:
        thread.start()
        items = list(omni.stream_chat(HELLO))  # the stage gives nothing: it is held
        assert items[-1].final is not None
        assert items[-1].final.finish_reason is FinishReason.ABORT
        release.set()
        thread.join()
        omni.orchestrator.check_idle()
        assert omni.stats().finished[FinishReason.ABORT] == 1


def test_cancelling_between_a_request_and_its_start_aborts_it(omni: Omni) -> None:
    with cancellation_scope() as cancellation:
        stream = omni.stream_chat([{"role": "user", "content": "x " * 5000}])
        cancellation.cancel()
        [*_, last] = stream
        assert last.final is not None
        assert last.final.finish_reason is FinishReason.ABORT
    omni.orchestrator.check_idle()


def test_a_stream_that_fails_raises_behind_its_last_item(omni: Omni, rig: Rig) -> None:
    rig.stages["thinker"].fail_step = RuntimeError("x")
    seen: list[OutputChunk] = []
    with pytest.raises(StageError):
        seen.extend(omni.stream_chat(HELLO))
    assert seen[-1].final is not None


def test_the_progress_bar_is_drawn_on_a_terminal(omni: Omni, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert omni.generate(["one", "two"], progress=True)[1].text


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OmniError, match="nowhere"):
        Omni(tmp_path / "nowhere")


# --------------------------------------------------------------------------------------------------- async


def run(make: Callable[[AsyncOmni], Coroutine[object, object, None]], rig: Rig) -> None:
    async def main() -> None:
        async with rig.async_omni() as omni:
            await make(omni)
            await asyncio.to_thread(omni.orchestrator.check_idle)

    asyncio.run(main())


async def collect(items: AsyncIterator[OutputChunk]) -> list[OutputChunk]:
    return [item async for item in items]


def test_async_streams_run_side_by_side(rig: Rig) -> None:
    async def go(omni: AsyncOmni) -> None:
        streams = [collect(omni.generate("w " * n, modalities=["text", "audio"])) for n in range(1, 8)]
        for n, items in enumerate(await asyncio.gather(*streams), start=1):
            final = items[-1].final
            assert final is not None
            assert len(final.token_ids) == n
            assert "".join(item.text for item in items) == final.text

    run(go, rig)
    assert threading.get_ident() not in rig.processor.threads  # never in the event loop


def test_chat_messages_stream_too(rig: Rig) -> None:
    async def go(omni: AsyncOmni) -> None:
        items = await collect(omni.generate(HELLO, SamplingParams(n=2), request_id="mine"))
        assert {item.request_id for item in items} == {"mine"}
        assert omni.trace("mine") is not None
        assert not omni.abort("mine")

    run(go, rig)


def test_constraints_that_take_long_to_compile_do_not_keep_other_prompts_waiting(rig: Rig) -> None:
    entered, release = threading.Event(), threading.Event()

    def check(params: object) -> None:
        if isinstance(params, SamplingParams) and params.structured is not None:
            entered.set()
            if not release.wait(HANG_SECONDS):
                raise TimeoutError

    rig.stages["thinker"].__dict__["check_params"] = check
    constrained = SamplingParams(structured=StructuredOutput(regex="a"))

    async def go(omni: AsyncOmni) -> None:
        many = (os.cpu_count() or 1) + 8
        tasks = [asyncio.create_task(collect(omni.generate(text, constrained))) for text in ("w", "w" * 20_000) * many]
        await asyncio.to_thread(entered.wait, HANG_SECONDS)
        try:
            async with asyncio.timeout(HANG_SECONDS):
                for text in ("w", "w" * 20_000):
                    assert (await collect(omni.generate(text)))[-1].final is not None
            assert not any(task.done() for task in tasks)
        finally:
            release.set()
        await asyncio.gather(*tasks)

    run(go, rig)


def test_cancelling_the_task_aborts_the_request(rig: Rig) -> None:
    entered, release = held(rig)

    async def go(omni: AsyncOmni) -> None:
        task = asyncio.create_task(collect(omni.generate("w " * 500)))
        await asyncio.to_thread(entered.wait, HANG_SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release.set()
        assert omni.stats().finished[FinishReason.ABORT] == 1

    run(go, rig)


def test_a_task_that_is_cancelled_while_its_request_is_admitted_aborts_it(rig: Rig) -> None:
    _, release = held(rig)
    admitted, left = threading.Event(), threading.Event()

    async def go(omni: AsyncOmni) -> None:
        orchestrator = omni.orchestrator
        start = orchestrator.start

        def start_slowly(plan: RequestPlan, sink: Sink) -> RequestRun:
            run = start(plan, sink)
            admitted.set()
            assert left.wait(HANG_SECONDS)
            return run

        orchestrator.start = start_slowly  # type: ignore[method-assign]
        task = asyncio.create_task(omni.start("w " * 500))
        await asyncio.to_thread(admitted.wait, HANG_SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        left.set()
        assert await asyncio.to_thread(orchestrator.wait_for_room, HANG_SECONDS, orchestrator.max_inflight)
        release.set()
        assert omni.stats().finished[FinishReason.ABORT] == 1

    run(go, rig)


def test_closing_the_iterator_aborts_the_request(rig: Rig) -> None:
    async def go(omni: AsyncOmni) -> None:
        items = omni.generate("w " * 5000)
        await anext(items)
        await items.aclose()
        assert omni.stats().finished[FinishReason.ABORT] == 1

    run(go, rig)


def test_an_abort_by_id_ends_the_stream(rig: Rig) -> None:
    entered, release = held(rig)

    async def go(omni: AsyncOmni) -> None:
        task = asyncio.create_task(collect(omni.generate("w " * 500, request_id="x")))
        await asyncio.to_thread(entered.wait, HANG_SECONDS)
        assert omni.abort("x")
        items = await task
        assert items[-1].final is not None
        assert items[-1].final.finish_reason is FinishReason.ABORT
        release.set()

    run(go, rig)


def test_refusals_raise_at_the_first_item_and_before_any_preparation() -> None:
    rig = Rig(max_inflight=1)
    entered, release = held(rig)

    async def go(omni: AsyncOmni) -> None:
        with pytest.raises(UnsupportedModalityError):
            await anext(omni.generate("w", modalities=["video"]))
        first = await omni.start("w", request_id="x")
        await asyncio.to_thread(entered.wait, HANG_SECONDS)
        prepared = len(rig.processor.threads)
        with pytest.raises(QueueFullError):
            await omni.start("w", None, RequestOptions(modalities=["text"]))
        with pytest.raises(InvalidRequestError, match="id"):
            await omni.start("w", request_id="x")
        assert len(rig.processor.threads) == prepared
        release.set()
        assert (await collect(first))[-1].final is not None
        with pytest.raises(StopAsyncIteration):
            await anext(first)

    run(go, rig)


def test_a_failure_while_running_ends_the_stream_without_raising(rig: Rig) -> None:
    rig.stages["talker"].fail_step = RuntimeError("x")

    async def go(omni: AsyncOmni) -> None:
        items = await collect(omni.generate("w w w", modalities=["text", "audio"]))
        assert items[-1].final is not None
        assert isinstance(items[-1].final.error, StageError)

    run(go, rig)


def test_leaving_the_context_by_an_error_aborts_and_by_its_end_drains(rig: Rig) -> None:
    async def fail() -> None:
        async with rig.async_omni() as omni:
            await omni.start("w " * 5000)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        asyncio.run(fail())
    assert rig.stages["thinker"].jobs == {}

    other = Rig()

    async def drain() -> None:
        async with other.async_omni() as omni:
            stream = await omni.start("w w")
        items = await collect(stream)
        assert items[-1].final is not None
        assert items[-1].final.finish_reason is FinishReason.STOP

    asyncio.run(drain())


def test_a_loop_that_is_gone_does_not_hurt_the_stages(rig: Rig) -> None:
    entered, release = held(rig)
    omni = rig.async_omni()

    async def leave() -> None:
        await omni.start("w w")
        await asyncio.to_thread(entered.wait, HANG_SECONDS)

    asyncio.run(leave())
    release.set()
    omni.orchestrator.shutdown()
    assert sum(omni.stats().finished.values()) == 1


def test_a_door_that_is_dropped_without_being_closed_stops_its_stages() -> None:
    before = set(threading.enumerate())
    rig = Rig()
    omni = rig.omni()
    omni.generate("a", progress=False)
    started = set(threading.enumerate()) - before
    assert started
    del omni
    gc.collect()
    for thread in started:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()
