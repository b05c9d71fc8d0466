"""Stages in processes of their own: the same results, faults that stay where they happen, nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import logging
import os
import random
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omnistage.config import GroupConfig
from omnistage.core.errors import ShutdownError, StageError, StageUnavailableError
from omnistage.core.family import BridgeResult
from omnistage.core.params import SamplingParams
from omnistage.core.stage import GROWING, StageState, StageStats
from omnistage.core.types import ARInput, FinishReason, RequestInfo, SideRows, StageChunk
from omnistage.pipeline.loop import StageLoop
from omnistage.pipeline.worker import Worker
from omnistage.placement import fork_server, launch, replicas, worker_process
from omnistage.placement import group as group_module
from omnistage.placement.group import Binding, _sum
from omnistage.placement.messages import Beat, Start, Stop
from omnistage.placement.prefixes import Prefixes
from omnistage.server.observe.metrics import _STAGE_COUNTERS, _STAGE_GAUGES
from tests.hang_guard import HANG_SECONDS
from tests.unit.fakes import FakeStage
from tests.unit.placement_harness import PlacedPipeline, assert_whole, eventually
from tests.unit.placement_worker import POISON


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlacedPipeline]:
    """Two processes that each run talker and vocoder, restarted without growing delays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "RESTART_PAUSES", (0.05,))
        with PlacedPipeline(tmp_path_factory.mktemp("placement"), replicas=2) as pipeline:
            yield pipeline


@pytest.fixture
def voices(pair: PlacedPipeline) -> Iterator[PlacedPipeline]:
    """The same with both processes up; after each test nothing may be left in them."""
    eventually(pair.all_up)
    yield pair
    eventually(lambda: sum(pair.running()) == 0 and not pair.group._bindings)
    pair.orchestrator.check_idle()


def test_the_output_is_the_same_and_inner_edges_stay_in_the_process(voices: PlacedPipeline) -> None:
    voices.bridges_called.clear()
    assert_whole(voices.submit(tokens=40).wait(), 40)
    assert set(voices.bridges_called) == {"talker"}


def test_requests_go_to_the_process_with_the_fewest(voices: PlacedPipeline) -> None:
    before = [replica.requests for replica in voices.replicas()]
    sinks = [voices.submit(f"r{number}", 200) for number in range(6)]
    eventually(lambda: voices.running() == [3, 3])
    for sink in sinks:
        assert_whole(sink.wait(), 200)
    assert [now.requests - then for now, then in zip(voices.replicas(), before, strict=True)] == [3, 3]


def test_an_abort_reaches_the_process(voices: PlacedPipeline) -> None:
    sink = voices.submit(tokens=5000)
    eventually(lambda: any(item.audio is not None for item in sink.items))
    voices.orchestrator.abort("r")
    assert sink.wait().finish_reason is FinishReason.ABORT
    eventually(lambda: all(_in_processes(voices, stage) == 0 for stage in ("talker", "vocoder")))


def _in_processes(voices: PlacedPipeline, stage: str) -> int:
    return sum(worker.stats[stage].running for worker in voices.group._replicas.workers() if worker.stats)


@pytest.mark.parametrize("fault", ["signal 9, as when the system runs out of memory", "the connection to it was lost"])
def test_a_lost_process_ends_its_own_requests_alone_and_comes_back(voices: PlacedPipeline, fault: str) -> None:
    sinks = [voices.submit(f"r{number}", 400) for number in range(4)]
    eventually(lambda: all(any(item.audio is not None for item in sink.items) for sink in sinks))
    fallen = voices.replicas()[0]
    if "signal" in fault:
        voices.signal(0)
    else:
        voices.group._replicas.workers()[0].host.socket.shutdown(socket.SHUT_RDWR)
    outputs = [sink.wait() for sink in sinks]
    lost = [output for output in outputs if output.error is not None]
    assert len(lost) == 2
    for output in lost:
        assert isinstance(output.error, StageUnavailableError)
        assert f"ended while it had this request ({fault})" in str(output.error)
    for output in outputs:
        if output.error is None:
            assert_whole(output, 400)
    eventually(voices.all_up)
    risen = voices.replicas()[0]
    assert (risen.failures, risen.restarts) == (fallen.failures + 1, fallen.restarts + 1)
    assert risen.pid != fallen.pid
    assert_whole(voices.submit(tokens=5).wait(), 5)


