"""The example of a content filter: words and phrases of a file, found however they are spelled or cut into pieces."""

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

_MOST_WORDS = 100_000
_MOST_CHARS = 200
_MOST_HELD = 4096
"""Characters that are held back as they are; words have far fewer, so the rest are blanks and such as nobody sees."""


def _unseen() -> str:
    """The characters that nobody sees, for a class of a regular expression: with them inside, a word reads the same.

    Format and control characters, variation selectors, and what else Unicode calls default ignorable, of which
    `unicodedata` does not know.
    """
    blanks = "\t\n\v\f\r\x85"
    known = (character for character in map(chr, range(0xE0000)) if unicodedata.category(character) in ("Cf", "Cc"))
    escaped = "".join(re.escape(character) for character in known if character not in blanks)
    return (
        escaped + "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8\ufffc"
        "\U000e0000-\U000e0fff"
    )


_CLASS = _unseen()
_UNSEEN = re.compile(f"[{_CLASS}]+")
_BLANKS = re.compile(r"\s+")
_SEEN = re.compile(rf"(?![{_CLASS}])(?:\s[\s{_CLASS}]*|\S)")
"""One character of what `squeezed` leaves, with the blanks and unseen ones that it stands for."""


def squeezed(text: str) -> str:
    """Without what nobody sees, and with one blank for many."""
    return _BLANKS.sub(" ", _UNSEEN.sub("", text))


def normalised(text: str) -> str:
    """Equal for texts that read the same: compatible forms, upper and lower case, and all blanks are one."""
    folded = unicodedata.normalize("NFKC", squeezed(text)).casefold()
    return _BLANKS.sub(" ", unicodedata.normalize("NFKC", folded))


def _decomposed(text: str) -> str:
    """A mark that follows would change the last letter, but not what it is made of."""
    return unicodedata.normalize("NFD", normalised(text))


def _is_inside(character: str) -> bool:
    """Whether a word goes on over this character: letters, digits and the marks on them."""
    return unicodedata.category(character)[0] in "LNM" or character == "_"


class WordList:
    """`wordlist:FILE`: one word or phrase a line, `#` begins a comment.

    A word is found as a whole word; `*` at its beginning or end lets it go on there, which languages that are
    written without blanks need. What is found in a prompt refuses it; what is found in an answer ends it.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._words: dict[str, tuple[bool, bool]] = {}
        """Whether a word may go on to the left, and to the right."""
        for word in words:
            text, before, after = _entry(word)
            known = self._words.get(text, (False, False))
            self._words[text] = (known[0] or before, known[1] or after)
        self._words.pop("", None)
        self._lengths: dict[str, tuple[int, ...]] = {}
        """How long the words are that begin with a character."""
        for start in {text[0] for text in self._words}:
            self._lengths[start] = tuple({len(text) for text in self._words if text[0] == start})
        self._anywhere = any(before for before, _ in self._words.values())
        self._sorted = sorted(map(_decomposed, self._words))
        self._starts = {text[0] for text in self._sorted}
        self.reach = 4 * max((len(text) for text in self._words), default=0) + 64
        """Characters before a piece of text, squeezed, that may belong to a word which ends in it, marks included."""

    @classmethod
    def from_argument(cls, argument: str | None) -> WordList:
        if argument is None:
            raise ConfigError("wordlist needs a file: wordlist:FILE", param="--content-filter")
        try:
            lines = Path(argument).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the words in {argument}: {error}", param="--content-filter") from error
        if len(lines) > _MOST_WORDS:
            raise ConfigError(f"{argument} has over {_MOST_WORDS} lines; shorten it", param="--content-filter")
        made = cls(line.partition("#")[0] for line in lines)
        if not made._words:
            raise ConfigError(f"{argument} has no words; write one a line", param="--content-filter")
        return made

    def open(self, context: FilterContext) -> RequestFilter:
        return _Reader(self)

    def finds(self, text: str, *, begun: bool = True, ended: bool = True) -> bool:
        """Whether a text holds one of the words.

        A word at its very beginning counts where the text has `begun` there and was not cut out of a longer one, a
        word at its very end where it has `ended`.
        """
        text = normalised(text)
        inside = not begun
        for start, character in enumerate(text):
            if (not inside or self._anywhere) and character in self._lengths:
                for length in self._lengths[character]:
                    if self._stands(text, start, start + length, inside, ended):
                        return True
            inside = _is_inside(character)
        return False

    def _stands(self, text: str, start: int, end: int, inside: bool, ended: bool) -> bool:
        sides = self._words.get(text[start:end])
        if sides is None or end > len(text):
            return False
        before, after = sides
        if inside and not before:
            return False
        return after or (ended if end == len(text) else not _is_inside(text[end]))

    def hold(self, text: str) -> int:
        """How many characters at the end of a text may be the beginning of a word that is not whole yet."""
        seen = squeezed(text)
        places = [found.start() for found in _SEEN.finditer(text)]
        for index in range(max(0, len(seen) - self.reach), len(seen)):
            first = _decomposed(seen[index])
            offsets = [offset for offset, character in enumerate(first) if character in self._starts]
            if offsets and any(self._begins(_decomposed(seen[index:])[offset:]) for offset in offsets):
                return len(text) - places[index]
        return 0

    def _begins(self, beginning: str) -> bool:
        at = bisect_left(self._sorted, beginning)
        return at < len(self._sorted) and self._sorted[at].startswith(beginning)


def _entry(line: str) -> tuple[str, bool, bool]:
    line = line.strip()
    text = normalised(line.strip("*")).strip()
    if len(text) > _MOST_CHARS:
        raise ConfigError(f"a word has over {_MOST_CHARS} characters; shorten it", param="--content-filter")
    return text, line.startswith("*"), line.endswith("*")


class _Reader(PassingFilter):
    def __init__(self, words: WordList) -> None:
        self._words = words
        self._sent: dict[int, str] = {}
        """The end of what was let through of each answer, squeezed."""

    async def check_prompt(self, texts: tuple[PromptText, ...]) -> Verdict:
        # Prompts may be long, and the event loop is everybody's.
        found = await asyncio.to_thread(lambda: any(self._words.finds(part.text) for part in texts))
        return Refuse() if found else Pass()

    async def check_output(self, answer: AnswerText) -> Verdict:
        words, text, sent = self._words, answer.held, self._sent.get(answer.index, "")
        begun = len(sent) < words.reach
        if words.finds(sent + text, begun=begun, ended=answer.ended):
            return Refuse()
        hold = 0 if answer.ended else words.hold(text)
        # Nor may what goes out end with a word: it goes on in what is held, which may never be sent.
        while hold and words.finds(sent + text[:-hold], begun=begun) and (more := words.hold(text[:-hold])):
            hold += more
        cut = len(text) - hold
        self._sent[answer.index] = squeezed(sent + text[:cut])[-words.reach :]
        if hold <= _MOST_HELD:
            return Pass(hold)
        # It reads the same, and an answer of nothing but blanks must not grow here.
        held = squeezed(text[cut:])
        return Redact(text[:cut] + held, hold=len(held))
