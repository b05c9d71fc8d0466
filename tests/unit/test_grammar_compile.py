"""Compiling: once for all who wait, within limits, and no longer than anybody waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

pytest.importorskip("xgrammar")

from omnistage.core.cancellation import Cancellation, cancellation_scope
from omnistage.core.errors import (
    CancelledRequestError,
    DeadlineExceededError,
    InvalidRequestError,
    LimitExceededError,
    QueueFullError,
)
from omnistage.core.params import StructuredOutput
from omnistage.core.threads import DaemonThreads
from omnistage.engines.ar.sampling import grammar, grammar_state
from omnistage.engines.ar.sampling.masks import SLOW_SECONDS, GrammarThreads
from omnistage.media.context import decode_for

PATIENCE = 30.0
CHEAP, OTHER = StructuredOutput(regex="a"), StructuredOutput(regex="b")
DEAR = StructuredOutput(regex=".{1,200}")


def build_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=260, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(["hello world"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


class GatedCompiler(grammar.GrammarCompiler):
    """Compiles once it is allowed to, and notes what it was asked for."""

    def __init__(self) -> None:
        tokenizer = build_tokenizer()
        super().__init__(tokenizer, len(tokenizer), [0])
        self.opened = threading.Event()
        self.began = threading.Semaphore(0)
        self.texts: list[str] = []

    def _compile(self, kind: str, text: str):  # type: ignore[no-untyped-def]
        self.texts.append(text)
        self.began.release()
        if not self.opened.wait(PATIENCE):
            raise TimeoutError("nobody opened the gate")
        return super()._compile(kind, text)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedCompiler]:
    monkeypatch.setattr(grammar, "_compile_threads", GrammarThreads("test", threads=1, max_threads=1))
    monkeypatch.setattr(grammar, "_slow_compile_threads", DaemonThreads(2, "test-slow"))
    compiler = GatedCompiler()
    yield compiler
    compiler.opened.set()


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def compiling(compiler: GatedCompiler, clients: ThreadPoolExecutor, structured: StructuredOutput) -> Future[object]:
    """Another request's compilation, which has begun."""
    future: Future[object] = clients.submit(compiler.compile, structured)
    assert compiler.began.acquire(timeout=PATIENCE)
    return future


def test_slow_compiles_are_given_up_and_cannot_pile_up(
    compiler: GatedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 0.05)
    with pytest.raises(InvalidRequestError, match="took longer"):
        compiler.compile(CHEAP)
    with pytest.raises(QueueFullError):
        compiler.compile(OTHER)
    assert compiler.texts == ["a"]
    compiler.opened.set()
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", PATIENCE)
    assert compiler.compile(OTHER) is not None
    # What was given up on is kept once it is done; what nobody waited for any longer was never begun.
    assert compiler.compile(CHEAP) is not None
    assert compiler.texts == ["a", "b"]


def test_a_compilation_counts_for_its_request_until_it_has_ended(
    compiler: GatedCompiler, clients: ThreadPoolExecutor
) -> None:
    cancellation, idle = Cancellation(), threading.Event()

    def work() -> None:
        with cancellation_scope(cancellation):
            compiler.compile(CHEAP)

    request = clients.submit(work)
    assert compiler.began.acquire(timeout=PATIENCE)
    cancellation.cancel()
    with pytest.raises(CancelledRequestError):
        request.result(PATIENCE)
    cancellation.when_idle(idle.set)
    assert not idle.is_set()  # the thread still works for it
    compiler.opened.set()
    assert idle.wait(PATIENCE)


def test_a_compilation_that_never_began_counts_no_longer_than_its_request(
    compiler: GatedCompiler, clients: ThreadPoolExecutor
) -> None:
    compiling(compiler, clients, CHEAP)
    cancellation = Cancellation()
    cancellation.cancel()
    with cancellation_scope(cancellation), pytest.raises(CancelledRequestError):
        compiler.compile(OTHER)
    assert cancellation.idle


def test_the_same_constraint_is_compiled_once_for_all_who_wait(
    compiler: GatedCompiler, clients: ThreadPoolExecutor
) -> None:
    first = compiling(compiler, clients, CHEAP)
    others = [clients.submit(compiler.compile, CHEAP) for _ in range(5)]
    compiler.opened.set()
    assert {id(future.result(PATIENCE)) for future in (first, *others)} == {id(compiler.compile(CHEAP))}
    assert compiler.texts == ["a"]
    assert compiler._jobs == {}


def test_a_small_constraint_does_not_wait_behind_large_ones(
    compiler: GatedCompiler, clients: ThreadPoolExecutor
) -> None:
    large = compiling(compiler, clients, DEAR)
    small = compiling(compiler, clients, CHEAP)
    compiler.opened.set()
    assert small.result(PATIENCE) is not None
    assert large.result(PATIENCE) is not None


