"""From token ids to text: incremental detokenisation, stop strings, the bytes of a single token."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel, DecodeStream

from omnistage.core.errors import ConfigError
from omnistage.core.params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXT_TOKENS = 8
"""Prompt tokens that the decoder sees before the output: enough for a leading space and an unfinished character."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


@lru_cache(maxsize=1024)
def _fallback_lengths(text: str) -> tuple[int, ...]:
    """For each beginning of a text, the length of the longest shorter one that it ends with; once for all answers."""
    fallback = [0] * (len(text) + 1)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = fallback[length]
        if text[i] == text[length]:
            length += 1
        fallback[i + 1] = length
    return tuple(fallback)


class _StopString:
    """Knuth-Morris-Pratt matching of one stop string: linear in the text, whatever the string."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """Characters of the stop string that the text so far ends with."""
        self._fallback = _fallback_lengths(text)

    def feed(self, character: str) -> bool:
        """Take one more character; True if it completes the stop string."""
        matched = self.matched
        if matched == len(self.text):
            matched = self._fallback[matched]
        while matched and self.text[matched] != character:
            matched = self._fallback[matched]
        if self.text[matched] == character:
            matched += 1
        self.matched = matched
        return matched == len(self.text)

    @property
    def pending(self) -> int:
        """Last characters of the text that may still become the stop string."""
        return self._fallback[self.matched] if self.matched == len(self.text) else self.matched


class TokenBytes:
    """The bytes of each token of a tokenizer whose tokens are bytes: there text is simply their sum, as UTF-8.

    Looking bytes up is some ten times faster than decoding the last tokens again, which other tokenizers need.
    """

    _cache: ClassVar[WeakKeyDictionary[PreTrainedTokenizerBase, TokenBytes | None]] = WeakKeyDictionary()

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._special = {id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special}
        self._table: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})
        self.texts = _Texts(self, False), _Texts(self, True)
        """Of tokens by themselves, without and with special ones left out."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> TokenBytes | None:
        """Made once for a tokenizer; None where its tokens are not bytes."""
        if tokenizer not in cls._cache:
            backend = _backend(tokenizer)
            cls._cache[tokenizer] = cls(backend) if type(backend.decoder) is ByteLevel else None
        return cls._cache[tokenizer]

    def get(self, token_id: int, skip_special: bool) -> bytes:
        table = self._table[skip_special]
        if token_id not in table:
            token = self._backend.id_to_token(token_id)
            if token is None or (skip_special and token_id in self._special):
                token = ""
            try:
                table[token_id] = bytes(_BYTES[character] for character in token)
            except KeyError:  # an added token, which stands for its own text
                table[token_id] = token.encode()
        return table[token_id]


class _Texts(dict[int, str | None]):
    """The text of each token, filled when it is first read; None where its bytes are not whole characters."""

    def __init__(self, tokens: TokenBytes, skip_special: bool) -> None:
        super().__init__()
        self._tokens, self._skip_special = tokens, skip_special

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._tokens.get(token_id, self._skip_special).decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


