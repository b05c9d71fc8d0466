"""The orchestrator with its real threads, and the buffer for slow readers. Events and conditions, no sleeping."""

from __future__ import annotations

import random
import threading
from collections import deque

import numpy as np
import pytest

from omnistage.core.errors import InternalError, ShutdownError
from omnistage.core.types import AudioChunk, FinishReason, TokenLogprob, TokenLogprobs
from omnistage.pipeline.loop_threads import LoopThread
from omnistage.pipeline.output_assembler import OutputBuffer
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk
from tests.hang_guard import HANG_SECONDS
from tests.unit.fakes import AUDIO, TEXT, Pipeline, Recorder, make_graph

pytestmark = pytest.mark.timeout(300)


class Gate:
    """Holds a stage in the middle of a step."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        if not self.open.wait(HANG_SECONDS):
            raise TimeoutError


def test_many_requests_from_many_threads_end_exactly_once() -> None:
    graph = make_graph(("a", "b", "c", "d"), {"b": ("a",), "c": ("a",), "d": ("b", "c")}, {TEXT: "a", AUDIO: "d"})
    pipeline = Pipeline(graph, threads=True, max_inflight=1000)
    sinks: list[Recorder] = []

    def client(number: int) -> None:
        choose = random.Random(number)
        for index in range(25):
            name = f"{number}-{index}"
            sinks.append(pipeline.submit(name, tokens=choose.randrange(6), timeout=choose.choice([None, 60.0])))
            if choose.random() < 0.3:
                pipeline.orchestrator.abort(name)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(HANG_SECONDS)
    for sink in sinks:
        final = sink.wait()
        assert final.finish_reason in (FinishReason.STOP, FinishReason.ABORT)
        assert sink.text == final.text
    assert len(sinks) == 150
    pipeline.orchestrator.check_idle()
    pipeline.orchestrator.shutdown()


def test_the_downstream_runs_while_the_upstream_is_in_a_step() -> None:
    pipeline = Pipeline(threads=True)
    gate, heard = Gate(), threading.Event()
    steps = 0

    def hold_second_step() -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            gate()

    pipeline.stages["thinker"].before_step = hold_second_step
    sink = Recorder()

    def listen(item: OutputChunk) -> None:
        sink(item)
        if item.audio is not None:
            heard.set()

    pipeline.orchestrator.submit(pipeline.request(tokens=3), listen)
    assert gate.entered.wait(HANG_SECONDS)
    assert heard.wait(HANG_SECONDS)  # sound of the first token, while the thinker is held in its second step
    gate.open.set()
    assert sink.wait().finish_reason is FinishReason.STOP
    pipeline.orchestrator.shutdown()


def test_an_abort_does_not_wait_for_a_step_and_the_stage_forgets_after_it() -> None:
    pipeline = Pipeline(threads=True)
    gate = Gate()
    pipeline.stages["thinker"].before_step = gate
    sink = pipeline.submit(tokens=100)
    assert gate.entered.wait(HANG_SECONDS)
    assert pipeline.orchestrator.abort("r")
    assert sink.final.finish_reason is FinishReason.ABORT  # although the step still runs
    gate.open.set()
    pipeline.orchestrator.check_idle()
    assert pipeline.stages["thinker"].steps == 1
    pipeline.orchestrator.shutdown()


def test_a_deadline_passes_while_a_stage_is_busy() -> None:
    pipeline = Pipeline(threads=True)
    gate = Gate()
    pipeline.stages["thinker"].before_step = gate
    sink = pipeline.submit(tokens=100, timeout=0.05)
    assert sink.wait().finish_reason is FinishReason.DEADLINE
    gate.open.set()
    pipeline.orchestrator.check_idle()
    pipeline.orchestrator.shutdown()


def test_shutdown_drains_what_is_in_flight() -> None:
    pipeline = Pipeline(threads=True)
    gate = Gate()
    pipeline.stages["thinker"].before_step = gate
    sink = pipeline.submit()
    assert gate.entered.wait(HANG_SECONDS)
    closing = threading.Thread(target=pipeline.orchestrator.shutdown)
    closing.start()
    until_refused = iter(lambda: pipeline.orchestrator.check_room("late"), "never")
    with pytest.raises(ShutdownError):
        deque(until_refused, maxlen=0)
    gate.open.set()
    closing.join(HANG_SECONDS)
    assert not closing.is_alive()
    assert sink.final.finish_reason is FinishReason.STOP
    assert [stage.closed for stage in pipeline.stages.values()] == [1, 1, 1]


def test_shutdown_waits_for_the_end_of_the_threads_and_not_only_of_their_loops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that lets go of a stage's tensors while the interpreter ends would abort the process."""
    drive, never, gone = LoopThread._drive, threading.Event(), []

    def slowly(self: LoopThread[object], open_loops: list[int]) -> None:
        drive(self, open_loops)
        never.wait(0.2)  # its loops have ended: who waits for these alone goes on from here
        gone.append(self.name)

    monkeypatch.setattr(LoopThread, "_drive", slowly)
    pipeline = Pipeline(threads=True)
    pipeline.submit().wait()
    threads = [loop.thread for loop in pipeline.orchestrator._loops.values()]
    pipeline.orchestrator.shutdown()
    assert sorted(gone) == ["omnistage-talker", "omnistage-thinker", "omnistage-vocoder"]
    assert not any(thread is not None and thread.is_alive() for thread in threads)


