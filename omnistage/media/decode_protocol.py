"""What a service and the processes that decode its media say to each other: lines of JSON.

Encoded items and decoded pixels, frames and samples travel beside them, through two files in memory.
"""

from __future__ import annotations

import os
import tempfile
from io import FileIO
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, TypeAdapter

from omnistage.media.limits import MediaLimits

MAX_LINE_BYTES = 64 * 1024


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ImageJob(_Message):
    kind: Literal["image"] = "image"


class AudioJob(_Message):
    kind: Literal["audio"] = "audio"
    target_rate: int | None


class VideoJob(_Message):
    kind: Literal["video"] = "video"
    fps: float
    min_frames: int
    max_frames: int | None
    with_audio: bool
    audio_rate: int
    max_audio_seconds: float


Job = ImageJob | AudioJob | VideoJob


class Task(_Message):
    """One item to decode: `size` bytes of the input file.

    Where it would take more than `max_decoded` bytes once decoded, it is not, and a `SizeAnswer` says how many.
    """

    size: PositiveInt
    max_decoded: int | None
    limits: MediaLimits
    job: Annotated[Job, Field(discriminator="kind")]


class ImageAnswer(_Message):
    """The output file holds RGB pixels, 3 bytes each, from `offset` on."""

    answer: Literal["image"] = "image"
    width: PositiveInt
    height: PositiveInt
    offset: int = Field(ge=0, le=64)


class AudioAnswer(_Message):
    """The output file holds float32 samples."""

    answer: Literal["audio"] = "audio"
    samples: PositiveInt
    rate: PositiveInt


class VideoAnswer(_Message):
    """The output file holds RGB frames, then the samples of the audio."""

    answer: Literal["video"] = "video"
    frames: PositiveInt
    width: PositiveInt
    height: PositiveInt
    fps: float
    seconds: float
    audio: AudioAnswer | None


class SizeAnswer(_Message):
    """The item takes so many bytes once decoded, more than the task allows."""

    answer: Literal["size"] = "size"
    nbytes: PositiveInt


class ErrorAnswer(_Message):
    """An error of `core.errors`, by the name of its class."""

    answer: Literal["error"] = "error"
    error: str
    message: str
    param: str | None


class MemoryAnswer(_Message):
    """The item needed more memory than it may have."""

    answer: Literal["memory"] = "memory"


class DefectAnswer(_Message):
    """An unexpected exception: its type and frames, without its message, which may quote the item."""

    answer: Literal["defect"] = "defect"
    error: str
    frames: str


Decoded = ImageAnswer | AudioAnswer | VideoAnswer
Answer = Decoded | SizeAnswer | ErrorAnswer | MemoryAnswer | DefectAnswer
ANSWERS: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="answer")])


def memory_file() -> FileIO:
    """A file without a name, in memory where the system has such: it is gone with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        return FileIO(os.memfd_create("omnistage-decode"), "r+b")
    with tempfile.TemporaryFile(buffering=0) as file:
        return FileIO(os.dup(file.fileno()), "r+b")


def write_all(file: FileIO, data: memoryview) -> None:
    """Write at the file's position; one call writes 2 GiB at most."""
    while data:
        data = data[file.write(data) :]


def read_all(file: FileIO, buffer: memoryview) -> bool:
    """Fill the buffer from the file's position; False where the file ends before."""
    while buffer:
        count = file.readinto(buffer)
        if not count:
            return False
        buffer = buffer[count:]
    return True
