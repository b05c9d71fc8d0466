"""Processes that decode media for a service, so that a slow or broken item can be ended and counted.

An item gets processor time and memory by its limits. Past them, when its decoder crashes, when its request is cancelled
or its deadline passes, its process is killed, and a new one is started for the next item.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from PIL import Image

from omnistage.core.cancellation import Cancellation, current_cancellation
from omnistage.core.clips import AudioClip, VideoClip
from omnistage.core.errors import (
    InvalidRequestError,
    LimitExceededError,
    MediaError,
    OmniError,
    OverloadedError,
    ShutdownError,
)
from omnistage.media import decode_protocol as protocol
from omnistage.media.budget import ItemBytes
from omnistage.media.context import current_owner
from omnistage.media.decode_process import DecodeProcess, ProcessEndedError
from omnistage.media.limits import MIB, MediaKind, MediaLimits

_WALL_FACTOR, _WALL_SECONDS = 4.0, 30.0
"""Time on the clock: for a process that starts, waits for the processor or does nothing."""
_CLOSE_SECONDS = 2.0
_MAX_TRIES = 4
"""For one item whose size turns out larger than its header says, or whose process ends before it begins."""
_RETRY_SECONDS = 0.25
FREE_MEMORY = 1024 * MIB
"""That decoding an item may take without a budget; beyond it, it is decoded again with what it can reserve there."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC)
_STRIP_BYTES = 8 * 2**20
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)
_ERRORS = {cls.__name__: cls for cls in (InvalidRequestError, MediaError, LimitExceededError)}


def default_processes() -> int:
    """How many a service has unless told otherwise: one for each core, 2 to 16; none where they cannot be started."""
    return min(max(os.cpu_count() or 2, 2), 16) if os.name == "posix" else 0


