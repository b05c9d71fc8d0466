"""Counting words for `starter_round_trips.py`: what counts as the same word, and how many differ."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

# fmt: off
_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
_TENS = ("zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# fmt: on
_LARGE = ((10**9, "billion"), (10**6, "million"), (10**3, "thousand"), (100, "hundred"))
_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
_MOST = 10**12
"""Digits that stand for as much or more are left as they are."""


def number_words(number: int) -> list[str]:
    """A number from 0 to below 10**12 as it is read, without "and": 342 is three hundred forty two."""
    if not 0 <= number < _MOST:
        raise ValueError(f"{number} is not between 0 and {_MOST}")
    if number < 20:
        return [_ONES[number]]
    if number < 100:
        return [_TENS[number // 10], *([_ONES[number % 10]] if number % 10 else [])]
    size, name = next((size, name) for size, name in _LARGE if number >= size)
    rest = number % size
    return [*number_words(number // size), name, *(number_words(rest) if rest else [])]


def ordinal_words(number: int) -> list[str]:
    """21 is twenty first."""
    *head, last = number_words(number)
    if last in _ORDINALS:
        return [*head, _ORDINALS[last]]
    return [*head, f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th"]


def _year_words(number: int) -> list[str]:
    """Four digits as years are read: nineteen sixty nine, nineteen hundred, nineteen o five."""
    high, low = divmod(number, 100)
    if low == 0:
        return [*number_words(high), "hundred"]
    return [*number_words(high), *(["o"] if low < 10 else []), *number_words(low)]


_TIME = re.compile(r"\b(\d{1,2}):(\d{2})\b")
_ORDINAL = re.compile(r"\b(\d{1,9})(?:st|nd|rd|th)\b")
_YEAR = re.compile(r"(?<![\d.,])(1[1-9]\d\d|20[1-9]\d)(?![\d,.]*\d)")
_GROUPS = re.compile(r"(?<=\d),(?=\d{3}\b)")
_DECIMAL = re.compile(r"\b(\d{1,11})\.(\d{1,11})\b")
_WHOLE = re.compile(r"\d{1,11}")
_DOLLARS = re.compile(r"\$\s*(\d[\d,.]*\d|\d)")


def _spaced(words: Iterable[str]) -> str:
    return f" {' '.join(words)} "


def normalise(text: str) -> list[str]:
    """The words of a text as word error rates compare them.

    Lower case, without accents, punctuation and apostrophes (it's is its); a hyphen parts words; numbers in digits are
    written out as they are read (times, years from 1100 on but for 2000 to 2009, ordinals, decimals, dollars and per
    cent too). A spelling is left as it is: "neighbour" against "neighbor" counts as an error.
    """
    text = unicodedata.normalize("NFKD", text.lower())
    text = "".join(character for character in text if not unicodedata.combining(character))
    text = _DOLLARS.sub(r"\1 dollars", text)
    text = text.replace("%", " percent ").replace("per cent", "percent").replace("&", " and ")
    text = _TIME.sub(lambda found: _spaced(_clock_words(int(found[1]), int(found[2]))), text)
    text = _ORDINAL.sub(lambda found: _spaced(ordinal_words(int(found[1]))), text)
    text = _YEAR.sub(lambda found: _spaced(_year_words(int(found[1]))), text)
    text = _GROUPS.sub("", text)
    text = _DECIMAL.sub(
        lambda found: _spaced([*number_words(int(found[1])), "point", *(_ONES[int(digit)] for digit in found[2])]), text
    )
    text = _WHOLE.sub(lambda found: _spaced(number_words(int(found[0]))), text)
    text = re.sub(r"['\u2018\u2019`]", "", text)
    return re.sub(r"[^a-z0-9]+", " ", text).split()


def _clock_words(hours: int, minutes: int) -> list[str]:
    if minutes == 0:
        return [*number_words(hours), "oclock"]
    return [*number_words(hours), *(["o"] if minutes < 10 else []), *number_words(minutes)]


def word_errors(reference: Sequence[str], heard: Sequence[str]) -> int:
    """The fewest words to replace, leave out or put in that make `heard` of `reference` (Levenshtein)."""
    row = list(range(len(heard) + 1))
    for i, expected in enumerate(reference, 1):
        before, row[0] = row[0], i
        for j, word in enumerate(heard, 1):
            changed = before + (expected != word)
            before = row[j]
            row[j] = min(changed, row[j] + 1, row[j - 1] + 1)
    return row[-1]


def word_error_rate(pairs: Iterable[tuple[str, str]]) -> float:
    """Errors over all words of the references: long sentences count for more than short ones."""
    errors = words = 0
    for said, heard in pairs:
        reference = normalise(said)
        errors += word_errors(reference, normalise(heard))
        words += len(reference)
    if not words:
        raise ValueError("there is no word to compare with")
    return errors / words


def mentions(text: str, expected: Iterable[str]) -> bool:
    """Whether one of the expected words is in the text, as a whole word; Shakespeare's mentions Shakespeare."""
    words = set(normalise(re.sub(r"['\u2019]s\b", "", text)))
    return any(set(normalise(word)) <= words for word in expected)
