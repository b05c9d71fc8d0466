"""A process that hangs is told from one that the machine gives no processor, and from one that was not listened to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from omnistage.core.types import StageChunk, TokenChunk
from omnistage.placement import channel, silence, worker_process
from omnistage.placement.messages import Beat, Chunks, Message
from omnistage.placement.silence import BUSY_FACTOR, LOOK_SECONDS, Silence, ThreadTimes, rests, thread_times, turns_of
from omnistage.placement.worker_process import Worker
from tests.hang_guard import HANG_SECONDS
from tests.unit.placement_harness import eventually
from tests.unit.test_hostile_frames import frame_of

_SPIN = "import os; os.sched_setaffinity(0, {%d})\nprint(flush=True)\nwhile True: pass"
LIMIT = 2.0

needs_schedstat = pytest.mark.skipif(not thread_times(os.getpid()), reason="this system does not count waits")


def spin(number: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", _SPIN % number], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.fixture
def crowded() -> Iterator[subprocess.Popen[bytes]]:
    """One of four processes that share a processor."""
    number = min(os.sched_getaffinity(0))
    processes = [spin(number) for _ in range(4)]
    yield processes[0]
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@needs_schedstat
def test_a_process_without_a_processor_waits_and_one_that_is_stopped_rests(crowded: subprocess.Popen[bytes]) -> None:
    before = thread_times(crowded.pid)
    eventually(lambda: sum(each.waited - before[t].waited for t, each in thread_times(crowded.pid).items()) > 0.3)
    assert not rests(before, thread_times(crowded.pid))
    os.kill(crowded.pid, signal.SIGSTOP)
    eventually(lambda: {each.state for each in thread_times(crowded.pid).values()} == {"T"})
    assert rests(thread_times(crowded.pid), thread_times(crowded.pid))


class Machine:
    """A process with two threads, of which a test says what they do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.threads = {1: ThreadTimes("S", 1.0, 1.0, 10), 2: ThreadTimes("S", 2.0, 2.0, 20)}
        self.silence = Silence(5)
        monkeypatch.setattr(silence, "thread_times", lambda _pid: dict(self.threads))

    def spend(self, thread: int, state: str, ran: float = 0.0, waited: float = 0.0) -> None:
        """Of the time until the next look; it has a turn where it ran."""
        past = self.threads[thread]
        turns = past.turns + (ran > 0)
        self.threads[thread] = ThreadTimes(state, past.ran + ran, past.waited + waited, turns)

    def look(self, seconds: float, *, drained: bool = True, sign: float = 100.0) -> float:
        """So many seconds later."""
        self.now += seconds
        return round(self.silence.look(sign, self.now, LIMIT, drained=drained), 3)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_the_whole_time_counts_of_a_process_whose_threads_all_rest(machine: Machine) -> None:
    """Stopped, or each waits for another: however late this process looks."""
    assert machine.look(0.5) == 0.5
    assert machine.look(0.1) == 0.6
    assert machine.look(0.8) == 1.4
    assert machine.look(0.6) == 2.0


def test_a_stopped_process_is_found_as_one_at_the_first_look(machine: Machine) -> None:
    for thread in machine.threads:
        machine.spend(thread, "T")
    assert machine.look(0.9) == 0.9


def test_what_came_before_the_first_look_does_not_count_beyond_a_sign(machine: Machine) -> None:
    """This process was late: nobody can say what the other one did."""
    assert machine.look(7.0) == 0.5


@pytest.mark.parametrize("threads", ["one", "one for the other", "still one"])
def test_time_that_threads_wait_for_a_processor_does_not_count_but_not_for_ever(machine: Machine, threads: str) -> None:
    machine.look(0.5)
    for _ in range(10):
        if threads == "one":
            machine.spend(1, "S", ran=0.02, waited=0.09)
        elif threads == "one for the other":
            machine.spend(1, "S", ran=0.02, waited=0.04)
            machine.spend(2, "S", ran=0.02, waited=0.05)
        else:  # one wait, which the system counts when it is over
            machine.spend(1, "R")
        counted = machine.look(0.1)
    assert counted == 0.5 + 1.0 / BUSY_FACTOR


def test_time_in_which_a_process_runs_and_says_nothing_counts(machine: Machine) -> None:
    machine.look(0.5)
    for _ in range(15):
        machine.spend(1, "R", ran=0.1)
        counted = machine.look(0.1)
    assert counted == 2.0


def test_waiting_for_a_disk_is_waiting_for_the_machine(machine: Machine) -> None:
    machine.look(0.5)
    machine.spend(1, "D")
    assert machine.look(0.1) == 0.5 + 0.1 / BUSY_FACTOR


def test_who_looks_late_counts_a_look_and_a_machine_that_slept_counts_no_hang(machine: Machine) -> None:
    machine.look(0.5)
    machine.spend(1, "S", ran=0.3)
    assert machine.look(5.0) == 0.5 + 2 * LOOK_SECONDS
    assert machine.look(3600.0) < LIMIT