def test_the_large_constraints_of_one_client_do_not_keep_those_of_another_waiting(
    compiler: GatedCompiler, clients: ThreadPoolExecutor
) -> None:
    def request(owner: str, count: int) -> None:
        with decode_for(owner):
            compiler.compile(StructuredOutput(regex=f".{{1,{count}}}"))

    first = [clients.submit(request, "a", 100 + i) for i in range(3)]
    assert compiler.began.acquire(timeout=PATIENCE)
    other = clients.submit(request, "b", 90)
    assert compiler.began.acquire(timeout=PATIENCE)
    assert ".{1,90}" in compiler.texts
    compiler.opened.set()
    for future in (*first, other):
        future.result(PATIENCE)


def test_a_constraint_that_takes_long_against_expectation_gives_its_thread_s_place_to_others(
    compiler: GatedCompiler, clients: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = GrammarThreads("test", threads=1, max_threads=2, slow_seconds=0.0)
    monkeypatch.setattr(grammar, "_compile_threads", threads)
    first = compiling(compiler, clients, CHEAP)
    second = compiling(compiler, clients, OTHER)
    assert not first.done()
    compiler.opened.set()
    assert first.result(PATIENCE) is not None
    assert second.result(PATIENCE) is not None


@pytest.mark.parametrize("begun", [True, False])
def test_a_request_that_is_aborted_stops_waiting_for_its_compilation(
    begun: bool, compiler: GatedCompiler, clients: ThreadPoolExecutor
) -> None:
    ahead = None if begun else compiling(compiler, clients, OTHER)
    cancellation = Cancellation()

    def request() -> None:
        with cancellation_scope(cancellation):
            compiler.compile(CHEAP)

    future = clients.submit(request)
    if begun:
        assert compiler.began.acquire(timeout=PATIENCE)
    cancellation.cancel()
    with pytest.raises(CancelledRequestError):
        future.result(PATIENCE)
    compiler.opened.set()
    if ahead is not None:
        ahead.result(PATIENCE)
        compiler.compile(StructuredOutput(regex="c"))
        assert compiler.texts == ["b", "c"]


def test_a_deadline_ends_the_wait_for_a_compilation(compiler: GatedCompiler) -> None:
    now = [0.0]
    with cancellation_scope(Cancellation(deadline=1.0, clock=lambda: now[0])):
        now[0] = 1.0
        with pytest.raises(DeadlineExceededError):
            compiler.compile(CHEAP)


def test_one_who_leaves_does_not_end_it_for_another(compiler: GatedCompiler, clients: ThreadPoolExecutor) -> None:
    ahead = compiling(compiler, clients, OTHER)
    stays = clients.submit(compiler.compile, CHEAP)
    with cancellation_scope(Cancellation()) as leaves:
        leaves.cancel()
        # Cancelled already: it joins the job, or begins it, and leaves at once.
        with pytest.raises(CancelledRequestError):
            compiler.compile(CHEAP)
    compiler.opened.set()
    assert stays.result(PATIENCE) is not None
    assert ahead.result(PATIENCE) is not None


def test_the_cache_is_bounded_in_bytes(compiler: GatedCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.opened.set()
    size = compiler.compile(CHEAP).memory_size_bytes
    monkeypatch.setattr(grammar, "CACHED_BYTES", 2 * size)
    for letter in "bcd":
        compiler.compile(StructuredOutput(regex=letter))
    assert list(compiler._cache) == [("regex", "c"), ("regex", "d")]


def test_a_grammar_that_takes_much_memory_is_refused(compiler: GatedCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.opened.set()
    monkeypatch.setattr(grammar, "MAX_GRAMMAR_BYTES", 10)
    with pytest.raises(LimitExceededError, match="10 is the limit") as refused:
        compiler.compile(CHEAP)
    assert refused.value.param == "structured.regex"
    assert not compiler._cache


def test_while_slow_masks_keep_all_threads_busy_no_more_constrained_requests_are_taken(
    compiler: GatedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.opened.set()
    compiler.compile(CHEAP)
    now = [0.0]
    threads = GrammarThreads("test", threads=1, max_threads=1, clock=lambda: now[0])
    monkeypatch.setattr(grammar_state, "_quick", threads)
    opened, began = threading.Event(), threading.Event()

    def job() -> None:
        began.set()
        opened.wait(PATIENCE)

    threads.submit(job)
    assert began.wait(PATIENCE)
    compiler.compile(CHEAP)
    now[0] += 2 * SLOW_SECONDS
    with pytest.raises(QueueFullError, match="try again"):
        compiler.compile(CHEAP)
    opened.set()
    assert threads.wait(lambda: not threads._slow, PATIENCE)
    compiler.compile(CHEAP)


def test_a_grammar_that_left_the_cache_is_compiled_again_but_not_in_the_stage_s_thread(
    compiler: GatedCompiler, clients: ThreadPoolExecutor
) -> None:
    compiler.opened.set()
    compiler.compile(CHEAP)
    compiler._cache.clear()
    compiler.opened.clear()
    state = compiler.start(CHEAP, [0])
    assert compiler.began.acquire(timeout=PATIENCE)
    assert compiler.began.acquire(timeout=PATIENCE)
    assert not state.ready
    compiler.opened.set()
    state.wait()
    assert state.failure is None