@pytest.mark.parametrize("wanted", [True, False], ids=["killed and wanted", "overdue and not"])
def test_a_request_that_has_given_nothing_is_started_again_elsewhere_where_that_is_wanted(
    voices: PlacedPipeline, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    monkeypatch.setattr(voices.group, "_restart_requests", wanted)
    with voices.held():
        sinks = [voices.submit(f"r{number}", 2) for number in range(4)]
        eventually(lambda: voices.running() == [2, 2])
        if wanted:
            voices.signal(0)
        else:
            voices.group._receive(voices.group._replicas.workers()[0], Beat(overdue="talker"))
        eventually(lambda: voices.replicas()[0].pid is None)
    outputs = [sink.wait() for sink in sinks]
    if wanted:
        for output in outputs:
            assert_whole(output, 2)
    else:
        assert sum(output.finish_reason is FinishReason.ERROR for output in outputs) == 2


def test_a_request_that_cannot_be_started_again_ends_and_so_do_those_behind_it(
    voices: PlacedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with voices.held():
        sinks = [voices.submit(f"r{number}", 2) for number in range(6)]
        eventually(lambda: voices.running() == [3, 3])
        # Bound, and sent: what has been sent nothing of is started elsewhere without sending anything again.
        eventually(lambda: all(binding.replay for binding in [*voices.group._bindings.values()]))
        with monkeypatch.context() as patch:
            patch.setattr(group_module, "_with_key", fail)
            voices.signal(0)
            eventually(lambda: sum(voices.running()) == 3)
    outputs = [sink.wait() for sink in sinks]
    ended = [output.error for output in outputs if output.error is not None]
    assert len(ended) == 3
    assert all(isinstance(error, StageUnavailableError) for error in ended)
    assert "as when the system runs out of memory" in str(ended[0])


@pytest.mark.parametrize("first", [True, False], ids=["first input", "later input"])
def test_an_input_that_cannot_be_sent_ends_its_request_alone(
    voices: PlacedPipeline, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    whole = voices.orchestrator._bridges["talker"]

    def broken(info: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
        if info.request_id != "broken":
            return whole(info, state, chunk)
        unsendable: Any = [object()]
        start = ARInput((1,), embeds=unsendable if first else None, streaming=not first)
        return None, [start] if first else [start, SideRows(unsendable, final=True)]

    monkeypatch.setitem(voices.orchestrator._bridges, "talker", broken)
    other = voices.submit("other", 50)
    error = voices.submit("broken", 1).wait().error
    assert error is not None
    assert "cannot be sent to another process" in str(error)
    assert_whole(other.wait(), 50)


def test_a_process_whose_stage_fails_again_and_again_is_replaced(voices: PlacedPipeline) -> None:
    before = voices.replicas()
    while voices.replicas()[0].failures + voices.replicas()[1].failures == before[0].failures + before[1].failures:
        try:
            error = voices.submit(POISON).wait().error
        except StageUnavailableError:  # both processes have ended
            break
        assert isinstance(error, StageError | StageUnavailableError)
        assert "restart the service" not in str(error)  # only its process is
    eventually(voices.all_up)


def test_a_stage_in_a_step_for_too_long_is_reported() -> None:
    here, there = socket.socketpair()
    with here, there:
        worker = Worker(here)
        loop = StageLoop[int](FakeStage("talker"), lambda *_: None)
        worker._loops = {"talker": loop}  # type: ignore[dict-item]
        loop.turn_started = time.perf_counter() - 5.0
        assert worker._beat(1.0).overdue is None  # the first steps may take longer
        assert worker._beat(0.4).overdue == "talker"
        assert worker._beat(None).overdue is None


def test_the_counters_of_all_processes_are_added() -> None:
    one, other = (
        StageStats(running=2, steps=3, capacity=4, extra={"a": 0.5}),
        StageStats(1, 1, extra={"a": 1.0, "b": 2}),
    )
    added = StageStats(1, 3, 0, 3, 0, 0, 4, {"a": 1.5, "b": 2})
    assert _sum([one, other], held=True) == added
    assert _sum([one, other], held=False) == replace(added, waiting=0, running=0)
    assert _sum([], held=True) == StageStats()


def test_prompts_with_the_same_beginning_go_to_one_process_unless_it_has_much_more_to_do() -> None:
    def prompt(*tokens: int) -> ARInput:
        return ARInput((*range(128), *tokens))

    busy, idle = (SimpleNamespace(load=load, lost=False) for load in (2, 0))
    prefixes = Prefixes()
    assert prefixes.choose(prompt(1), busy) is busy  # type: ignore[arg-type]
    assert prefixes.choose(prompt(2), idle) is busy  # type: ignore[arg-type]
    assert prefixes.choose(ARInput((5,) * 200), idle) is idle  # type: ignore[arg-type]
    assert prefixes.choose(ARInput((1, 2)), idle) is idle  # type: ignore[arg-type]
    busy.load = 3
    assert prefixes.choose(prompt(3), idle) is idle  # type: ignore[arg-type]
    busy.load = 0
    assert prefixes.choose(prompt(4), busy) is idle  # type: ignore[arg-type]
    idle.lost = True
    assert prefixes.choose(prompt(4), busy) is busy  # type: ignore[arg-type]


def test_without_a_process_requests_are_refused_and_one_that_fails_too_often_is_given_up(tmp_path: Path) -> None:
    with PlacedPipeline(tmp_path, hang_seconds=1.0, max_restarts=1) as voices:
        health = voices.orchestrator.health
        voices.signal(0)
        eventually(lambda: not health()["talker"].available)
        with pytest.raises(StageUnavailableError, match="is being restarted") as refused:
            voices.submit()
        assert refused.value.status == 503
        assert not health()["talker"].needs_restart
        eventually(lambda: health()["talker"].available)

        voices.signal(0, signal.SIGSTOP)
        time.sleep(2.0)  # twice as long as a process with work may be silent
        voices.signal(0, signal.SIGCONT)
        assert_whole(voices.submit(tokens=3).wait(), 3)

        sink = voices.submit(tokens=5000)
        eventually(lambda: any(item.audio is not None for item in sink.items))
        voices.signal(0, signal.SIGSTOP)
        error = sink.wait().error
        assert isinstance(error, StageUnavailableError)
        assert "has not responded for 1 s" in str(error)
        eventually(lambda: not health()["talker"].available and health()["vocoder"].needs_restart)
        assert health()["talker"].state is health()["vocoder"].state is StageState.FAILED
        assert health()["thinker"].available
        with pytest.raises(StageUnavailableError, match="restart the service"):
            voices.submit("late")


def test_lost_processes_are_forked_from_one_that_has_imported_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "RESTART_PAUSES", (0.05,))

    def parent_of_next() -> int:
        """The parent of the process that takes the place of the one that is killed."""
        before, restarts = voices.replicas()[0].pid, voices.replicas()[0].restarts
        voices.signal(0)
        eventually(lambda: voices.replicas()[0].restarts > restarts and voices.all_up())
        assert_whole(voices.submit(tokens=3).wait(), 3)
        pid = voices.replicas()[0].pid
        assert pid not in (None, before)
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    with PlacedPipeline(tmp_path, standby=True) as voices:
        processes = voices.group._replicas
        eventually(lambda: processes._fork_server is not None and processes._fork_server.ready)
        server = processes._fork_server
        assert server is not None
        assert [parent_of_next(), parent_of_next()] == [server.pid] * 2  # it is used up by none
        os.kill(server.pid, signal.SIGKILL)
        eventually(server.ended)
        assert parent_of_next() == os.getpid()  # its end is no loss
        eventually(lambda: processes._fork_server is not server and processes._fork_server.ready)  # type: ignore[union-attr]
        last = processes._fork_server
        assert last is not None
        assert parent_of_next() == last.pid
        assert voices.replicas()[0].failures == 4  # no start has failed
        pid = voices.replicas()[0].pid
    assert last.ended()
    eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_a_fork_server_that_is_stopped_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_FORK_SECONDS", 0.2)
    command = ("tests.unit.placement_worker", str(tmp_path / "hold"))
    server = fork_server.ForkServer(["json", "tests.unit.no_such_module"], command=command)
    eventually(lambda: server.ready)
    os.kill(server.pid, signal.SIGSTOP)
    assert server.fork() is None
    assert server.ended()


def test_where_forks_cannot_be_watched_lost_processes_are_started_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = GroupConfig(stages=["talker"], standby=True)
    assert launch._fork_server("voice", group) is fork_server.ForkServer
    monkeypatch.delattr(os, "pidfd_open")
    with caplog.at_level(logging.WARNING):
        assert launch._fork_server("voice", group) is None
    assert "standby of group voice needs Linux" in caplog.text


def test_ctrl_c_does_not_reach_a_worker_that_still_starts() -> None:
    process = worker_process.LocalProcess(("-c", ""))
    assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    assert process.wait(HANG_SECONDS) == 0
    process.socket.close()


def test_a_fork_that_could_not_use_gpus_becomes_a_new_interpreter(tmp_path: Path) -> None:
    (tmp_path / "uses_cuda.py").write_text("import torch\ntorch.cuda._is_in_bad_fork = lambda: True\n")
    command = ("tests.unit.placement_worker", str(tmp_path / "hold"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        server = fork_server.ForkServer(["uses_cuda"], command=command)
    eventually(lambda: server.ready)
    process = server.fork()
    assert process is not None
    worker = worker_process.Worker("w", process, lambda _worker, _message: None, lambda _worker: None)
    eventually(lambda: b"fork_server" not in Path(f"/proc/{process.pid}/cmdline").read_bytes())
    worker.send(Stop())  # before it has been told what to run
    worker.kill()
    assert process.wait(HANG_SECONDS) == -signal.SIGKILL
    process.kill()  # its number may be another's by now
    server.close()


def test_a_library_that_starts_threads_is_not_forked(tmp_path: Path) -> None:
    (tmp_path / "runs_threads.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        server = fork_server.ForkServer(["runs_threads"])
    eventually(server.ended)
    assert not server.ready
    assert server.fork() is None


@pytest.mark.parametrize("fault", [None, "thread", "fail"])
def test_what_can_be_prepared_for_forks_is_and_the_rest_is_left_to_them(tmp_path: Path, fault: str | None) -> None:
    note = tmp_path / "note"
    arguments = json.dumps({"note": str(note), **({fault: True} if fault else {})})
    start = Start(arguments, ("talker",), None, None, 1.0, 30)
    server = fork_server.ForkServer(["torch"], start, command=("tests.unit.placement_worker", str(tmp_path / "hold")))
    eventually(lambda: server.ready)
    process = server.fork()
    assert process is not None
    process.socket.close()  # before it has been told what to run
    assert process.wait(HANG_SECONDS) == 0
    assert (note.read_text() if note.exists() else None) == (None if fault else str(server.pid))
    server.close()


def test_what_is_being_prepared_ends_with_the_fork_server(tmp_path: Path) -> None:
    note = tmp_path / "note"
    start = Start(json.dumps({"waits": str(note)}), ("talker",), None, None, 1.0, 30)
    server = fork_server.ForkServer([], start, command=("tests.unit.placement_worker", str(tmp_path / "hold")))
    eventually(lambda: note.exists() and note.read_text().endswith(" "))
    pid = int(note.read_text())
    try:
        assert pid != server.pid
        server.close()
        eventually(lambda: not _runs(pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    """Whether it does, and has not just nobody to fetch its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_process_that_hangs_while_it_starts_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RESTART_PAUSES", (0.05,))
    with PlacedPipeline(tmp_path) as voices, monkeypatch.context() as patch:
        patch.setattr(worker_process, "START_SILENCE", 2)
        with voices.loading():
            voices.signal(0)
            eventually(lambda: voices.group._replicas._starting is not None)
            starting = voices.group._replicas._starting
            assert starting is not None
            os.kill(starting.host.pid, signal.SIGSTOP)
            eventually(lambda: voices.replicas()[0].failures == 2)  # once when it was killed, once when it hung
        patch.undo()
        eventually(lambda: voices.replicas()[0].restarts == 1 and voices.all_up())
        assert_whole(voices.submit(tokens=3).wait(), 3)


def test_pauses_before_restarts_grow_for_processes_that_end_soon_and_for_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(replicas, "RESTART_PAUSES", (0.1, 1.0, 2.0))
    monkeypatch.setattr(replicas.time, "monotonic", lambda: now)
    group = replicas.Replicas("g", [Start("{}", (), None, None, 1.0, 30)], hang_seconds=1.0, max_restarts=5)
    (replica,) = group._replicas
    pauses = []
    for lived in (60.0, 1.0, 1.0, 60.0, 1.0, 1.0):
        replica.up_since, replica.due = now - lived, None
        with group._changed:
            group._schedule(replica)
        pauses.append(None if replica.due is None else round(replica.due - now, 3))
    assert pauses == [0.1, 1.0, 2.0, 0.1, 1.0, None]  # and after five restarts it stays down, however long each lived
    assert replica.given_up
    group.close()


def test_what_a_lost_process_had_counted_still_counts(voices: PlacedPipeline) -> None:
    for number in range(4):
        assert_whole(voices.submit(f"r{number}", 20).wait(), 20)
    talker = voices.group.stages["talker"]
    eventually(lambda: talker.stats().steps > 0 and sum(talker.step_seconds().counts) > 0)
    stats, steps = talker.stats(), talker.step_seconds()
    voices.signal(0)
    voices.signal(1)
    eventually(lambda: voices.group._lost_stats != {} and not voices.group._replicas.counted_workers())
    assert talker.stats().steps >= stats.steps
    assert sum(talker.step_seconds().counts) >= sum(steps.counts)
    assert talker.step_seconds().total >= steps.total
    assert talker.stats().capacity == 0  # that is what it had at the moment
    eventually(voices.all_up)


def test_counts_do_not_fall_while_a_process_is_lost(voices: PlacedPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    voices.submit("r", 20).wait()
    talker = voices.group.stages["talker"]
    eventually(lambda: talker.stats().steps > 0)
    processes, steps = voices.group._replicas, talker.stats().steps
    take_over, seen = processes._on_lost, []

    def observed(worker: worker_process.Worker, why: str) -> None:
        seen.append(talker.stats().steps)  # it is no replica any more, and not counted as lost yet
        take_over(worker, why)
        seen.append(talker.stats().steps)

    monkeypatch.setattr(processes, "_on_lost", observed)
    voices.signal(0)
    voices.signal(1)
    eventually(lambda: len(seen) == 4)
    assert min(seen) >= steps
    eventually(voices.all_up)


def test_what_grows_is_what_the_metrics_count() -> None:
    engines = {name.removeprefix("encoder_") for name in _STAGE_COUNTERS} - {"failures", "rebuilds"}
    assert engines <= {name.removeprefix("encoder_") for name in GROWING}
    assert not GROWING & set(_STAGE_GAUGES)


def test_a_prompt_goes_where_its_beginning_was_and_others_are_spread(voices: PlacedPipeline) -> None:
    def place(name: str, prompt: ARInput) -> Binding:
        info = RequestInfo(name)
        binding = voices.group._bind(info, prompt)
        binding.stages.add("talker")
        bindings.append(binding)
        return binding

    bindings: list[Binding] = []
    shared = tuple(range(200))
    first = place("first", ARInput(shared))
    voices.group.release(first, "talker")
    assert place("again", ARInput((*shared, 1))).worker is first.worker
    assert place("other", ARInput((7,) * 200)).worker is not first.worker
    assert [place(f"s{number}", ARInput((number,))).worker for number in range(2)].count(first.worker) == 1
    for binding in bindings:
        voices.group.release(binding, "talker")


def test_nothing_is_kept_of_a_lost_process(voices: PlacedPipeline) -> None:
    binding = voices.group._bind(RequestInfo("known"), ARInput(tuple(range(300))))
    binding.stages.add("talker")
    voices.group.release(binding, "talker")
    lost = weakref.ref(binding.worker)
    os.kill(binding.worker.host.pid, signal.SIGKILL)
    del binding
    eventually(lambda: gc.collect() >= 0 and lost() is None)


def test_closing_ends_a_process_that_is_being_started_and_refuses_checks(tmp_path: Path) -> None:
    with PlacedPipeline(tmp_path) as voices:
        voices.signal(0)
        eventually(lambda: voices.group._replicas._starting is not None)
        worker = voices.group._replicas._starting
        assert worker is not None
    assert worker.host.wait(HANG_SECONDS) is not None
    with pytest.raises(ShutdownError):  # and nobody waits for an answer that nobody gives
        voices.group.check("talker", params=SamplingParams())


def test_chaos_ends_every_request_once_and_leaves_nothing_behind(voices: PlacedPipeline) -> None:
    chance = random.Random(3)
    files = len(os.listdir("/proc/self/fd"))
    stop = threading.Event()

    def harm() -> None:
        while not stop.wait(0.3):
            up = [replica.number for replica in voices.replicas() if replica.pid is not None]
            if len(up) == 2 and chance.random() < 0.5:
                voices.signal(chance.choice(up), signal.SIGKILL)
            elif len(up) == 2:
                chance.choice(voices.group._replicas.workers()).host.socket.shutdown(socket.SHUT_RDWR)

    attacker = threading.Thread(target=harm)
    attacker.start()
    sinks, refused = [], 0
    try:
        for number in range(60):
            tokens = chance.randrange(1, 40)
            try:
                sinks.append((voices.submit(f"c{number}", tokens), tokens))
            except StageUnavailableError:
                refused += 1
            time.sleep(0.05)
        outputs = [(sink.wait(), tokens) for sink, tokens in sinks]
    finally:
        stop.set()
        attacker.join()
    for output, tokens in outputs:
        if output.error is None:
            assert_whole(output, tokens)
        else:
            assert isinstance(output.error, StageUnavailableError)
    assert sum(replica.failures for replica in voices.replicas()) > 0
    eventually(voices.all_up)
    assert_whole(voices.submit(tokens=5).wait(), 5)
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= files)