def _byte_characters() -> dict[str, int]:
    """Which byte each character of a byte-level token stands for, as GPT-2 defines it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _byte_characters()


class TextStream:
    """Text of one answer, released as soon as nothing that follows can change it.

    The pushes and `finish()` together give what `tokenizer.decode` gives for all the ids at once, up to the first
    stop string to be completed. With `prompt_token_ids` the text continues the prompt: a tokenizer that drops a
    leading space then keeps it. Not thread-safe.
    """

    stopped: bool
    """A stop string was found; everything pushed after it is dropped."""
    stopped_by: str | None = None
    """That stop string; the longest where several end at one place."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, params: SamplingParams, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self.stopped = False
        self._tokenizer = _backend(tokenizer)
        self._skip_special = params.skip_special_tokens
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._stops = [_StopString(text) for text in dict.fromkeys(params.stop)]
        self._unreleased = ""
        self._pushed = 0
        self._finished = False
        self._bytes = TokenBytes.of(tokenizer)
        if self._bytes is not None:
            self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
            self._partial = False
            """Whether the decoder has the beginning of a character."""
            return
        # Ids that the stream has not turned into text yet, and those before them that it decodes along with them.
        self._context = [int(token) for token in prompt_token_ids[-_CONTEXT_TOKENS:]]
        self._pending: list[int] = []
        self._stream = self._new_stream()

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self._context or None, skip_special_tokens=self._skip_special)

    def push(self, token_id: int) -> str:
        """Take one token; returns the newly released text.

        That is '' while a character is incomplete or the text may still become a stop string.
        """
        if self.stopped or self._finished:
            return ""
        self._pushed += 1
        if self._bytes is None:
            text = self._decode(token_id)
        elif self._partial or (whole := self._bytes.texts[self._skip_special][token_id]) is None:
            text = self._utf8.decode(self._bytes.get(token_id, self._skip_special))
            self._partial = bool(self._utf8.getstate()[0])
        else:
            text = whole
        return self._release(text) if self._stops and text else text

    def finish(self) -> str:
        """The text that was held back; an incomplete character comes out as U+FFFD. Later calls return ''."""
        if self.stopped or self._finished:
            return ""
        self._finished = True
        if self._bytes is not None:
            rest = self._utf8.decode(b"", final=True)
        else:
            rest = self._remainder() if self._pending else ""
        text = self._release(rest) if self._stops and rest else rest
        if not self.stopped:
            text, self._unreleased = text + self._unreleased, ""
        return text

    def _decode(self, token_id: int) -> str:
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            # tokenizers raises nothing narrower. Bytes that spell an invalid character can change how the ones
            # before them decode (byte fallback); what was released stays, and a new stream starts after it.
            if "prefix" not in str(error).lower():
                raise
            text = self._tokenizer.decode(self._pending, skip_special_tokens=self._skip_special)
            self._context = []
            self._stream = self._new_stream()
            self._stream.step(self._tokenizer, token_id)
            self._context = [token_id]
            self._pending = []
            return text
        if text is None:
            return ""
        self._context, self._pending = self._pending, []
        return text

    def _remainder(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=self._skip_special)
        whole = self._tokenizer.decode([*self._context, *self._pending], skip_special_tokens=self._skip_special)
        if whole.startswith(before):
            return whole[len(before) :]
        return self._tokenizer.decode(self._pending, skip_special_tokens=self._skip_special)

    def _release(self, text: str) -> str:
        """What of the new text cannot become a stop string."""
        text, start = self._unreleased + text, len(self._unreleased)
        may_stop = self._pushed >= self._min_tokens
        for end in range(start + 1, len(text) + 1):
            matched = [stop.text for stop in self._stops if stop.feed(text[end - 1])]
            if matched and may_stop:
                self.stopped = True
                self._unreleased = ""
                self.stopped_by = max(matched, key=len)
                return text[: end if self._include_stop else end - max(map(len, matched))]
        keep = len(text) - max(stop.pending for stop in self._stops)
        self._unreleased = text[keep:]
        return text[:keep]


def stop_reason(text: TextStream | None, params: SamplingParams, ended_by: int | None) -> int | str | None:
    """What of the request's own stops ended an answer, if any did."""
    if ended_by is not None:
        return ended_by if ended_by in params.stop_token_ids else None
    return None if text is None else text.stopped_by


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ConfigError(f"text output needs a fast tokenizer, but this model has a {type(tokenizer).__name__}")
    return backend


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """What `token` adds to a text, as UTF-8; it need not be whole characters.

    Decoding a token by itself loses a leading space with some tokenizers, and what is part of a character with all.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer):
        table = TokenBytes.of(tokenizer)
        if table is not None:
            return table.get(token, skip_special=False)
        piece = backend.id_to_token(token) or ""
        if token in tokenizer.added_tokens_decoder:
            return piece.encode()  # it stands for its own text
        if (byte := _BYTE_TOKEN.fullmatch(piece)) is not None:
            return bytes([int(byte[1], 16)])
        if _SPACE in piece:
            return piece.replace(_SPACE, " ").encode()
    decoded = tokenizer.decode([token])
    return (decoded if isinstance(decoded, str) else "".join(decoded)).encode()
