"""Transcripts as subtitles."""

from __future__ import annotations

from collections.abc import Sequence

from omnistage.core.transcripts import TranscriptSegment


def as_srt(segments: Sequence[TranscriptSegment]) -> str:
    blocks = [
        f"{number}\n{_time(one.start, ',')} --> {_time(one.end, ',')}\n{_line(one.text)}\n"
        for number, one in enumerate(segments, start=1)
    ]
    return "\n".join(blocks)


def as_vtt(segments: Sequence[TranscriptSegment]) -> str:
    blocks = [f"{_time(one.start, '.')} --> {_time(one.end, '.')}\n{_line(one.text)}\n" for one in segments]
    return "\n".join(["WEBVTT\n", *blocks])


def _time(seconds: float, point: str) -> str:
    thousandths = round(seconds * 1000)
    hours, rest = divmod(thousandths, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"


def _line(text: str) -> str:
    """On one line: an empty one would end the block, and an arrow would begin another."""
    return " ".join(text.replace("-->", "->").split())
