"""A process that decodes media, one item after the other: `python -m omnistage.media.decode_worker INPUT OUTPUT`.

It is started by `decode_process`, reads tasks from its standard input and answers on its standard output. `INPUT` and
`OUTPUT` are the file descriptors of the two files that items and results go through.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import select
import signal
import sys
import threading
import traceback
from contextlib import suppress
from io import FileIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageFile

from omnistage.core.clips import AudioClip
from omnistage.core.errors import OmniError
from omnistage.media import decode_protocol as protocol
from omnistage.media.audio import decode_audio_bytes
from omnistage.media.image import decode_image_bytes
from omnistage.media.video import decode_video_bytes

_MAX_OPEN_FILES = 64
_WRITE_BYTES = 2**20
_NICENESS = 5
"""On busy cores the service itself has three times the share of such a process."""
_STATM = Path("/proc/self/statm")


def main(arguments: list[str]) -> None:
    source, target = (FileIO(int(descriptor), "r+b") for descriptor in arguments)
    tasks, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    ImageFile.MAXBLOCK = _WRITE_BYTES
    _restrict()
    _end_with_parent(tasks.fileno())
    base = _address_space()
    while line := tasks.readline():
        task = protocol.Task.model_validate_json(line)
        _limit_item(task, base)
        answers.write(_answer(task, source, target).model_dump_json().encode() + b"\n")
        answers.flush()


def _restrict() -> None:
    """Give up what decoding does not need."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to whole groups: the service decides
        signal.signal(name, signal.SIG_IGN)
    with open(os.devnull, "r+b") as null:  # libraries write about the items to their standard error
        for descriptor in (0, 1, 2):
            os.dup2(null.fileno(), descriptor)
    os.nice(_NICENESS)
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_NOFILE, _MAX_OPEN_FILES)


def _end_with_parent(descriptor: int) -> None:
    """End at once when nobody holds the other end of this pipe any longer; the main thread may be decoding then."""

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, 0)  # only that it was closed
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _limit_item(task: protocol.Task, base: int | None) -> None:
    """What the next item may use; time and memory of those before it are not its own."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = usage.ru_utime + usage.ru_stime + task.limits.decode_seconds(task.job.kind)
    _set_limit(resource.RLIMIT_CPU, math.ceil(seconds))
    _set_limit(resource.RLIMIT_FSIZE, task.limits.max_decode_memory)
    if base is not None:
        _set_limit(resource.RLIMIT_AS, base + task.limits.max_decode_memory)


def _set_limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    with suppress(ValueError, OSError):  # macOS takes not all of them
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _address_space() -> int | None:
    """Bytes of address space in use, where the system says so and limits it."""
    if not _STATM.exists():
        return None
    return int(_STATM.read_text().split()[0]) * resource.getpagesize()


class _TooLargeError(Exception):
    """The item takes more bytes than the task allows."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


def _answer(task: protocol.Task, source: FileIO, target: FileIO) -> protocol.Answer:
    """Decode an item into the output file."""
    try:
        data = bytearray(task.size)
        source.seek(0)
        if not protocol.read_all(source, memoryview(data)):
            raise EOFError("the input file is shorter than its item")
        target.seek(0)
        return _decode(task, bytes(data), target)
    except OmniError as error:
        return protocol.ErrorAnswer(error=type(error).__name__, message=error.message, param=error.param)
    except _TooLargeError as error:
        return protocol.SizeAnswer(nbytes=error.nbytes)
    except MemoryError:
        return protocol.MemoryAnswer()
    except Exception as error:  # the boundary of the process: whatever a library raises ends this item only
        if isinstance(error, OSError) and error.errno == errno.EFBIG:  # of the output file
            return protocol.MemoryAnswer()
        return protocol.DefectAnswer(
            error=type(error).__name__, frames="".join(traceback.format_tb(error.__traceback__))
        )


def _decode(task: protocol.Task, data: bytes, target: FileIO) -> protocol.Decoded:
    job, limits = task.job, task.limits

    def need(nbytes: int) -> None:
        if task.max_decoded is not None and nbytes > task.max_decoded:
            raise _TooLargeError(nbytes)

    if isinstance(job, protocol.ImageJob):
        return _write_image(decode_image_bytes(data, limits, need, copy=False), target)
    if isinstance(job, protocol.AudioJob):
        return _write_audio(decode_audio_bytes(data, limits, job.target_rate, need), target)
    clip = decode_video_bytes(data, limits, job, need)
    frames, height, width, _ = clip.frames.shape
    protocol.write_all(target, np.ascontiguousarray(clip.frames).data.cast("B"))
    audio = None if clip.audio is None else _write_audio(clip.audio, target)
    return protocol.VideoAnswer(
        frames=frames, width=width, height=height, fps=clip.fps, seconds=clip.seconds, audio=audio
    )


def _write_image(image: Image.Image, target: FileIO) -> protocol.ImageAnswer:
    """As PPM, which is a short header and then the pixels: Pillow writes it to the file without another copy."""
    try:
        image.save(target, "PPM")
    except OSError:  # over the limit on the file's size
        raise MemoryError from None
    return protocol.ImageAnswer(
        width=image.width, height=image.height, offset=target.tell() - 3 * image.width * image.height
    )


def _write_audio(clip: AudioClip, target: FileIO) -> protocol.AudioAnswer:
    protocol.write_all(target, np.ascontiguousarray(clip.samples).data.cast("B"))
    return protocol.AudioAnswer(samples=len(clip.samples), rate=clip.sample_rate)


if __name__ == "__main__":
    main(sys.argv[1:])