class DecodePool:
    """Up to `processes` processes, started as they are needed. Thread-safe.

    Items wait for a process in the order in which they came, and can be cancelled there too. Those of one owner, set by
    `decode_for`, have at most half of the processes at a time: no owner keeps all others waiting.
    """

    def __init__(self, processes: int) -> None:
        if processes < 1:
            raise ValueError("a pool needs at least one process")
        self._max_running = processes
        self._max_owned = max(processes // 2, 1)
        self._changed = threading.Condition()
        self._waiting: list[_Turn] = []
        self._running: list[_Turn] = []
        self._idle: list[DecodeProcess] = []
        self._busy: set[DecodeProcess] = set()
        self._closed = False

    def decode_image(self, data: bytes, limits: MediaLimits, item: ItemBytes) -> Image.Image:
        """As `decode_image_bytes` does."""
        return self._decode(protocol.ImageJob(), data, limits, item, partial(_read_image, limits.max_image_pixels))

    def decode_audio(self, data: bytes, limits: MediaLimits, target_rate: int | None, item: ItemBytes) -> AudioClip:
        """As `decode_audio_bytes` does."""
        return self._decode(protocol.AudioJob(target_rate=target_rate), data, limits, item, _read_audio)

    def decode_video(self, data: bytes, limits: MediaLimits, job: protocol.VideoJob, item: ItemBytes) -> VideoClip:
        """As `decode_video_bytes` does."""
        return self._decode(job, data, limits, item, _read_video)

    def start_process(self) -> None:
        """Start a process ahead of the first item, which would wait for it."""
        process = DecodeProcess()
        with self._changed:
            if not self._closed:
                self._idle.append(process)
                return
        process.close()

    def close(self) -> None:
        """End all processes and whatever they decode; what waits for one fails."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            for process in self._busy:
                process.kill()
            self._changed.notify_all()
        for process in idle:
            process.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._running, timeout=_CLOSE_SECONDS)

    def processes(self) -> list[int]:
        """The ids of its processes."""
        with self._changed:
            return [process.pid for process in (*self._idle, *self._busy)]

    def _decode(
        self,
        job: protocol.Job,
        data: bytes,
        limits: MediaLimits,
        item: ItemBytes,
        collect: Callable[[protocol.Answer, DecodeProcess], _Result],
    ) -> _Result:
        """Decode an item with the memory that is reserved for it, and again with more where it needs that.

        Nobody waits for memory while it has a process.
        """
        max_decoded, memory = item.begin(), limits.max_decode_memory
        if max_decoded is not None:
            memory = min(memory, FREE_MEMORY)
        for _ in range(_MAX_TRIES):
            bounds = limits.model_copy(update={"max_decode_memory": memory})
            task = protocol.Task(size=len(data), limits=bounds, job=job, max_decoded=max_decoded)
            try:
                result = self._run(task, data, collect)
            except _NotBegunError:
                continue
            except _MemoryNeededError:
                before, memory = memory, min(limits.max_decode_memory, item.most)
                if memory <= before:
                    raise _too_large(job.kind, before) from None
                item.reserve(memory)
                continue
            if not isinstance(result, protocol.SizeAnswer):
                return result
            item.need(result.nbytes)
            max_decoded, memory = result.nbytes, min(memory + 3 * result.nbytes, limits.max_decode_memory)
        raise OverloadedError("the processes that decode media end before they begin; send the request again")

    def _run(
        self, task: protocol.Task, data: bytes, collect: Callable[[protocol.Answer, DecodeProcess], _Result]
    ) -> _Result | protocol.SizeAnswer:
        """Have a process decode an item, or say how large it is."""
        cancellation, job, limits = current_cancellation(), task.job, task.limits
        cpu_seconds = limits.decode_seconds(job.kind)
        with self._turn(cancellation), self._process(cancellation) as process:
            remaining, wall_seconds = cancellation.remaining(), _WALL_SECONDS + _WALL_FACTOR * cpu_seconds
            try:
                with cancellation.on_cancel(process.kill):
                    answer = process.decode(
                        task, data, wall_seconds if remaining is None else min(wall_seconds, remaining)
                    )
                    _raise_failure(answer, job.kind)
                    result = answer if isinstance(answer, protocol.SizeAnswer) else collect(answer, process)
            except TimeoutError:
                cancellation.check()
                raise _too_slow(job.kind, cpu_seconds) from None
            except ProcessEndedError as error:
                cancellation.check()
                self._check_open()
                if not error.began:  # somebody killed it, or the system was out of memory: not for this item
                    raise _NotBegunError from None
                raise _why_ended(error.code, job.kind, limits) from None
            return result

    @contextmanager
    def _turn(self, cancellation: Cancellation) -> Iterator[None]:
        """Wait until one more item may be decoded, and count it inside the block."""
        turn = _Turn(current_owner())
        with cancellation.on_cancel(self._wake), self._changed:
            self._waiting.append(turn)
            try:
                while True:
                    cancellation.check()
                    self._check_open()
                    if self._is_next(turn):
                        break
                    self._changed.wait(cancellation.remaining())
                self._running.append(turn)
            finally:
                self._waiting.remove(turn)
        try:
            yield
        finally:
            with self._changed:
                self._running.remove(turn)
                self._changed.notify_all()

    def _is_next(self, turn: _Turn) -> bool:
        if len(self._running) >= self._max_running:
            return False
        counts = Counter(running.owner for running in self._running)
        return turn is next((t for t in self._waiting if t.owner is None or counts[t.owner] < self._max_owned), None)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise ShutdownError("the service is stopping; send the request again")

    @contextmanager
    def _process(self, cancellation: Cancellation) -> Iterator[DecodeProcess]:
        """A process for one item; where the block fails with anything but an answer, it is ended."""
        process, reusable = self._take_process(cancellation), False
        try:
            try:
                yield process
                reusable = True
            except _AnsweredError as error:
                reusable = True
                raise error.take() from None
        finally:
            if reusable:
                process.release()  # without the lock: it takes a while for a large item, and cancelling needs it
            with self._changed:
                self._busy.remove(process)
                # Where it was cancelled just now, it may be killed a moment later.
                reusable = reusable and process.reusable and not (self._closed or cancellation.cancelled)
                if reusable:
                    self._idle.append(process)
            if not reusable:
                process.close()

    def _take_process(self, cancellation: Cancellation) -> DecodeProcess:
        """An idle process, or a new one; where the system gives none, it is asked again for a moment."""
        tries = _MAX_TRIES
        while True:
            with self._changed:
                process = self._idle.pop() if self._idle else None
            if process is not None and not process.reusable:  # it may have been killed while it was idle
                process.close()
                process = None
            try:
                process = process or DecodeProcess()
                break
            except OSError as error:
                tries -= 1
                if error.errno not in _EXHAUSTED:
                    raise
                if not tries:
                    raise OverloadedError(
                        f"no process can be started to decode media ({error.strerror}); send the request again"
                    ) from error
            with self._changed:
                self._changed.wait(_RETRY_SECONDS)
            cancellation.check()
            self._check_open()
        with self._changed:
            self._busy.add(process)
            if self._closed:
                process.kill()
        return process


class _MemoryNeededError(Exception):
    """The item needs more memory than it may have; its process is ended, whatever state that left it in."""


class _NotBegunError(Exception):
    """The process ended before it began with its item."""


@dataclass(eq=False, slots=True)
class _Turn:
    """One item that waits for a process or has one."""

    owner: str | None


class _AnsweredError(Exception):
    """An error that the process itself reported: it can go on."""

    def __init__(self, error: OmniError) -> None:
        super().__init__()  # without the error among its arguments, which `take` could not take away
        self._errors = [error]

    def take(self) -> OmniError:
        """The error, once. It has this one as its context: a cycle would keep the bodies of requests that failed."""
        return self._errors.pop()


def _read_image(max_pixels: int, answer: protocol.Answer, process: DecodeProcess) -> Image.Image:
    """In strips, so that a large one is not there twice."""
    if not isinstance(answer, protocol.ImageAnswer) or answer.width * answer.height > max_pixels:
        raise ProcessEndedError(0)
    width, height = answer.width, answer.height
    rows = max(_STRIP_BYTES // (3 * width), 1)
    if height <= rows:
        return Image.frombytes("RGB", (width, height), process.read(3 * width * height, answer.offset))
    image, skip = Image.new("RGB", (width, height), None), answer.offset
    for top in range(0, height, rows):
        size = (width, min(rows, height - top))
        image.paste(Image.frombytes("RGB", size, process.read(3 * math.prod(size), skip)), (0, top))
        skip = 0
    return image


def _read_audio(answer: protocol.Answer, process: DecodeProcess) -> AudioClip:
    if not isinstance(answer, protocol.AudioAnswer):
        raise ProcessEndedError(0)
    return AudioClip(np.frombuffer(process.read(4 * answer.samples), np.float32), answer.rate)


def _read_video(answer: protocol.Answer, process: DecodeProcess) -> VideoClip:
    if not isinstance(answer, protocol.VideoAnswer):
        raise ProcessEndedError(0)
    shape = (answer.frames, answer.height, answer.width, 3)
    frames = np.frombuffer(process.read(math.prod(shape)), np.uint8).reshape(shape)
    audio = None if answer.audio is None else _read_audio(answer.audio, process)
    return VideoClip(frames, answer.fps, answer.seconds, audio)


def _raise_failure(answer: protocol.Answer, kind: MediaKind) -> None:
    if isinstance(answer, protocol.ErrorAnswer):
        raise _AnsweredError(_ERRORS[answer.error](answer.message, param=answer.param))
    if isinstance(answer, protocol.MemoryAnswer):
        raise _MemoryNeededError
    if isinstance(answer, protocol.DefectAnswer):
        _log.error("decoding a %s failed with %s\n%s", kind, answer.error, answer.frames)
        raise RuntimeError(f"decoding failed with {answer.error}")


def _why_ended(code: int, kind: MediaKind, limits: MediaLimits) -> Exception:
    """The error of an item during which its process ended."""
    if code == -signal.SIGXCPU:
        return _too_slow(kind, limits.decode_seconds(kind))
    if code == -signal.SIGKILL:  # not by us: the system was out of memory
        return _too_large(kind, limits.max_decode_memory)
    if code > 0:
        return RuntimeError(f"the decoding process ended with code {code}")
    return MediaError(f"the decoder crashed on this {kind}; it may be damaged, encode it again")


def _too_slow(kind: MediaKind, seconds: float) -> LimitExceededError:
    return LimitExceededError(
        f"decoding this {kind} takes more than {seconds:g} seconds of processor time, the limit; send a smaller one"
    )


def _too_large(kind: MediaKind, memory: int) -> LimitExceededError:
    return LimitExceededError(
        f"decoding this {kind} takes over {memory} bytes of memory, the limit; send a smaller one"
    )


_active: DecodePool | None = None


def use_decode_pool(pool: DecodePool | None) -> None:
    """Decode encoded media of this process in a pool from now on; None: in the process itself."""
    global _active
    _active = pool


def active_decode_pool() -> DecodePool | None:
    """The pool that media are decoded in, if any."""
    return _active


@contextmanager
def decode_processes(count: int) -> Iterator[DecodePool | None]:
    """Decode media in up to `count` processes inside the block; 0: in this process."""
    if not count:
        yield None
        return
    pool, before = DecodePool(count), active_decode_pool()
    use_decode_pool(pool)
    try:
        yield pool
    finally:
        use_decode_pool(before)
        pool.close()
