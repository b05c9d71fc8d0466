"""Streamed text to sentences, each to be spoken as soon as it is complete."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from omnistage.core.errors import ConfigError

MAX_PIECE_CHARACTERS: Final = 280
"""A voice that takes about 400 phonemes at once takes about as many characters."""

_INNER = """mr mrs ms dr prof st mt ft gen gov sen rep capt lt col sgt cmdr rev hon pres supt cpl maj adm msgr messrs
    mme vs approx vol fig figs ch pp eds nos eq dept univ assn cf viz ca jan feb apr jul aug sep sept oct nov dec tue
    tues thu thur thurs"""
_OUTER = "jr sr est ed no sec al etc inc ltd corp co bros fr mar jun mon wed fri sat sun"
_ABBREVIATIONS = dict.fromkeys(_INNER.split(), False) | dict.fromkeys(_OUTER.split(), True)
"""Abbreviations with a full stop, and whether they may end a sentence: they do before a capital letter."""
_OPENERS, _CLOSERS = "\"'\u201c\u2018([{*_`", "\"'\u201d\u2019)]}*_`"
_LIST_MARK = re.compile(r"\s*(?:[-*+•]|\(?\d{1,3}[.)]|\(?[A-Za-z][.)])\s*")
_DOTTED = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")
"""Initials and similar abbreviations: J, U.S, e.g, p.m (without the last full stop)."""
_CLAUSE_ENDS = (",", ";", ":", "—", "\u2013", " -", " --")
_FULL_WIDTH_ENDS = ("\u3002", "\uff01", "\uff1f")
"""Ends of sentences that no white space follows."""
_FULL_WIDTH_CLOSERS = "\u3002\uff01\uff1f\u201d\u2019\u300d\u300f\uff09"
_FENCE = "```"
_JOINING = frozenset(("and", "or", "nor"))


@dataclass(frozen=True, slots=True)
class Sentences:
    """Splits streamed text into pieces to speak, each as soon as it is complete: a pure fold.

    A piece ends with its sentence or its line. So that audio starts early, the first one may end at a comma, a dash, a
    colon or a semicolon once it has `first_words` words (None: it may not). No piece has more than `max_characters`.
    The result does not depend on how the text is chunked, and only words of code blocks are dropped, if `drop_code`.
    """

    first_words: int | None = 5
    max_characters: int = MAX_PIECE_CHARACTERS
    drop_code: bool = True
    _rest: str = ""
    _started: bool = False
    """Whether a piece was emitted."""
    _code: bool = False
    """Whether this is inside a code block, which is not spoken."""
    _clause: int = 0
    """Where in `_rest` the first piece could end, once the next word is known; 0: nowhere."""

    def __post_init__(self) -> None:
        if self.max_characters < 2:
            raise ConfigError(f"max_characters is {self.max_characters}; set 2 or more")

    def push(self, text: str) -> tuple[Sentences, tuple[str, ...]]:
        """The state after `text`, and the pieces that it completes."""
        state, pieces = self, []
        for character in text:
            state, piece = state._write(character)
            if piece:
                pieces.append(piece)
        return state, tuple(pieces)

    def finish(self) -> tuple[str, ...]:
        """The last piece, at the end of the text."""
        rest = "" if self._is_code else self._rest.strip()
        return (rest,) if rest else ()

    def _write(self, new: str) -> tuple[Sentences, str]:
        """One character. Only the text before it decides, so that chunks do not matter."""
        if self._is_code:
            return self._write_code(new), ""
        rest, cut, clause = self._rest, 0, self._clause
        if new == "\n":
            cut = 0 if _LIST_MARK.fullmatch(rest) else len(rest)
        elif new.isspace():
            if clause and len(rest) > clause and not rest[-1].isspace():
                word = rest[clause:]
                # "red, blue, and green": a comma of a list is no place for a pause.
                if not (word.endswith(",") or word.lower() in _JOINING):
                    cut = clause
                clause = 0
        elif rest and (rest[-1].isspace() or rest[-1] == "—"):
            if _ends_sentence(rest, new):
                cut = len(rest)
            elif self._may_end_clause(rest, new):
                clause = len(rest)
        if rest.endswith(_FULL_WIDTH_ENDS) and new not in _FULL_WIDTH_CLOSERS:
            cut = len(rest)
        if not cut and len(rest) == self.max_characters:
            cut = split_point(rest)
        piece = rest[:cut].strip()
        rest = rest[cut:] + new
        if not rest.strip():
            rest = ""  # drop white space between pieces
        started = self._started or bool(piece)
        code = new == "\n" and _opens(self._rest)
        return replace(self, _rest=rest, _started=started, _code=code, _clause=0 if cut else clause), piece

    @property
    def _is_code(self) -> bool:
        return self.drop_code and (self._code or self._rest.lstrip().startswith(_FENCE))

    def _write_code(self, new: str) -> Sentences:
        """A character of a code block, or of a line that begins or ends one."""
        if new != "\n":
            # Only the beginning of the line matters at its end.
            return self if len(self._rest) == self.max_characters else replace(self, _rest=self._rest + new)
        return replace(self, _rest="", _code=self._code != _opens(self._rest), _clause=0)

    def _may_end_clause(self, rest: str, new: str) -> bool:
        if self.first_words is None or self._started or new.isdigit():
            return False
        text = rest.rstrip()
        return text.endswith(_CLAUSE_ENDS) and len(re.findall(r"\w[\w'\u2019.-]*", text)) >= self.first_words


def _opens(line: str) -> bool:
    """Whether a line begins a code block that does not end on it, or ends one."""
    return line.count(_FENCE) % 2 == 1


def _ends_sentence(rest: str, new: str) -> bool:
    """Whether the sentence ends with `rest`, where `new` follows it after white space."""
    text = rest.rstrip()
    bare = text.rstrip(_CLOSERS)
    if not bare.endswith((".", "!", "?", "…")) or new.islower() or new in ".,;:!?…)]}%":
        return False
    if bare.endswith(("..", "…", ". .")):
        return new != "I"  # "well... I" continues; any other capital begins a sentence
    if not bare.endswith("."):
        return True
    if _LIST_MARK.fullmatch(text):
        return False
    *before, last = bare[:-1].split() or [""]
    word = last.lstrip(_OPENERS)
    if word.isdecimal():
        # "1. Wash 2. Dry": where a list began with a number, the next numbers begin its items.
        return not (len(word) < 3 and re.match(r"\s*\(?\d{1,2}[.)]\s", rest))
    if _DOTTED.fullmatch(word):
        return word == "I" and bool(before) and before[-1].islower()  # "so am I."
    return _ABBREVIATIONS.get(word.lower(), True) and not (word.lower() in _ABBREVIATIONS and new.isdigit())


def split_point(rest: str) -> int:
    """Where to split a piece of maximal length: after a clause, else after a word, else at its end."""
    for matches in (re.finditer(r"[,;:—\u2013]\s+", rest), re.finditer(r"\s+", rest)):
        ends = [match.end() for match in matches if match.end() > len(rest) // 2]
        if ends:
            return ends[-1]
    return len(rest)
