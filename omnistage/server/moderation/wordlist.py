"""An example of a content filter: a list of words and phrases, found in any spelling and across chunks."""

from __future__ import annotations

import asyncio
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path

from omnistage.core.errors import ConfigError
from omnistage.server.moderation.filters import (
    AnswerText,
    FilterContext,
    Pass,
    PassingFilter,
    PromptText,
    Redact,
    Refuse,
    RequestFilter,
    Verdict,
)

MAX_WORDS = 100_000
MAX_WORD_CHARS = 200
MAX_HELD_CHARS = 4096
"""Held back unchanged; words are far shorter, so the rest is whitespace and invisible characters."""


def _invisible() -> str:
    """Invisible characters, as a regular expression's character class: a word reads the same with them.

    Format and control characters, variation selectors and other default-ignorable code points, which `unicodedata`
    does not know.
    """
    whitespace = "\t\n\v\f\r\x85"
    invisible = (character for character in map(chr, range(0xE0000)) if unicodedata.category(character) in ("Cf", "Cc"))
    escaped = "".join(re.escape(character) for character in invisible if character not in whitespace)
    return (
        escaped + "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8\ufffc"
        "\U000e0000-\U000e0fff"
    )


_CLASS = _invisible()
_INVISIBLE = re.compile(f"[{_CLASS}]+")
_WHITESPACE = re.compile(r"\s+")
_VISIBLE = re.compile(rf"(?![{_CLASS}])(?:\s[\s{_CLASS}]*|\S)")
"""One character that `squeezed` keeps, with the whitespace and invisible characters that it replaces."""


def squeezed(text: str) -> str:
    """Without invisible characters, and with one space for any whitespace."""
    return _WHITESPACE.sub(" ", _INVISIBLE.sub("", text))


def normalised(text: str) -> str:
    """Equal for texts that read the same: squeezed, in compatible Unicode form and case-folded."""
    folded = unicodedata.normalize("NFKC", squeezed(text)).casefold()
    return _WHITESPACE.sub(" ", unicodedata.normalize("NFKC", folded))


def _decomposed(text: str) -> str:
    """Decomposed, so that a combining mark that follows does not change what is already there."""
    return unicodedata.normalize("NFD", normalised(text))


def _in_word(character: str) -> bool:
    """Whether a character is part of a word: letters, digits and marks."""
    return unicodedata.category(character)[0] in "LNM" or character == "_"


class WordList:
    """`wordlist:FILE`: one word or phrase a line, `#` begins a comment.

    Entries match whole words; `*` at the beginning or end lets a word continue there, which scripts without spaces
    need. A match in a prompt refuses it; a match in an output ends it.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._words: dict[str, tuple[bool, bool]] = {}
        """Whether a word may continue to the left, and to the right."""
        for word in words:
            text, before, after = _entry(word)
            marks = self._words.get(text, (False, False))
            self._words[text] = (marks[0] or before, marks[1] or after)
        self._words.pop("", None)
        self._lengths: dict[str, tuple[int, ...]] = {}
        """Lengths of the words that begin with a character."""
        for start in {text[0] for text in self._words}:
            self._lengths[start] = tuple({len(text) for text in self._words if text[0] == start})
        self._anywhere = any(before for before, _ in self._words.values())
        self._sorted = sorted(map(_decomposed, self._words))
        self._starts = {text[0] for text in self._sorted}
        self.max_span = 4 * max((len(text) for text in self._words), default=0) + 64
        """Squeezed characters before a text that may belong to a word ending in it, marks included."""

    @classmethod
    def from_argument(cls, argument: str | None) -> WordList:
        if argument is None:
            raise ConfigError("wordlist needs a file; give wordlist:FILE", param="--content-filter")
        try:
            lines = Path(argument).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {argument}: {error}", param="--content-filter") from error
        if len(lines) > MAX_WORDS:
            raise ConfigError(f"{argument} has over {MAX_WORDS} lines; shorten it", param="--content-filter")
        words = cls(line.partition("#")[0] for line in lines)
        if not words._words:
            raise ConfigError(f"{argument} has no words; write one per line", param="--content-filter")
        return words

    def open(self, context: FilterContext) -> RequestFilter:
        return _RequestFilter(self)

    def finds(self, text: str, *, started: bool = True, ended: bool = True) -> bool:
        """Whether a text contains one of the words.

        A word at the very start counts only if the text has `started` there, and is not the end of a longer one; a word
        at the very end only if the text has `ended`.
        """
        text = normalised(text)
        inside = not started
        for start, character in enumerate(text):
            if (not inside or self._anywhere) and character in self._lengths:
                for length in self._lengths[character]:
                    if self._matches(text, start, start + length, inside, ended):
                        return True
            inside = _in_word(character)
        return False

    def _matches(self, text: str, start: int, end: int, inside: bool, ended: bool) -> bool:
        sides = self._words.get(text[start:end])
        if sides is None or end > len(text):
            return False
        before, after = sides
        if inside and not before:
            return False
        return after or (ended if end == len(text) else not _in_word(text[end]))

    def hold(self, text: str) -> int:
        """How many characters at the end of a text may be the beginning of a word that is not complete yet."""
        visible = squeezed(text)
        positions = [match.start() for match in _VISIBLE.finditer(text)]
        for index in range(max(0, len(visible) - self.max_span), len(visible)):
            first = _decomposed(visible[index])
            offsets = [offset for offset, character in enumerate(first) if character in self._starts]
            if offsets and any(self._is_prefix(_decomposed(visible[index:])[offset:]) for offset in offsets):
                return len(text) - positions[index]
        return 0

    def _is_prefix(self, text: str) -> bool:
        index = bisect_left(self._sorted, text)
        return index < len(self._sorted) and self._sorted[index].startswith(text)


def _entry(line: str) -> tuple[str, bool, bool]:
    line = line.strip()
    text = normalised(line.strip("*")).strip()
    if len(text) > MAX_WORD_CHARS:
        raise ConfigError(f"a word has over {MAX_WORD_CHARS} characters; shorten it", param="--content-filter")
    return text, line.startswith("*"), line.endswith("*")


class _RequestFilter(PassingFilter):
    def __init__(self, words: WordList) -> None:
        self._words = words
        self._tails: dict[int, str] = {}
        """The end of the released text of each output, squeezed."""

    async def check_prompt(self, texts: tuple[PromptText, ...]) -> Verdict:
        # In a thread: prompts may be long.
        flagged = await asyncio.to_thread(lambda: any(self._words.finds(part.text) for part in texts))
        return Refuse() if flagged else Pass()

    async def check_output(self, answer: AnswerText) -> Verdict:
        words, text, previous = self._words, answer.held, self._tails.get(answer.index, "")
        started = len(previous) < words.max_span
        if words.finds(previous + text, started=started, ended=answer.ended):
            return Refuse()
        hold = 0 if answer.ended else words.hold(text)
        # What is released may not end with a word either: the held text that continues it may never be sent.
        while hold and words.finds(previous + text[:-hold], started=started) and (more := words.hold(text[:-hold])):
            hold += more
        cut = len(text) - hold
        self._tails[answer.index] = squeezed(previous + text[:cut])[-words.max_span :]
        if hold <= MAX_HELD_CHARS:
            return Pass(hold)
        # It reads the same squeezed, and an output of nothing but whitespace must not be held without bound.
        tail = squeezed(text[cut:])
        return Redact(text[:cut] + tail, hold=len(tail))
