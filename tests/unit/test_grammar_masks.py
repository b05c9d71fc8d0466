"""Masks of grammars that take long: they delay nobody else, and change nothing but the time of their own request."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("xgrammar")

import xgrammar

from omnistage.config import OmniEngineArgs, resolve
from omnistage.config.schema import ARBudget
from omnistage.core.errors import InvalidRequestError, OmniError, QueueFullError, StageError
from omnistage.core.family import LoadContext
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, FinishReason, RequestInfo, StageInput, TokenChunk
from omnistage.engines.ar.sampling import grammar_state
from omnistage.engines.ar.sampling.masks import SLOW_SECONDS, GrammarThreads
from omnistage.engines.ar.stage import ARStage
from omnistage.models.causal_lm import tiny
from omnistage.models.causal_lm.component import CausalLM
from omnistage.models.registry import REGISTRY
from omnistage.pipeline.loop import StageLoop

PROMPT = (5, 17, 42, 300, 7, 81, 640, 12, 99)
GATED_STOP = 3
"""A request with this stop token is the one whose masks wait at the gate."""
SLOW = {"structured": {"regex": "[a-z]{6,40}"}, "stop_token_ids": (GATED_STOP,), "seed": 1, "max_tokens": 8}
PATIENCE = 30.0
"""Seconds; only a failed test ever waits so long."""


class Gate:
    """Where the masks of one request wait: from its `at`-th on, each takes a permit."""

    def __init__(self, at: int = 1) -> None:
        self.at = at
        self.permits = threading.Semaphore(0)
        self.reached = threading.Event()

    def open(self) -> None:
        self.permits.release(10_000)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()

    class GatedMatcher(xgrammar.GrammarMatcher):
        def __init__(self, compiled: Any, *, override_stop_tokens: list[int]) -> None:
            super().__init__(compiled, override_stop_tokens=override_stop_tokens)
            self.gated = GATED_STOP in override_stop_tokens
            self.fills = 0

        def fill_next_token_bitmask(self, bitmask: Any, index: int = 0, **options: Any) -> bool:
            self.fills += 1
            if self.gated and self.fills >= gate.at:
                gate.reached.set()
                if not gate.permits.acquire(timeout=PATIENCE):
                    raise TimeoutError("nobody opened the gate")
            return bool(super().fill_next_token_bitmask(bitmask, index, **options))

    monkeypatch.setattr(xgrammar, "GrammarMatcher", GatedMatcher)
    return gate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    tiny.write(folder)
    resolved = resolve(OmniEngineArgs(model=str(folder), device="cpu", dtype="float32"), registry=REGISTRY)
    config = resolved.config.pipeline.stages["thinker"]
    context = LoadContext(resolved.model, "thinker", config, torch.device("cpu"), torch.float32)
    component = REGISTRY.component(config.component)(context)
    assert isinstance(component, CausalLM)
    return component


class Harness:
    """A stage, and what its requests have got so far."""

    def __init__(self, model: CausalLM, **budget: Any) -> None:
        self.stage = ARStage("thinker", model, ARBudget(kv_blocks=64, block_size=8, **budget))
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.errors: dict[str, OmniError] = {}

    def submit(self, name: str, **params: Any) -> None:
        parsed = SamplingParams.parse(params)
        self.stage.check_params(parsed)
        self.stage.submit(StageInput(RequestInfo(name), parsed, ARInput(PROMPT)))
        self.tokens[name] = []

    def step(self) -> None:
        for chunk in self.stage.step():
            if isinstance(chunk.payload, TokenChunk):
                self.tokens[chunk.request_id] += chunk.payload.token_ids
            if chunk.finish is not None:
                self.ends[chunk.request_id] = chunk.finish
            if chunk.error is not None:
                self.errors[chunk.request_id] = chunk.error

    def run_until(self, *names: str) -> None:
        for _ in range(20_000):
            if all(name in self.ends for name in names):
                return
            assert self.stage.has_work()
            self.step()
        raise AssertionError(f"{names} did not end")

    def all_free(self) -> bool:
        self.stage.check_integrity()
        pool = self.stage.scheduler.pool
        return pool.free_blocks == pool.num_blocks and not self.stage.has_work()


def answer_of(model: CausalLM, gate: Gate, **params: Any) -> list[int]:
    """With every mask in time."""
    gate.open()
    harness = Harness(model)
    harness.submit("slow", **params)
    harness.run_until("slow")
    gate.permits = threading.Semaphore(0)
    gate.reached.clear()
    return harness.tokens["slow"]


@pytest.mark.parametrize("at", [1, 2, 5])
def test_others_finish_while_one_waits_for_its_mask_and_it_goes_on_as_if_nothing_had_been(
    at: int, model: CausalLM, gate: Gate
) -> None:
    expected = answer_of(model, gate, **SLOW)
    gate.at = at
    harness = Harness(model)
    harness.submit("slow", **SLOW)
    harness.submit("free", temperature=0.0, max_tokens=30, ignore_eos=True)
    harness.submit("constrained", structured={"regex": "[a-z]{3,9}"}, seed=2)
    harness.run_until("free", "constrained")
    assert len(harness.tokens["free"]) == 30
    assert gate.reached.wait(PATIENCE)
    assert "slow" not in harness.ends
    assert len(harness.tokens["slow"]) == at - 1
    assert harness.stage.stats().extra["masks_awaited"] == 1
    harness.submit("latecomer", temperature=0.0, max_tokens=5)
    harness.run_until("latecomer")
    gate.open()
    harness.run_until("slow")
    assert harness.tokens["slow"] == expected
    assert harness.all_free()


@pytest.mark.parametrize(
    "params",
    [
        {"seed": 1},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"seed": 7, "top_k": 5, "logit_bias": {30: 2.0}, "min_tokens": 3},
    ],
)
def test_a_seed_gives_the_same_tokens_whether_every_mask_is_late_or_none(
    params: dict[str, Any], model: CausalLM, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer_of(model, gate, **{**SLOW, **params})
    monkeypatch.setattr(grammar_state, "STEP_WAIT_SECONDS", 0.0)
    harness = Harness(model, max_batch_tokens=8)
    harness.submit("slow", **{**SLOW, **params})
    harness.submit("free", temperature=0.0, max_tokens=30, ignore_eos=True)
    held = 0
    while "slow" not in harness.ends:
        harness.step()
        if harness.stage.stats().extra["masks_awaited"]:
            held += 1
            gate.permits.release()
    assert harness.tokens["slow"] == expected
    assert held >= len(expected)
    assert harness.stage.stats().extra["masks_late"] >= 1
    harness.run_until("free")
    assert harness.all_free()


def test_a_request_that_waits_for_its_mask_is_preempted_and_resumed_like_any_other(model: CausalLM, gate: Gate) -> None:
    expected = answer_of(model, gate, **SLOW)
    gate.at = 3
    harness = Harness(model, max_running=1, prefix_caching=False)
    harness.submit("slow", **SLOW)
    while not harness.stage.stats().extra["masks_awaited"]:
        harness.step()
    harness.stage.submit(
        StageInput(RequestInfo("urgent", priority=-5), SamplingParams(max_tokens=3, temperature=0.0), ARInput(PROMPT))
    )
    harness.tokens["urgent"] = []
    harness.run_until("urgent")
    assert harness.stage.stats().preemptions == 1
    gate.open()
    harness.run_until("slow")
    assert harness.tokens["slow"] == expected
    assert harness.all_free()


def test_waiting_for_a_mask_is_not_counted_as_steps(model: CausalLM, gate: Gate) -> None:
    gate.at = 2
    harness = Harness(model)
    loop: StageLoop[str] = StageLoop(harness.stage, lambda owner, chunk: None)
    params = SamplingParams.parse(SLOW)
    loop.submit(StageInput(RequestInfo("slow"), params, ARInput(PROMPT)), "owner")
    while not harness.stage.stats().extra["masks_awaited"]:
        assert loop.run_pending()
    steps = sum(loop.step_seconds().counts)
    for _ in range(5):
        assert loop.run_pending()  # there is work, and a stop would wait for it
    assert sum(loop.step_seconds().counts) == steps
    gate.open()
    while harness.stage.has_work():
        loop.run_pending()
    assert sum(loop.step_seconds().counts) > steps


@pytest.mark.parametrize("bound", ["MASK_SECONDS", "SLOW_MASKS_SECONDS"])
def test_a_mask_that_takes_too_long_ends_its_request_alone(
    bound: str, model: CausalLM, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_state, bound, 0.05)
    gate.at = 2
    harness = Harness(model)
    harness.submit("slow", **SLOW)
    harness.submit("free", temperature=0.0, max_tokens=30, ignore_eos=True)
    harness.run_until("slow", "free")
    assert isinstance(harness.errors["slow"], InvalidRequestError)
    assert harness.errors["slow"].param == "structured"
    assert harness.ends["free"] is FinishReason.LENGTH
    assert harness.all_free()
    gate.open()


def test_a_mask_that_no_thread_begins_with_ends_its_request_with_try_again(
    model: CausalLM, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_state, "_quick", GrammarThreads("test", threads=1, max_threads=1))
    monkeypatch.setattr(grammar_state, "MASK_QUEUE_SECONDS", 0.1)
    harness = Harness(model)
    harness.submit("slow", **SLOW)
    assert gate.reached.wait(PATIENCE)
    harness.submit("queued", structured={"regex": "[a-z]{3,9}"}, seed=2)
    harness.run_until("queued")
    assert isinstance(harness.errors["queued"], QueueFullError)
    gate.open()
    harness.run_until("slow")
    assert "slow" not in harness.errors
    assert harness.all_free()


def test_an_abort_while_the_mask_is_computed_frees_everything(model: CausalLM, gate: Gate) -> None:
    gate.at = 2
    harness = Harness(model)
    harness.submit("slow", **SLOW)
    while not harness.stage.stats().extra["masks_awaited"]:
        harness.step()
    assert gate.reached.wait(PATIENCE)
    state = weakref.ref(harness.stage.runner.sampler.constrained["slow/0/1"])
    harness.stage.abort("slow")
    assert harness.all_free()
    assert harness.stage.stats().extra["masks_awaited"] == 0
    gate.open()
    assert grammar_state._quick.wait(lambda: state() is None, PATIENCE)


def test_a_grammar_that_breaks_ends_its_request_alone(
    model: CausalLM, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.open()

    def broken(self: object, token_id: int) -> bool:
        raise RuntimeError("broken")

    harness = Harness(model)
    monkeypatch.setattr(xgrammar.GrammarMatcher, "accept_token", broken)
    harness.submit("slow", **SLOW)
    harness.submit("free", temperature=0.0, max_tokens=5, ignore_eos=True)
    harness.run_until("slow", "free")
    assert isinstance(harness.errors["slow"], StageError)
    assert harness.ends["free"] is FinishReason.LENGTH
    assert harness.all_free()


# ------------------------------------------------------------------------------------------------- the threads


def test_a_slow_job_gives_its_place_to_another_thread_up_to_a_bound() -> None:
    now = [0.0]
    threads = GrammarThreads("test", threads=1, max_threads=2, clock=lambda: now[0])
    opened = threading.Event()
    done: list[str] = []
    began = threading.Semaphore(0)

    def block() -> None:
        began.release()
        opened.wait(PATIENCE)

    threads.submit(block)
    assert began.acquire(timeout=PATIENCE)
    threads.submit(lambda: done.append("quick"))
    assert not threads.wait(lambda: bool(done), 0.01)
    assert not threads.exhausted()
    now[0] += 2 * SLOW_SECONDS
    assert not threads.exhausted()
    assert threads.wait(lambda: bool(done), PATIENCE)
    threads.submit(block)
    assert began.acquire(timeout=PATIENCE)
    now[0] += 2 * SLOW_SECONDS
    assert threads.exhausted()
    threads.submit(lambda: done.append("last"))
    assert done == ["quick"]
    opened.set()
    assert threads.wait(lambda: len(done) == 2, PATIENCE)
    assert not threads.exhausted()


def test_slow_jobs_of_one_owner_leave_half_of_the_threads_to_others() -> None:
    now = [0.0]
    threads = GrammarThreads("test", threads=1, max_threads=4, clock=lambda: now[0])
    opened, done = threading.Event(), []
    began = threading.Semaphore(0)

    def block() -> None:
        began.release()
        opened.wait(PATIENCE)

    for _ in range(8):
        threads.submit(block, "greedy")
    for _ in range(2):
        assert began.acquire(timeout=PATIENCE)
        now[0] += 2 * SLOW_SECONDS
        assert not threads.exhausted()  # who asks finds out what is slow
    assert threads.exhausted("greedy")
    assert not threads.exhausted("other")
    threads.submit(lambda: done.append("other"), "other")
    assert threads.wait(lambda: bool(done), PATIENCE)
    assert not began.acquire(blocking=False), "a third one of the greedy owner has begun"
    opened.set()
    for _ in range(6):
        assert began.acquire(timeout=PATIENCE)
    assert threads.wait(lambda: not threads._running, PATIENCE)
    assert not threads.exhausted("greedy")


def test_a_request_s_masks_belong_to_its_client(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    owners = []
    threads = GrammarThreads("test", threads=1, max_threads=2)
    submit = threads.submit
    monkeypatch.setattr(threads, "submit", lambda work, owner: (owners.append(owner), submit(work, owner)))
    monkeypatch.setattr(grammar_state, "_quick", threads)
    stage = Harness(model).stage
    params = SamplingParams.parse({"max_tokens": 2, "structured": {"regex": "[a-z]+"}})
    stage.check_params(params)
    stage.submit(StageInput(RequestInfo("r", owner="somebody"), params, ARInput(PROMPT)))
    assert set(owners) == {"somebody"}
    stage.abort("r")


def test_a_queued_job_is_not_left_behind_slow_ones_where_nobody_asks() -> None:
    threads = GrammarThreads("test", threads=2, max_threads=3)
    opened, done = threading.Event(), threading.Event()

    def block() -> None:
        opened.wait(10 * PATIENCE)

    for _ in range(2):
        threads.submit(block)
    threads.submit(done.set)
    assert done.wait(PATIENCE)
    opened.set()


def test_jobs_that_come_together_run_side_by_side() -> None:
    threads = GrammarThreads("test", threads=2, max_threads=2)
    idle = threading.Event()
    threads.submit(idle.set)
    assert idle.wait(PATIENCE)
    together = threading.Barrier(2, timeout=PATIENCE)
    met: list[int] = []
    for _ in range(2):
        threads.submit(lambda: met.append(together.wait()))
    assert threads.wait(lambda: len(met) == 2, PATIENCE)


def test_a_cheap_grammar_whose_first_mask_was_slow_goes_on(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_state, "SLOW_SECONDS", -1.0)  # every mask counts as slow
    monkeypatch.setattr(grammar_state, "MASK_QUEUE_SECONDS", 5.0)
    harness = Harness(model)
    harness.submit("json", temperature=0.0, max_tokens=4, structured={"json_object": True})
    harness.run_until("json")
    assert harness.errors == {}
