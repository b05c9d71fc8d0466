"""Markdown to the plain words that a voice can speak."""

from __future__ import annotations

import html
import re
import unicodedata

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
    """`text` without what is not spoken: markdown, code blocks, emoji, letters that are not Latin.

    Links keep their label, bare addresses their host. Line breaks stay.
    """
    text = unicodedata.normalize("NFKC", html.unescape(text)).replace("\r\n", "\n").replace("…", "...")
    text = _TAG.sub(" ", _LINK.sub(r"\1", _FENCED.sub("\n", text)))
    text = _ADDRESS.sub(lambda match: match[1].replace(".", " dot "), text)
    text = _LINE_MARK.sub("", _RULE.sub("", text))
    text = _NUMBERED.sub(r"\1, ", text)
    text = re.sub(r"(?<=[\w)])[ \t]*\*[ \t]*(?=\d)|(?<=\d)[ \t]+\*[ \t]+(?=\w)", " times ", text)
    text = re.sub(r"[ \t]*\|[ \t]*", ", ", text)
    text = "".join(_name_of(character) for character in text)
    text = _MANY_DIGITS.sub(lambda match: " ".join(match[0].replace(",", "")), text)
    text = _REPEATED.sub(lambda match: "..." if match[1] == "." and len(match[0]) > 2 else match[1], text)
    text = re.sub(r"[ \t]+(?=[.,;:!?])", "", text)
    lines = (" ".join(line.split()).lstrip(" ,;:") for line in text.split("\n"))
    return "\n".join(line for line in lines if _LETTER_OR_DIGIT.search(line))


def _name_of(character: str) -> str:
    """The character or its replacement: white space where the voice cannot speak it."""
    if character.isascii():
        keep = character.isalnum() or character in _SPOKEN_MARKS or character == "\n"
        # Emphasis marks touch a word: they leave no gap.
        return character if keep else ("" if character in "*`~" else " ")
    if character in _PLAINER:
        return _PLAINER[character]
    if character in _SPOKEN_MARKS:
        return character
    if character.isalpha() and unicodedata.name(character, "").startswith("LATIN"):
        return character
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    return "" if unicodedata.category(character) in ("Cf", "Mn") else " "
