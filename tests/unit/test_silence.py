"""A process that is silent because others have the processors is told from one that hangs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from omnistage.core.types import StageChunk, TokenChunk
from omnistage.placement import silence
from omnistage.placement.messages import Beat, Chunks, Message
from omnistage.placement.silence import BUSY_FACTOR, Silence, processor_waits
from omnistage.placement.worker_process import Worker
from tests.unit.placement_harness import eventually
from tests.unit.test_hostile_frames import frame_of

_SPIN = "import os; os.sched_setaffinity(0, {%d})\nprint(flush=True)\nwhile True: pass"

needs_schedstat = pytest.mark.skipif(not processor_waits(os.getpid()), reason="this system does not count waits")


def spin(number: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", _SPIN % number], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.fixture
def crowded() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Four processes that share a processor."""
    number = min(os.sched_getaffinity(0))
    processes = [spin(number) for _ in range(4)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@needs_schedstat
def test_time_that_is_waited_for_a_processor_does_not_count_and_that_of_a_stopped_process_does(
    crowded: list[subprocess.Popen[bytes]],
) -> None:
    first, second, *_ = crowded

    def waited(process: subprocess.Popen[bytes]) -> float:
        return sum(processor_waits(process.pid).values())

    def let_wait(process: subprocess.Popen[bytes], seconds: float) -> None:
        before = waited(process)
        eventually(lambda: waited(process) > before + seconds)

    let_wait(first, 0.3)
    os.kill(first.pid, signal.SIGSTOP)
    os.waitpid(first.pid, os.WUNTRACED)  # it has stopped
    before = waited(first)
    let_wait(second, 0.3)
    assert waited(first) == before


def test_a_silence_is_counted_less_what_the_threads_have_waited_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = {1: 7.0, 2: 3.0}
    monkeypatch.setattr(silence, "processor_waits", lambda _pid: dict(waits))
    process = Silence(5)
    assert process.unexplained(last_sign=0.0, silent=1.0) == 1.0
    waits.update({1: 8.5, 2: 3.25, 3: 100.0})  # the third is new
    assert process.unexplained(last_sign=0.0, silent=2.5) == 0.75
    waits[1] = 20.0
    assert process.unexplained(last_sign=0.0, silent=2.0 * BUSY_FACTOR) == 2.0  # not for ever
    assert process.unexplained(last_sign=30.0, silent=2.0) == 2.0  # what was waited before it was heard is past


def test_without_such_counts_the_whole_silence_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Silence(None).unexplained(0.0, 2.5) == 2.5
    monkeypatch.setattr(silence, "processor_waits", lambda _pid: {})
    assert Silence(5).unexplained(0.0, 2.5) == 2.5
    monkeypatch.undo()
    assert processor_waits(2**30) == {}


def test_a_sign_of_life_that_could_not_be_read_yet_is_one_but_not_for_ever() -> None:
    release = threading.Event()
    host, there = host_and_peer()
    with there:
        worker = Worker("w", host, lambda _worker, _message: release.wait(), lambda _worker: None)
        try:
            there.sendall(frame_of(Beat()))
            eventually(lambda: not worker._channel.has_unread())  # it is being received
            assert worker.unexplained_silence(3.0) == 3.0
            there.sendall(frame_of(Beat()))
            assert worker.unexplained_silence(3.0) == 3.0 / BUSY_FACTOR
        finally:
            release.set()
    eventually(lambda: not worker._channel.has_unread())  # nor once it is closed


def host_and_peer() -> tuple[Any, socket.socket]:
    """What a worker's process is to the service, without one; and the worker's end."""
    here, there = socket.socketpair()
    return SimpleNamespace(socket=here, pid=2**30, kill=lambda: None, wait=lambda _seconds: 0), there


def test_a_part_of_a_long_frame_is_a_sign_of_life() -> None:
    """A video takes seconds to come from another machine, and nothing else can come meanwhile."""
    messages: list[Message] = []
    frame = frame_of(Chunks("talker", (1,), (StageChunk("a", "talker", TokenChunk((1, 2), "text")),)))
    host, there = host_and_peer()
    with there:
        worker = Worker("w", host, lambda _worker, message: messages.append(message), lambda _worker: None)
        for part in (frame[:30], frame[30:-1]):
            worker.heard = 0.0
            there.sendall(part)
            eventually(lambda: worker.heard > 0.0)
            assert not messages
        there.sendall(frame[-1:])
        eventually(lambda: len(messages) == 1)
