"""The starter's voice: text that is still being written to sentences, sentences to sound by the package hibari-tts.

Nothing is downloaded: a voice can be had only where its file is already here.
"""

from __future__ import annotations

import html
import importlib
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from omnistage.core.errors import ConfigError, MissingDependencyError

Samples = NDArray[np.float32]

LONGEST_PIECE: Final = 280
"""Characters spoken at once: the voice was made for about 400 phonemes, and a character is about one."""
_MOST_PHONEMES = 400
_QUIET = 1e-3
"""Below this (-60 dB) there is nothing to hear; the voice's own ends are far below, its softest consonants above."""
_LEAD, _PAUSE, _SHORT_PAUSE = 0.02, 0.14, 0.1
"""Seconds before a piece, after a sentence and after a piece of one. The voice by itself leaves 0.3 and 0.45."""
_FADE = 0.005
"""Seconds in which both ends fade, so that nothing clicks."""

_INNER = """mr mrs ms dr prof st mt ft gen gov sen rep capt lt col sgt cmdr rev hon pres supt cpl maj adm msgr messrs
    mme vs approx vol fig figs ch pp eds nos eq dept univ assn cf viz ca jan feb apr jul aug sep sept oct nov dec tue
    tues thu thur thurs"""
_OUTER = "jr sr est ed no sec al etc inc ltd corp co bros fr mar jun mon wed fri sat sun"
_ABBREVIATIONS = dict.fromkeys(_INNER.split(), False) | dict.fromkeys(_OUTER.split(), True)
"""Words that a full stop follows inside a sentence, and whether they end one too: they do before a capital letter."""
_OPENERS, _CLOSERS = "\"'\u201c\u2018([{*_`", "\"'\u201d\u2019)]}*_`"
_LIST_MARK = re.compile(r"\s*(?:[-*+•]|\(?\d{1,3}[.)]|\(?[A-Za-z][.)])\s*")
_DOTTED = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")
"""Initials and what is written like them: J, U.S, e.g, p.m (the last full stop is not part of it)."""
_CLAUSE_ENDS = (",", ";", ":", "—", "\u2013", " -", " --")
_FENCE = "```"
_JOINING = frozenset(("and", "or", "nor"))


@dataclass(frozen=True, slots=True)
class Sentences:
    """Text as it is written to pieces to speak, each as soon as it is complete: a pure fold.

    A piece ends with its sentence or its line. So that sound starts early, the first one may end at a comma, a dash, a
    colon or a semicolon once it has `first_words` words (None: not). No piece is longer than `longest` characters. How
    the text is cut on its way here changes nothing, and no word is lost but those of blocks of code.
    """

    first_words: int | None = 5
    longest: int = LONGEST_PIECE
    _rest: str = ""
    _started: bool = False
    """Whether a piece went out."""
    _code: bool = False
    """Whether this is inside a block of code, of which nothing is spoken."""
    _clause: int = 0
    """Where in `_rest` the first piece could end, once the word behind is known; 0 where nowhere."""

    def __post_init__(self) -> None:
        if self.longest < 2:
            raise ConfigError(f"a piece of at most {self.longest} characters can hold no word: allow 2 or more")

    def push(self, text: str) -> tuple[Sentences, tuple[str, ...]]:
        """The state with `text` written behind, and the pieces that this completes."""
        folded, pieces = self, []
        for character in text:
            folded, piece = folded._write(character)
            if piece:
                pieces.append(piece)
        return folded, tuple(pieces)

    def finish(self) -> tuple[str, ...]:
        """What is left when no more text comes."""
        rest = "" if self._is_code else self._rest.strip()
        return (rest,) if rest else ()

    def _write(self, new: str) -> tuple[Sentences, str]:
        """One character. Only what is before it decides, so that chunks cannot matter."""
        if self._is_code:
            return self._write_code(new), ""
        rest, cut, clause = self._rest, 0, self._clause
        if new == "\n":
            cut = 0 if _LIST_MARK.fullmatch(rest) else len(rest)
        elif new.isspace():
            if clause and len(rest) > clause and not rest[-1].isspace():
                word = rest[clause:]
                # "red, blue, and green": a comma of a list is no place to breathe.
                if not (word.endswith(",") or word.lower() in _JOINING):
                    cut = clause
                clause = 0
        elif rest and (rest[-1].isspace() or rest[-1] == "—"):
            if _ends_sentence(rest, new):
                cut = len(rest)
            elif self._may_end_clause(rest, new):
                clause = len(rest)
        if not cut and len(rest) == self.longest:
            cut = _forced(rest)
        piece = rest[:cut].strip()
        rest = rest[cut:] + new
        if not rest.strip():
            rest = ""  # the space between pieces counts for nothing
        started = self._started or bool(piece)
        code = new == "\n" and _opens(self._rest)
        return replace(self, _rest=rest, _started=started, _code=code, _clause=0 if cut else clause), piece

    @property
    def _is_code(self) -> bool:
        return self._code or self._rest.lstrip().startswith(_FENCE)

    def _write_code(self, new: str) -> Sentences:
        """A character of a block of code, or of a line that begins or ends one."""
        if new != "\n":
            # How a line begins is all that is asked of it when it ends.
            return self if len(self._rest) == self.longest else replace(self, _rest=self._rest + new)
        return replace(self, _rest="", _code=self._code != _opens(self._rest), _clause=0)

    def _may_end_clause(self, rest: str, new: str) -> bool:
        if self.first_words is None or self._started or new.isdigit():
            return False
        text = rest.rstrip()
        return text.endswith(_CLAUSE_ENDS) and len(re.findall(r"\w[\w'\u2019.-]*", text)) >= self.first_words


