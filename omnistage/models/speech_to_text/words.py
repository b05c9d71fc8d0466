"""Words and their times, from tokens and theirs."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace

from omnistage.core.transcripts import TranscriptWord

_INCOMPLETE = "\ufffd"
_UNSPACED = frozenset(("zh", "ja", "th", "lo", "my", "yue"))
"""Languages that are written without spaces: a word is a character there."""


def split_words(
    ids: Sequence[int], times: Sequence[float], decode: Callable[[Sequence[int]], str], language: str
) -> list[TranscriptWord]:
    """The words of one segment. A token is said from its own time to that of the next; punctuation joins a word."""
    words: list[TranscriptWord] = []
    pending: list[int] = []
    start = 0.0
    for place, token in enumerate(ids):
        start = start if pending else times[place]
        pending.append(token)
        text = decode(pending)
        if text.endswith(_INCOMPLETE) and place + 1 < len(ids):
            continue  # a part of a character
        pending = []
        if not text:  # a timestamp
            continue
        end = times[min(place + 1, len(ids) - 1)]
        begins = not words or language in _UNSPACED or text.startswith(" ")
        if words and (not begins or _is_punctuation(text)):
            words[-1] = replace(words[-1], word=words[-1].word + text, end=end)
        else:
            words.append(TranscriptWord(text, start, end))
    return [replace(word, word=word.word.strip()) for word in words if word.word.strip()]


def _is_punctuation(text: str) -> bool:
    return all(unicodedata.category(character).startswith("P") for character in text.strip()) and bool(text.strip())
