"""Structured output through xgrammar: compile a constraint once, follow it per request, mask logits by it.

xgrammar is an optional package, imported where it is used; `omnistage[structured]` installs it.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from omnistage.core.errors import (
    ConfigError,
    InvalidRequestError,
    LimitExceededError,
    MissingDependencyError,
    QueueFullError,
)
from omnistage.core.params import StructuredOutput
from omnistage.engines.ar.sampling.grammar_bounds import is_cheap
from omnistage.engines.ar.sampling.grammar_state import GrammarState

if TYPE_CHECKING:
    import xgrammar
    from transformers import PreTrainedTokenizerBase

MAX_SOURCE_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 64
"""xgrammar's time grows with the cube of a schema's nesting: 30 ms at 64 levels, 10 s at 512."""
COMPILE_SECONDS = 10.0
MAX_COMPILES = 4
"""At once, those given up on included: a thread cannot be ended from outside, only kept from piling up."""
CACHED_GRAMMARS = 64
_ANY_OBJECT = '{"type": "object", "additionalProperties": true}'

_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_LENGTH_KEYWORD = re.compile(r'"(min|max)Length"')
_NOISE = re.compile(r"^(\[[\d:]+\]\s*)?(\S+\.cc:\d+:\s*)?(Check failed: \(.*?\) is false:\s*)?")


def _import_xgrammar() -> None:
    try:
        import xgrammar  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "structured output needs xgrammar; install omnistage[structured]", param="structured"
        ) from error


# ---------------------------------------------------------------------------------------- reading a constraint


def source_of(structured: StructuredOutput) -> tuple[str, str]:
    """The constraint's field name and its text, checked for size and shape but not compiled.

    Raises `InvalidRequestError` (`LimitExceededError` past 64 KiB) with the field as `param`.
    """
    if structured.json_schema is not None:
        return "json_schema", _schema_text(structured.json_schema, "json_schema")
    if structured.structural_tag is not None:
        tag: dict[str, object] = {"type": "structural_tag", "format": structured.structural_tag}
        return "structural_tag", _schema_text(tag, "structural_tag")
    if structured.regex is not None:
        return "regex", _within_limit(structured.regex, "regex")
    if structured.grammar is not None:
        return "grammar", _within_limit(structured.grammar, "grammar")
    return "json_object", ""


def _within_limit(text: str, kind: str) -> str:
    size = len(text.encode("utf-8", errors="surrogatepass"))
    if size > MAX_SOURCE_BYTES:
        raise LimitExceededError(f"{size} bytes, but at most {MAX_SOURCE_BYTES} are taken", param=f"structured.{kind}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"not valid Unicode: {error.reason}", param=f"structured.{kind}") from error
    return text


def _schema_text(schema: dict[str, object] | str, kind: str) -> str:
    param = f"structured.{kind}"
    too_deep = InvalidRequestError(f"nested deeper than {MAX_SCHEMA_DEPTH} levels; flatten it", param=param)
    try:
        # Keys keep their order: it is the order in which the model must write the properties.
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        parsed = json.loads(_within_limit(text, kind))
    except RecursionError as error:
        raise too_deep from error
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(f"not valid JSON: {error}", param=param) from error
    level: list[object] = [parsed]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [child for node in level for child in _children(node, param)]
        if not level:
            return text
    raise too_deep


def _children(node: object, param: str) -> Iterable[object]:
    if isinstance(node, dict):
        target = node.get("$ref")
        if isinstance(target, str) and not (target == "#" or target.startswith("#/")):
            raise InvalidRequestError("a $ref must point into the schema itself ('#' or '#/...')", param=param)
        return node.values()
    return node if isinstance(node, list) else ()


# ------------------------------------------------------------------------------------------------ compiling


class GrammarCompiler:
    """Compiles constraints for one tokenizer and vocabulary width. Thread-safe.

    `vocab_size` is the width of the logits, which may exceed the tokenizer's. Compiled grammars are kept, the least
    recently used going first.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        _import_xgrammar()
        import xgrammar

        self._xgrammar = xgrammar
        self._vocab_size = vocab_size
        stops = sorted(set(eos_token_ids)) or None
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stops)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"xgrammar cannot use this tokenizer: {_readable(error)}") from error
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_enabled=False)
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_COMPILES)
        self._cache: OrderedDict[tuple[str, str], xgrammar.CompiledGrammar] = OrderedDict()
        special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
        self._special = frozenset(i for i in {*special, *tokenizer.all_special_ids} if i < vocab_size)
        self._control = frozenset(i for i, token in enumerate(info.decoded_vocab) if _CONTROL.search(token))

    def compile(self, structured: StructuredOutput) -> xgrammar.CompiledGrammar:
        """The compiled constraint.

        Raises `InvalidRequestError` if it is wrong or takes too long, `QueueFullError` if others keep every
        compiling thread busy.
        """
        kind, text = source_of(structured)
        with self._lock:
            if (kind, text) in self._cache:
                self._cache.move_to_end((kind, text))
                return self._cache[kind, text]
        try:
            compiled = self._in_time(lambda: self._compile(kind, text), kind)
        except (RuntimeError, ValueError) as error:
            raise InvalidRequestError(_readable(error), param=f"structured.{kind}") from error
        with self._lock:
            self._cache[kind, text] = compiled
            while len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        return compiled

    def _compile(self, kind: str, text: str) -> xgrammar.CompiledGrammar:
        if kind == "json_schema":
            return self._compiler.compile_json_schema(text)
        if kind == "structural_tag":
            return self._compiler.compile_structural_tag(text)
        if kind == "regex":
            return self._compiler.compile_regex(text)
        if kind == "grammar":
            return self._compiler.compile_grammar(text)
        return self._compiler.compile_json_schema(_ANY_OBJECT)

    def _in_time(self, work: Callable[[], xgrammar.CompiledGrammar], kind: str) -> xgrammar.CompiledGrammar:
        if not self._slots.acquire(timeout=COMPILE_SECONDS):
            raise QueueFullError("too many grammars are being compiled; try again later", retry_after=COMPILE_SECONDS)
        result: Future[xgrammar.CompiledGrammar] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:  # raised again in the caller's thread
                result.set_exception(error)
            finally:
                self._slots.release()

        threading.Thread(target=run, name="grammar-compile", daemon=True).start()
        try:
            return result.result(timeout=COMPILE_SECONDS)
        except TimeoutError as error:
            raise InvalidRequestError(
                f"took longer than {COMPILE_SECONDS:g} s to compile; simplify it", param=f"structured.{kind}"
            ) from error

    def start(self, structured: StructuredOutput, stop_token_ids: Sequence[int]) -> GrammarState:
        """A fresh state for one request, which `stop_token_ids` may end once the constraint is met.

        Never waits: what takes time happens in the threads that compute masks.
        """
        # xgrammar takes a special token for its spelling and would offer it inside a string.
        banned = self._special
        kind, text = source_of(structured)
        if kind in ("json_schema", "structural_tag") and _LENGTH_KEYWORD.search(text):
            # It also lets raw control characters into strings of bounded length, which no JSON parser takes
            # (mlc-ai/xgrammar#800). JSON never needs one: between values a space will do for a tab.
            banned |= self._control

        def open_matcher() -> xgrammar.GrammarMatcher:
            # Not in the cache any more if many others came since the request was checked.
            compiled = self.compile(structured)
            return self._xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop_token_ids))

        with self._lock:
            compiled = (kind, text) in self._cache
        cheap = compiled and is_cheap(kind, text)
        return GrammarState(open_matcher, self._vocab_size, stop_token_ids, banned, slow=not compiled, cheap=cheap)


def _readable(error: Exception) -> str:
    """xgrammar's message without its source positions and time stamps."""
    text = _NOISE.sub("", str(error).strip(), count=1).strip()
    return (text.splitlines() or ["it cannot be compiled"])[0][:300]


_Compilers = dict[tuple[int, tuple[int, ...]], GrammarCompiler]
_compilers: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, _Compilers] = weakref.WeakKeyDictionary()
_compilers_lock = threading.Lock()


def compiler_for(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Sequence[int] = ()
) -> GrammarCompiler:
    """The one compiler of this tokenizer, width and end tokens; building it reads the whole vocabulary."""
    key = (vocab_size, tuple(sorted(set(eos_token_ids))))
    with _compilers_lock:
        of_tokenizer = _compilers.setdefault(tokenizer, {})
        if key not in of_tokenizer:
            of_tokenizer[key] = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)
        return of_tokenizer[key]
