"""Spoken answers that a later message may name by their id instead of repeating them.

A model of ours reads its own earlier turns as text, so the transcript is all that is kept, for a while and
up to a bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_SECONDS = 3600.0
_MOST = 1000


class SpokenAnswers:
    """Transcripts by key holder and id, the oldest going first. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._kept: dict[tuple[str, str], tuple[float, str]] = {}

    def keep(self, holder: str, audio_id: str, transcript: str) -> int:
        """Keep a transcript; until when, in Unix seconds."""
        expires = self._clock() + _SECONDS
        self._kept[holder, audio_id] = (expires, transcript)
        while len(self._kept) > _MOST:
            del self._kept[next(iter(self._kept))]
        return int(expires)

    def recalled(self, holder: str, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """`messages` with what is kept of spoken answers as their text; what is not kept stays, to be refused."""
        return [self._recalled(holder, message) for message in messages]

    def _recalled(self, holder: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
        audio = message.get("audio")
        audio_id = audio.get("id") if isinstance(audio, Mapping) else None
        if message.get("role") != "assistant" or not isinstance(audio_id, str):
            return message
        kept = self._kept.get((holder, audio_id))
        if kept is None or kept[0] < self._clock():
            return message
        rest = {key: value for key, value in message.items() if key != "audio"}
        return rest if rest.get("content") else {**rest, "content": kept[1]}