def _opens(line: str) -> bool:
    """Whether a line begins a block of code that does not end on it, or ends one."""
    return line.count(_FENCE) % 2 == 1


def _ends_sentence(rest: str, new: str) -> bool:
    """Whether the sentence ends with `rest`, where `new` follows it after white space."""
    text = rest.rstrip()
    bare = text.rstrip(_CLOSERS)
    if not bare.endswith((".", "!", "?", "…")) or new.islower() or new in ".,;:!?…)]}%":
        return False
    if bare.endswith(("..", "…", ". .")):
        return new != "I"  # "well... I" goes on; any other capital begins something
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


def _forced(rest: str) -> int:
    """Where to cut a piece that is as long as it may be: behind a clause, else behind a word, else right at its end."""
    for found in (re.finditer(r"[,;:—\u2013]\s+", rest), re.finditer(r"\s+", rest)):
        ends = [match.end() for match in found if match.end() > len(rest) // 2]
        if ends:
            return ends[-1]
    return len(rest)


_FENCED = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_LINK = re.compile(r"!?\[([^\[\]]*)\]\([^()\s]*(?:\s+\"[^\"]*\")?\)")
_ADDRESS = re.compile(
    r"\b(?:https?://|ftp://)(?:www\.)?([\w.-]*\w)[^\s<>()\[\]]*?(?=[.,;:!?'\"]*(?:[\s<>()\[\]]|$))", re.I
)
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_LINE_MARK = re.compile(r"^[ \t]*(?:#{1,6}(?=[ \t]|$)|>+|[-*+•‣◦](?=[ \t]))[ \t]*", re.MULTILINE)
_NUMBERED = re.compile(r"^[ \t]*\(?(\d{1,3})[.)][ \t]+", re.MULTILINE)
_RULE = re.compile(r"^[ \t]*(?:[-*_=~|:][ \t]*){3,}$", re.MULTILINE)
_MANY_DIGITS = re.compile(r"\d(?:,?\d){15,}")
_REPEATED = re.compile(r"([^\w\s])\1+")
_SPOKEN_MARKS = frozenset(".,;:!?'\"()$£€%&+-=/@°—…")
_PLAINER = {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "—", "\u2015": "—"}
_PLAINER |= {"\u2044": "/", "\u2212": "-", "\u2010": "-", "\u2011": "-"}
_LETTER_OR_DIGIT = re.compile(r"[^\W_]")


def speakable(text: str) -> str:
    """`text` without what is not spoken: markdown's marks, blocks of code, pictures, letters that are not Latin.

    Of a link its label stays, of a bare address its host. Lines stay lines.
    """
    text = unicodedata.normalize("NFKC", html.unescape(text)).replace("\r\n", "\n").replace("…", "...")
    text = _TAG.sub(" ", _LINK.sub(r"\1", _FENCED.sub("\n", text)))
    text = _ADDRESS.sub(lambda found: found[1].replace(".", " dot "), text)
    text = _LINE_MARK.sub("", _RULE.sub("", text))
    text = _NUMBERED.sub(r"\1, ", text)
    text = re.sub(r"(?<=[\w)])[ \t]*\*[ \t]*(?=\d)|(?<=\d)[ \t]+\*[ \t]+(?=\w)", " times ", text)
    text = re.sub(r"[ \t]*\|[ \t]*", ", ", text)
    text = "".join(_spoken(character) for character in text)
    text = _MANY_DIGITS.sub(lambda found: " ".join(found[0].replace(",", "")), text)
    text = _REPEATED.sub(lambda found: "..." if found[1] == "." and len(found[0]) > 2 else found[1], text)
    text = re.sub(r"[ \t]+(?=[.,;:!?])", "", text)
    lines = (" ".join(line.split()).lstrip(" ,;:") for line in text.split("\n"))
    return "\n".join(line for line in lines if _LETTER_OR_DIGIT.search(line))


def _spoken(character: str) -> str:
    """The character, or what stands for it: white space where the voice has no sound for it."""
    if character.isascii():
        kept = character.isalnum() or character in _SPOKEN_MARKS or character == "\n"
        # Marks of emphasis sit against a word: they leave no gap.
        return character if kept else ("" if character in "*`~" else " ")
    if character in _PLAINER:
        return _PLAINER[character]
    if character in _SPOKEN_MARKS:
        return character
    if character.isalpha() and unicodedata.name(character, "").startswith("LATIN"):
        return character
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    return "" if unicodedata.category(character) in ("Cf", "Mn") else " "


class Speaker:
    """Text to speech at 24 kHz, one voice. The same text and seed give the same samples. One call at a time."""

    def __init__(self, threads: int = 1, voice: str | None = None) -> None:
        hibari, registry = _package()
        self.voices = local_voices()
        """The voices whose files are here."""
        self.voice: str = voice or registry.DEFAULT
        if self.voice not in self.voices:
            raise ConfigError(
                f"there is no voice {self.voice!r} here, and none is downloaded: {', '.join(self.voices)}"
            )
        # With the file given by name the package asks no hub for it.
        model = registry.voice_path(self.voice, download_missing=False)
        self._voice = hibari.Hibari(voice=self.voice, model=model, threads=threads)
        self._to_phonemes = self._voice.g2p  # read now: it takes longer than a sentence
        self.sample_rate = int(self._voice.sample_rate)

    def say(self, text: str, *, seed: int = 0, speed: float = 1.0) -> Samples:
        """`text` spoken, with the pause that belongs behind it; no samples where there is nothing to speak.

        `seed` is for the breath in the voice, `speed` 1 its own pace.
        """
        chance = np.random.default_rng(seed)
        spoken = [np.zeros(0, np.float32)]
        for piece in _pieces(speakable(text)):
            whole = piece.rstrip("\"')").endswith((".", "!", "?"))
            phonemes = list(self._phonemes(piece))
            for number, some in enumerate(phonemes, 1):
                sound = self._voice.from_ids(self._voice.ids(some), speed, chance)
                pause = _PAUSE if whole and number == len(phonemes) else _SHORT_PAUSE
                spoken.append(framed(sound, self.sample_rate, pause))
        return np.concatenate(spoken)

    def _phonemes(self, piece: str) -> Iterator[str]:
        """What the voice says for `piece`, in parts that are short enough for it."""
        rest: str
        try:
            rest = self._to_phonemes(piece)
        except (LookupError, ValueError):
            # Its reading of numbers and dates fails on some that are none: the words alone can always be read.
            rest = self._to_phonemes(" ".join(re.findall(r"[A-Za-z']+", piece)))
        while len(rest) > _MOST_PHONEMES:
            cut = _forced(rest[:_MOST_PHONEMES])
            yield rest[:cut]
            rest = rest[cut:]
        if any(character.isalpha() for character in rest):
            yield rest


def _package() -> tuple[Any, Any]:
    """The package hibari and its register of voices."""
    try:
        return importlib.import_module("hibari"), importlib.import_module("hibari.voices")
    except ImportError as error:
        raise MissingDependencyError("speaking needs a voice: pip install 'omnistage[starter]'") from error


def local_voices() -> tuple[str, ...]:
    """Voices whose files are here; the package would fetch the others."""
    _, registry = _package()
    found = []
    for name in registry.VOICES:
        try:
            path = registry.voice_path(name, download_missing=False)
        except FileNotFoundError:
            continue
        if Path(path).is_file():
            found.append(name)
    return tuple(found)


def _pieces(text: str) -> tuple[str, ...]:
    left, pieces = Sentences(first_words=None).push(text)
    return (*pieces, *left.finish())


def framed(sound: Samples, rate: int, pause: float) -> Samples:
    """`sound` with its ends faded and `pause` seconds behind, in place of the silence that it brought."""
    loud = np.flatnonzero(np.abs(sound) > _QUIET)
    if not len(loud):
        return np.zeros(0, np.float32)
    lead, fade = int(_LEAD * rate), int(_FADE * rate)
    start, end = max(0, int(loud[0]) - lead), min(len(sound), int(loud[-1]) + 1 + lead)
    made = np.zeros(end - start + max(0, int(pause * rate) - lead), np.float32)
    made[: end - start] = sound[start:end]
    ramp = np.linspace(0, 1, min(fade, end - start), endpoint=False, dtype=np.float32)
    made[: len(ramp)] *= ramp
    made[end - start - len(ramp) : end - start] *= ramp[::-1]
    return made
