"""Transcripts of spoken answers, which a later message may refer to by id instead of repeating them.

The models read their own earlier turns as text, so the transcript is all that is kept, for a while and up to a limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

_KEEP_SECONDS = 3600.0
_MAX_KEPT = 1000


class SpokenAnswers:
    """Transcripts by key holder and id; the oldest are dropped first. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._texts: dict[tuple[str, str], tuple[float, str]] = {}
        self._lock = threading.Lock()

    def keep(self, holder: str, audio_id: str, transcript: str) -> int:
        """Keep a transcript; until when, in Unix seconds."""
        expires = self._clock() + _KEEP_SECONDS
        with self._lock:  # answers are built in several threads
            self._texts[holder, audio_id] = (expires, transcript)
            while len(self._texts) > _MAX_KEPT:
                del self._texts[next(iter(self._texts))]
        return int(expires)

    def recalled(self, holder: str, messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
        """`messages` with kept transcripts as their text; unknown ids stay, to be refused."""
        return [self._recalled(holder, message) if "audio" in message else message for message in messages]

    def _recalled(self, holder: str, message: Mapping[str, object]) -> Mapping[str, object]:
        audio = message["audio"]
        audio_id = audio.get("id") if isinstance(audio, Mapping) else None
        if message.get("role") != "assistant" or not isinstance(audio_id, str):
            return message
        entry = self._texts.get((holder, audio_id))
        if entry is None or entry[0] < self._clock():
            return message
        rest = {key: value for key, value in message.items() if key != "audio"}
        return rest if rest.get("content") else {**rest, "content": entry[1]}
