"""Opening untrusted containers with FFmpeg, through PyAV."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.video.stream import VideoStream

from omnistage.core.errors import MediaError

# FFmpeg has demuxers (concat, hls, dash, ...) whose input names further files and URLs, which it then opens. Only
# formats that contain their media may be probed.
_FORMATS = "mov,mp4,m4a,3gp,matroska,webm,ogg,mp3,aac,flac,wav,w64,aiff,au,amr,avi,asf,flv,mpeg,mpegts,mpegvideo,gif"

# Texts in a file that are not UTF-8 must not make it unreadable; from PyAV 19 on they never do.
_TEXTS: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}


@contextmanager
def open_container(data: bytes, kind: str, *, max_frame_pixels: int) -> Iterator[InputContainer]:
    """Open `data`; whatever FFmpeg cannot read inside the block becomes a `MediaError` about this `kind`.

    `max_frame_pixels` stops probing from allocating a frame larger than that.
    """
    options = {"format_whitelist": _FORMATS, "protocol_whitelist": "", "max_pixels": str(max_frame_pixels)}
    try:
        with av.open(io.BytesIO(data), mode="r", options=options, **_TEXTS) as container:
            yield container
    except MemoryError:  # FFmpeg's own, too: what the file needs is not there
        raise MemoryError from None
    except (av.FFmpegError, IndexError) as error:
        # PyAV itself raises IndexError where a damaged file brings in a new track midway.
        why = error.strerror if isinstance(error, av.FFmpegError) else "its tracks change midway"
        raise MediaError(f"{kind} does not decode ({why}); it may be damaged or not {kind} at all") from error


def check_decoder(stream: AudioStream | VideoStream, kind: str) -> None:
    """Refuse a track of an unknown codec, for which PyAV's codec context is None, whatever its types say."""
    context: object = stream.codec_context
    if context is None:
        raise MediaError(f"{kind} has a track of an unknown codec; encode it again with a common one")