def test_shutdown_gives_up_draining_and_does_not_close_a_stuck_stage() -> None:
    pipeline = Pipeline(threads=True)
    gate = Gate()
    pipeline.stages["thinker"].before_step = gate
    sink = pipeline.submit()
    assert gate.entered.wait(HANG_SECONDS)
    pipeline.orchestrator.shutdown(timeout=0.01)
    assert sink.final.finish_reason is FinishReason.ABORT
    assert [stage.closed for stage in pipeline.stages.values()] == [0, 1, 1]
    gate.open.set()


def test_check_idle_says_that_a_loop_is_busy() -> None:
    pipeline = Pipeline(threads=True)
    gate = Gate()
    pipeline.stages["thinker"].before_step = gate
    sink = pipeline.submit()
    assert gate.entered.wait(HANG_SECONDS)
    with pytest.raises(InternalError, match="loop of thinker not at rest"):
        pipeline.orchestrator.check_idle(timeout=0.01)
    gate.open.set()
    sink.wait()
    pipeline.orchestrator.shutdown()


# ------------------------------------------------------------------------------------------- slow consumers


def text(token: int, index: int = 0, finish: FinishReason | None = None) -> OutputChunk:
    logprobs = (TokenLogprobs(TokenLogprob(token, -1.0)),)
    return OutputChunk("r", TEXT, index, f"{token} ", (token,), logprobs, finish_reason=finish)


def sound(value: int, finish: FinishReason | None = None) -> OutputChunk:
    return OutputChunk("r", AUDIO, audio=AudioChunk(np.full(2, value, np.float32), 100), finish_reason=finish)


def test_a_full_buffer_joins_what_waits_and_loses_nothing() -> None:
    buffer = OutputBuffer(4)
    for number in range(1000):
        buffer.put(text(number))
        buffer.put(sound(number))
        assert len(buffer) <= 4
    buffer.put(text(1000, finish=FinishReason.STOP))
    buffer.put(sound(1000, finish=FinishReason.LENGTH))
    buffer.put(OutputChunk("r", TEXT, final=OmniRequestOutput("r")))
    items = buffer.pop_all()
    assert "".join(item.text for item in items) == "".join(f"{n} " for n in range(1001))
    assert [t for item in items for t in item.token_ids] == list(range(1001))
    assert [entry.chosen.token_id for item in items for entry in item.logprobs] == list(range(1001))
    samples = np.concatenate([item.audio.samples for item in items if item.audio is not None])
    assert samples.tolist() == np.repeat(np.arange(1001), 2).tolist()
    ends = {item.modality: item.finish_reason for item in items if item.finish_reason is not None}
    assert ends == {TEXT: FinishReason.STOP, AUDIO: FinishReason.LENGTH}
    assert items[-1].final is not None


def test_joining_keeps_answers_apart() -> None:
    buffer = OutputBuffer(2)
    for number in range(3):
        buffer.put(text(number, index=0))
        buffer.put(text(10 + number, index=1))
    assert [(item.index, item.text) for item in buffer.pop_all()] == [(0, "0 1 2 "), (1, "10 11 12 ")]


def test_a_reader_is_woken_only_when_there_was_nothing_to_read() -> None:
    wakes: list[int] = []
    buffer = OutputBuffer(8, lambda: wakes.append(1))
    buffer.put(text(1))
    buffer.put(text(2))
    assert len(wakes) == 1
    buffer.pop_all()
    buffer.put(text(3))
    assert len(wakes) == 2


def test_waiting_for_an_item_ends_with_one_or_with_time() -> None:
    buffer = OutputBuffer(8)
    assert buffer.get(timeout=0) is None
    threading.Thread(target=buffer.put, args=(text(1),)).start()
    item = buffer.get(timeout=HANG_SECONDS)
    assert item is not None
    assert item.token_ids == (1,)


def test_a_reader_that_never_reads_holds_nobody_up() -> None:
    pipeline = Pipeline(threads=True)
    buffer, other = OutputBuffer(3), Recorder()
    pipeline.orchestrator.submit(pipeline.request("slow", tokens=200), buffer.put)
    pipeline.orchestrator.submit(pipeline.request("other", tokens=200), other)
    assert other.wait().finish_reason is FinishReason.STOP
    items: list[OutputChunk] = []
    pipeline.orchestrator.shutdown()
    assert len(buffer) <= 4
    items = buffer.pop_all()
    final = items[-1].final
    assert final is not None
    assert "".join(item.text for item in items) == final.text == other.final.text
