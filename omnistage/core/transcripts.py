"""Speech that is written down: what is asked for, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TranscriptionOptions:
    """How speech is to be written down."""

    language: str | None = None
    """A code such as `en`; None: the model's choice, or what it detects."""
    translate: bool = False
    """Into English."""
    prompt: str = ""
    """Text that may help with names and spelling."""
    timestamps: bool = False
    """Of segments."""
    words: bool = False
    """Times of words, too."""
    stream: bool = False
    """Emit text while it is generated."""


@dataclass(frozen=True, slots=True)
class TranscriptSegment:
    """What is said between two times of a clip, in seconds."""

    start: float
    end: float
    text: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TranscriptWord:
    """A word, and its times in the clip in seconds."""

    word: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Transcript:
    """Text of a clip: what is new, and with the last chunk all of it, with the times of its segments."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    whole: str | None = None
    """All text; None before the last chunk."""
    language: str = ""
    segments: tuple[TranscriptSegment, ...] = ()
    words: tuple[TranscriptWord, ...] = ()
    seconds: float = 0.0
    """Of the clip."""
