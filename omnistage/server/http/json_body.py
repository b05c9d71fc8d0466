"""JSON that clients send: bounded before it is parsed, parsed, and checked once as a whole.

Many small values take a hundred times the memory of their text, and seconds to parse and to walk through. So values and
text are counted on the bytes first, as they arrive. Media, a few long strings of base64, are cheap and not counted as
text.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from pydantic_core import from_json

from omnistage.core.errors import InvalidRequestError, LimitExceededError
from omnistage.core.validation import field_path, is_utf8
from omnistage.pipeline.preparation import submit_long
from omnistage.server.http.errors import NOT_JSON

T = TypeVar("T")
MAX_DEPTH = 100
"""Deeper than any schema or message is; much deeper breaks every function that walks through it."""
_TINY_BYTES, _SMALL_BYTES, _SMALL_VALUES = 2**14, 2**16, 2**12
"""What is parsed in the event loop, tiny bodies without counting: a millisecond or two of work."""
MAX_SMALL_DIGITS = 4
"""Of the length of a body that is surely small."""
_PIECE = 2**18
"""Bytes that one call looks at, as no other thread runs meanwhile."""
_BLOCK = 2**12
"""Strings of twice this length are recognised as media."""
_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_\\"
"""With the backslash of escaped slashes and newlines."""
MAX_DIGITS = 1000
"""Of a whole number. Reading one takes time with the square of them, in which no other thread runs."""
_SAME_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_TOO_DEEP = f"the body is nested more than {MAX_DEPTH} levels deep; flatten it"
_MAX_URL_HEAD = 200
_MEDIA_ROOTS = frozenset({"messages", "input", "input_reference", "item", "response", "audio", "ref_audio"})
_MEDIA_KEYS = frozenset({"data", "url", "image", "audio", "video", "image_url", "audio_url", "video_url", "ref_audio"})
"""Where media are: fields of these names, somewhere in the top-level fields above."""


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """Of one body."""

    max_text_bytes: int = 8 * 2**20
    """Of everything but media."""
    max_values: int = 2**18


async def run_json(work: Callable[[], T], *, small: bool, owner: str | None) -> T:
    """The result of parsing or validating: at once where it is little, else from the thread for long work."""
    if small:
        return work()
    return await asyncio.wrap_future(submit_long(owner, work))


def is_small(body: bytes) -> bool:
    """Whether this JSON can be parsed in the event loop."""
    return len(body) <= _TINY_BYTES or (len(body) <= _SMALL_BYTES and _separators(body) <= _SMALL_VALUES)


class PartialBody:
    """A body that is still arriving: what has too much text or too many values is not read to its end."""

    def __init__(self, limits: JsonLimits) -> None:
        self._limits = limits
        self._chunks: list[bytes] = []
        self._size = self._separators = 0
        self._checked_size, self._checked_separators = limits.max_text_bytes, limits.max_values

    def add(self, chunk: bytes) -> bool:
        """Whether `check` should be called now: more than the limits allow may have arrived."""
        self._chunks.append(chunk)
        self._size += len(chunk)
        if self._size <= _SMALL_BYTES:
            return False
        self._separators += _separators(chunk)
        return self._size > self._checked_size or self._separators > self._checked_separators

    def check(self) -> None:
        """Raises `LimitExceededError`. It takes a while, and is due again once twice as much has arrived."""
        self._checked_size, self._checked_separators = 2 * self._size, 2 * self._separators
        if _encoding(self.join(), self._limits) is None:  # others are counted once they are complete
            # The beginning of a medium is not recognised as one.
            _checked_count(self.join(), self._limits, unknown_bytes=2 * _BLOCK)

    def join(self) -> bytes:
        if len(self._chunks) > 1:
            self._chunks = [b"".join(self._chunks)]
        return self._chunks[0] if self._chunks else b""


def parse_json(body: bytes, limits: JsonLimits) -> tuple[Any, int]:
    """What a body contains, and how many values at most.

    Raises `LimitExceededError` before parsing more than `limits` allow, and `InvalidRequestError` for what is not JSON,
    is nested too deeply, or has strings that are not text, numbers that are not finite or too many digits of one.
    """
    body = _as_utf8(body, limits)
    count = _checked_count(body, limits)
    problem = None
    try:
        # Python's parser is the faster one with long texts, and lets other threads run between numbers.
        if len(body) > _SMALL_BYTES and (count <= _SMALL_VALUES or _has_long_number(body)):
            values = json.loads(body, parse_int=read_int)
            check_readable(values)
        else:
            values = from_json(body, allow_inf_nan=False)  # refuses strings that are not text, too
            problem = _problem_in(values)
    except RecursionError:
        problem = _TOO_DEEP
    except ValueError as error:
        problem = _TOO_DEEP if "recursion limit" in str(error) else NOT_JSON
    if problem is not None:
        raise _located_problem(body) or InvalidRequestError(problem)
    # The bytes of a long text may be those of base64: only the place of a string says what it is.
    if len(body) > limits.max_text_bytes and text_chars(values) > limits.max_text_bytes:
        raise _too_much_text(text_chars(values), limits)
    return values, count


# ------------------------------------------------------------------------------------------------- before parsing


def _encoding(body: bytes, limits: JsonLimits) -> str | None:
    """None for UTF-8, which JSON has to be in. Raises for a large body in another: converting it takes too long."""
    encoding = json.detect_encoding(body[:4])
    if encoding in ("utf-8", "utf-8-sig"):
        return None
    if len(body) > limits.max_text_bytes:
        raise LimitExceededError(
            f"the body has {len(body)} bytes or more in {encoding}, over the limit of {limits.max_text_bytes}; "
            "send it in UTF-8"
        )
    return encoding


def _as_utf8(body: bytes, limits: JsonLimits) -> bytes:
    """What is counted must be what is parsed: in UTF-16 the bytes of a letter may be those of a quote."""
    encoding = _encoding(body, limits)
    if encoding is None:
        return body.removeprefix(codecs.BOM_UTF8)
    try:
        return body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    except ValueError:
        raise InvalidRequestError(NOT_JSON) from None


def _has_long_number(body: bytes) -> bool:
    """Whether there may be one with more than `MAX_DIGITS`; strings are looked at, too."""
    long = b"0" * (MAX_DIGITS + 1)
    pieces = (body[at : at + _PIECE + MAX_DIGITS] for at in range(0, len(body), _PIECE))
    return any(long in piece.translate(_SAME_DIGITS) for piece in pieces)


def read_int(digits: str) -> int:
    """`parse_int` of what clients send. Raises `InvalidRequestError` for too many digits."""
    if len(digits) > MAX_DIGITS:
        raise InvalidRequestError(f"the body has a number of {len(digits)} digits, over the limit of {MAX_DIGITS}")
    return int(digits)


def _checked_count(body: bytes, limits: JsonLimits, unknown_bytes: int = 0) -> int:
    """An upper bound of the number of values. Raises where there is more than `limits` allow.

    Of what seems to be text, `unknown_bytes` may be media.
    """
    if len(body) > limits.max_text_bytes:
        text = len(body) - _media_bytes(body)
        if text - unknown_bytes > limits.max_text_bytes:
            raise _too_much_text(text, limits)
    if len(body) <= _SMALL_BYTES and len(body) // 2 < limits.max_values:
        return len(body) // 2 + 1  # a value and its comma
    # Text has commas and brackets too: where there are too many, those in strings are left out.
    count = sum(_separators(body, at, at + _PIECE) for at in range(0, len(body), _PIECE))
    return count if count <= limits.max_values else _count_values(body, limits.max_values)


def _too_much_text(size: int, limits: JsonLimits) -> LimitExceededError:
    return LimitExceededError(
        f"the body has {size} bytes besides media, over the limit of {limits.max_text_bytes}; send less text"
    )


def _separators(text: bytes, start: int = 0, end: int | None = None) -> int:
    """An upper bound of the number of values: each but the first is in brackets or behind a comma."""
    return text.count(b",", start, end) + text.count(b"[", start, end) + text.count(b"{", start, end)


def _pieces(body: bytes) -> Iterator[bytes]:
    """The body in pieces, none of which ends within an escape."""
    start = 0
    while start < len(body):
        piece = body[start : start + _PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = body[start : start + _PIECE + 1]
        yield piece
        start += len(piece)


def _count_values(body: bytes, limit: int) -> int:
    """The number of values, without what strings contain. Raises once there are more than the limit."""
    count, in_string = 0, False
    for piece in _pieces(body):
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        count += _separators(b"".join(parts[in_string::2]))
        in_string ^= len(parts) % 2 == 0
        if count > limit:
            raise LimitExceededError(f"the body has {count} JSON values or more, over the limit of {limit}; send fewer")
    return count


def _media_bytes(body: bytes) -> int:
    """The bytes of long strings that can be base64 or `data:` URLs."""
    total = start = 0
    while start + _BLOCK <= len(body):
        if body.find(b'"', start, start + _BLOCK) >= 0:
            start += _BLOCK
            continue
        first, end = body.rfind(b'"', 0, start) + 1, body.find(b'"', start + _BLOCK)
        end = len(body) if end < 0 else end
        if body.startswith(b"data:", first):
            first = body.find(b",", first, first + _MAX_URL_HEAD) + 1 or first
        if all(not body[at : min(at + _PIECE, end)].translate(None, _BASE64) for at in range(first, end, _PIECE)):
            total += end - first
        start = end
    return total


# -------------------------------------------------------------------------------------------------- after parsing


def _problem_in(data: object) -> str | None:
    """Deep nesting, or a number that is not finite. Looks at one level at a time, which is fast."""
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH + 1):
        kinds = set(map(type, level))
        if float in kinds and not all(map(math.isfinite, [value for value in level if type(value) is float])):
            return "the body has a number that is not finite; send one that is"
        if dict not in kinds and list not in kinds:
            return None
        nested = [value for value in level if type(value) is dict or type(value) is list]
        level = list(chain.from_iterable(value.values() if type(value) is dict else value for value in nested))
    return _TOO_DEEP


def _located_problem(body: bytes) -> InvalidRequestError | None:
    """The problem with its place, where Python's parser gets as far as that."""
    try:
        check_readable(json.loads(body))
    except InvalidRequestError as error:
        return error
    except (ValueError, RecursionError):
        pass
    return None