def test_time_in_which_its_signs_were_not_read_does_not_count_but_not_for_ever(machine: Machine) -> None:
    machine.look(0.5)
    for _ in range(10):
        counted = machine.look(0.1, drained=False)
    assert counted == 0.5 + 1.0 / BUSY_FACTOR


def test_with_a_sign_of_life_a_new_silence_begins(machine: Machine) -> None:
    machine.look(0.5)
    machine.look(1.0)
    assert machine.look(0.6, sign=101.5) == 0.5


def test_without_such_counts_a_look_counts_as_far_as_it_was_in_time() -> None:
    for process in (Silence(None), Silence(2**30)):
        assert process.look(0.0, 0.5, LIMIT, drained=True) == 0.5
        assert process.look(0.0, 0.6, LIMIT, drained=True) == 0.6
        assert process.look(0.0, 9.0, LIMIT, drained=True) == pytest.approx(0.8)
    assert thread_times(2**30) == {}
    assert turns_of(2**30) is None


@needs_schedstat
def test_a_thread_that_ends_meanwhile_takes_nothing_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = [*os.listdir(f"/proc/{os.getpid()}/task"), str(2**30)]
    monkeypatch.setattr(os, "listdir", lambda _folder: threads)
    assert set(thread_times(os.getpid())) == {int(thread) for thread in threads[:-1]}


# ------------------------------------------------------------------------------------------- its end of the channel


class Link:
    """A worker whose process is this test, which sets the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, receive: Callable[[Message], None] = lambda _: None) -> None:
        here, self.there = socket.socketpair()
        host: Any = SimpleNamespace(socket=here, pid=2**30, kill=lambda: None, wait=lambda _seconds: 0)
        self.now = 100.0
        monkeypatch.setattr(worker_process, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.worker = Worker("w", host, lambda _worker, message: receive(message), lambda _worker: None)

    def hangs_after(self, seconds: float) -> bool:
        self.now += seconds
        return self.worker.hangs(LIMIT)

    def silent(self) -> None:
        """Until one of the next looks will say that it hangs."""
        assert not self.hangs_after(LIMIT / 4)
        while self.worker._silence._seconds < LIMIT - 2 * LOOK_SECONDS:
            assert not self.hangs_after(LOOK_SECONDS)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    made = Link(monkeypatch)
    with made.there:
        yield made


def test_a_worker_that_says_nothing_hangs_and_one_that_says_something_does_not(link: Link) -> None:
    link.silent()
    link.there.sendall(frame_of(Beat()))
    eventually(lambda: link.worker.heard == link.now)
    link.silent()
    assert any(link.hangs_after(LOOK_SECONDS) for _ in range(4))


def test_a_sign_that_comes_while_it_is_looked_at_is_one(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was silent for long enough has just said something, and that has just been read."""
    link.silent()
    look = link.worker._silence.look

    def look_slowly(*arguments: Any, **more: Any) -> float:
        seconds = look(*arguments, **more)
        link.there.sendall(frame_of(Beat()))
        eventually(lambda: link.worker.heard == link.now)
        return seconds

    monkeypatch.setattr(link.worker._silence, "look", look_slowly)
    assert not link.hangs_after(LIMIT)
    assert not link.hangs_after(LOOK_SECONDS)


def test_a_sign_that_was_read_and_not_noted_yet_is_one(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the channel has it, and waits for Python's lock: it gets a processor for that again and again."""
    link.silent()
    turns = iter(range(1000))
    monkeypatch.setattr(channel, "turns_of", lambda _thread: next(turns))
    assert not any(link.hangs_after(LOOK_SECONDS) for _ in range(8))
    monkeypatch.setattr(channel, "turns_of", lambda _thread: 1000)
    assert any(link.hangs_after(LOOK_SECONDS) for _ in range(4))


def test_signs_that_wait_to_be_read_are_signs_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, release = threading.Event(), threading.Event()

    def receive(_message: Message) -> None:
        taken.set()
        release.wait()

    link = Link(monkeypatch, receive)
    with link.there:
        try:
            link.there.sendall(frame_of(Beat()))
            assert taken.wait(HANG_SECONDS)  # it is being received, by a thread that goes on
            link.there.sendall(frame_of(Beat()))
            assert not any(link.hangs_after(LOOK_SECONDS) for _ in range(30))
            assert link.worker._silence._seconds < LIMIT / 2
        finally:
            release.set()


def test_a_part_of_a_long_frame_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """A video takes seconds to come from another machine, and nothing else can come meanwhile."""
    messages: list[Message] = []
    frame = frame_of(Chunks("talker", (1,), (StageChunk("a", "talker", TokenChunk((1, 2), "text")),)))
    link = Link(monkeypatch, messages.append)
    with link.there:
        for part in (frame[:30], frame[30:-1]):
            link.worker.heard = 0.0
            link.there.sendall(part)
            eventually(lambda: link.worker.heard > 0.0)
            assert not messages
        link.there.sendall(frame[-1:])
        eventually(lambda: len(messages) == 1)
