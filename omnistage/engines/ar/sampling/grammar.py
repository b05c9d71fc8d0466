"""Structured output through xgrammar: compile a constraint once, follow it per request, mask logits by it.

xgrammar is an optional package, imported where it is used; `omnistage[structured]` installs it.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from omnistage.core.cancellation import current_cancellation
from omnistage.core.errors import (
    ConfigError,
    InvalidRequestError,
    LimitExceededError,
    MissingDependencyError,
    QueueFullError,
)
from omnistage.core.params import StructuredOutput
from omnistage.core.threads import DaemonThreads
from omnistage.engines.ar.sampling.grammar_bounds import (
    HOW_TO_SIMPLIFY,
    MAX_SCHEMA_DEPTH,
    MAX_SOURCE_BYTES,
    GrammarCost,
    check_shape,
    cost_of,
)
from omnistage.engines.ar.sampling.grammar_state import GrammarState, mask_threads_exhausted
from omnistage.engines.ar.sampling.masks import GrammarThreads, lower_priority
from omnistage.engines.ar.sampling.schema_support import check_regex, check_schema, for_xgrammar
from omnistage.media.context import current_owner

if TYPE_CHECKING:
    import xgrammar
    from transformers import PreTrainedTokenizerBase

COMPILE_SECONDS = 10.0
CACHED_GRAMMARS = 64
MAX_GRAMMAR_BYTES = 64 * 1024**2
CACHED_BYTES = 256 * 1024**2
"""Of compiled grammars in one cache."""

# Compiling cannot be ended from outside, only kept from piling up. What will take long has threads of its own, half of
# them for one owner, and what takes long against expectation gives its place to another: nobody's small schema waits
# behind them.
_compile_threads = GrammarThreads("omnistage-compile", threads=4, max_threads=16, slow_seconds=1.0)
_slow_compile_threads = DaemonThreads(4, "omnistage-compile-slow")
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
    try:
        parsed = json.loads(_within_limit(schema, kind)) if isinstance(schema, str) else schema
    except RecursionError as error:
        raise InvalidRequestError(f"nested deeper than {MAX_SCHEMA_DEPTH} levels; flatten it", param=param) from error
    except ValueError as error:
        raise InvalidRequestError(f"not valid JSON: {error}", param=param) from error
    check_shape(parsed, param)
    if isinstance(schema, str):
        return schema
    try:
        # Keys keep their order: it is the order in which the model must write the properties.
        return _within_limit(json.dumps(schema, ensure_ascii=False), kind)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(f"not valid JSON: {error}", param=param) from error


# ------------------------------------------------------------------------------------------------ compiling


@dataclass(frozen=True, slots=True)
class _Entry:
    compiled: xgrammar.CompiledGrammar
    size: int
    cheap_masks: bool


@dataclass(slots=True)
class _Job:
    """A constraint that is being compiled, or will be."""

    future: Future[_Entry] = field(default_factory=Future)
    waiting: int = 0


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
        # xgrammar's cache shares masks between grammars, and gives wrong ones: to [\s\S], after some other expressions.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_enabled=False)
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._jobs: dict[tuple[str, str], _Job] = {}
        special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
        self._special = frozenset(i for i in {*special, *tokenizer.all_special_ids} if i < vocab_size)
        self._control = frozenset(i for i, token in enumerate(info.decoded_vocab) if _CONTROL.search(token))

    def compile(self, structured: StructuredOutput) -> xgrammar.CompiledGrammar:
        """The compiled constraint.

        Raises `InvalidRequestError` if it is wrong, beyond a limit or takes too long, `QueueFullError` if others keep
        every thread busy, and what the request's `Cancellation` raises if it ends meanwhile.
        """
        if mask_threads_exhausted(current_owner()):
            raise QueueFullError("other requests keep all grammar threads busy; try again later", retry_after=10.0)
        return self._entry(*source_of(structured)).compiled

    def _entry(self, kind: str, text: str) -> _Entry:
        entry = self._cached(kind, text)
        if entry is not None:
            return entry
        cost = cost_of(kind, text)
        if kind == "json_schema":
            check_schema(json.loads(text), f"structured.{kind}")
        elif kind == "regex":
            check_regex(text, f"structured.{kind}")
        try:
            return self._in_time(kind, text, cost)
        except (RuntimeError, ValueError) as error:
            raise InvalidRequestError(_readable(error), param=f"structured.{kind}") from error

    def _cached(self, kind: str, text: str) -> _Entry | None:
        with self._lock:
            entry = self._cache.get((kind, text))
            if entry is not None:
                self._cache.move_to_end((kind, text))
            return entry

    def _in_time(self, kind: str, text: str, cost: GrammarCost) -> _Entry:
        """Compile in a thread, once for all who wait for the same."""
        cancellation = current_cancellation()
        with self._lock:
            job = self._jobs.get((kind, text))
            if job is None:
                job = self._jobs[kind, text] = _Job()
                work = partial(self._run, job, kind, text, cost)
                if cost.cheap:
                    _compile_threads.submit(work)
                else:
                    _slow_compile_threads.submit_for(current_owner(), work)
            job.waiting += 1
        cancellation.begin_work()  # it may go on when the request has ended
        job.future.add_done_callback(lambda _: cancellation.end_work())
        try:
            return cancellation.result(job.future, COMPILE_SECONDS)
        except TimeoutError as error:
            if job.future.running():
                raise InvalidRequestError(
                    f"took longer than {COMPILE_SECONDS:g} s to compile; {HOW_TO_SIMPLIFY}", param=f"structured.{kind}"
                ) from error
            raise QueueFullError(
                "too many grammars are being compiled; try again later", retry_after=COMPILE_SECONDS
            ) from error
        finally:
            with self._lock:
                job.waiting -= 1
                # Nobody wants what has not begun; what has begun is kept once it is done.
                if self._jobs.get((kind, text)) is job and (
                    job.future.done() or (not job.waiting and job.future.cancel())
                ):
                    del self._jobs[kind, text]

    def _run(self, job: _Job, kind: str, text: str, cost: GrammarCost) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            job.future.set_result(self._make(kind, text, cost))
        except BaseException as error:  # raised again where the result is awaited
            job.future.set_exception(error)

    def _make(self, kind: str, text: str, cost: GrammarCost) -> _Entry:
        if not cost.cheap:
            lower_priority(threading.get_native_id())
        try:
            compiled = self._compile(kind, text)
            size = compiled.memory_size_bytes
            if size > MAX_GRAMMAR_BYTES:
                raise LimitExceededError(
                    f"takes {size} bytes when compiled, and {MAX_GRAMMAR_BYTES} is the limit; simplify it",
                    param=f"structured.{kind}",
                )
            entry = _Entry(compiled, size, cost.cheap_masks)
            with self._lock:
                self._cache[kind, text] = entry
                while len(self._cache) > CACHED_GRAMMARS or sum(e.size for e in self._cache.values()) > CACHED_BYTES:
                    self._cache.popitem(last=False)
            return entry
        finally:
            with self._lock:
                self._jobs.pop((kind, text), None)

    def _compile(self, kind: str, text: str) -> xgrammar.CompiledGrammar:
        if kind == "json_schema":
            return self._compiler.compile_json_schema(for_xgrammar(text))
        if kind == "structural_tag":
            return self._compiler.compile_structural_tag(for_xgrammar(text))
        if kind == "regex":
            return self._compiler.compile_regex(text)
        if kind == "grammar":
            return self._compiler.compile_grammar(text)
        return self._compiler.compile_json_schema(_ANY_OBJECT)

    def start(
        self, structured: StructuredOutput, stop_token_ids: Sequence[int], owner: str | None = None
    ) -> GrammarState:
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

        entry = self._cached(kind, text)  # not there any more if many others came since the request was checked

        def open_matcher() -> xgrammar.GrammarMatcher:
            compiled = (entry or self._entry(kind, text)).compiled
            return self._xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop_token_ids))

        cheap = entry is not None and entry.cheap_masks
        return GrammarState(
            open_matcher,
            self._vocab_size,
            stop_token_ids,
            banned,
            after=structured.after_token,
            owner=owner,
            slow=entry is None,
            cheap=cheap,
        )


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