_Place = tuple["_Place", str | int] | None
"""Where a value is: the place around it and its key there."""


def check_readable(data: object) -> None:
    """Raise for deep nesting, strings that are not text and numbers that are not finite, wherever they are."""
    stack: list[tuple[object, _Place, int]] = [(data, None, 0)]
    while stack:
        value, place, depth = stack.pop()
        if isinstance(value, str):
            if not value.isascii() and not is_utf8(value):
                raise InvalidRequestError(
                    "contains half of a surrogate pair, which is not text; remove it", param=_path(place)
                )
        elif isinstance(value, dict):
            _check_depth(depth, place)
            for key, item in value.items():
                stack += ((key, place, depth), (item, (place, str(key)), depth + 1))
        elif isinstance(value, list):
            _check_depth(depth, place)
            stack += [(item, (place, index), depth + 1) for index, item in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequestError("is not a finite number; send one that is", param=_path(place))


def _check_depth(depth: int, place: _Place) -> None:
    if depth == MAX_DEPTH:
        raise InvalidRequestError(f"is nested more than {MAX_DEPTH} levels deep; flatten it", param=_path(place))


def _path(place: _Place) -> str | None:
    keys: list[str | int] = []
    while place is not None:
        place, key = place
        keys.append(key)
    # A few are enough to find it, and keys are the client's text.
    parts = [key if isinstance(key, int) or (is_utf8(key) and len(key) <= 40) else "..." for key in keys[::-1][:8]]
    return field_path(parts) or None


def text_chars(values: object) -> int:
    """The characters of all strings but media."""
    fields = values.items() if isinstance(values, dict) else [("", values)]
    total = 0
    for root, value in fields:
        stack: list[tuple[str, object]] = [(root, value)]
        while stack:
            key, item = stack.pop()
            if isinstance(item, str):
                total += 0 if root in _MEDIA_ROOTS and key in _MEDIA_KEYS else len(item)
            elif isinstance(item, dict):
                total += sum(map(len, item))
                stack += item.items()
            elif isinstance(item, list):
                stack += [(key, one) for one in item]
    return total
