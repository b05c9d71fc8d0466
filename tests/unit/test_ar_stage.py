"""The autoregressive stage over a tiny language model: what goes in, what comes out, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from omnistage.config import OmniEngineArgs, resolve
from omnistage.config.schema import ARBudget
from omnistage.core.errors import (
    CapacityError,
    ConfigError,
    InvalidRequestError,
    OmniError,
    PromptTooLongError,
    StageError,
)
from omnistage.core.family import LoadContext
from omnistage.core.params import CodecParams, SamplingParams
from omnistage.core.types import (
    ARInput,
    CodecFrames,
    CodecInput,
    FinishReason,
    MediaSpan,
    Modality,
    OmniTokensPrompt,
    RequestInfo,
    SideRows,
    StageChunk,
    StageInput,
    TokenChunk,
    TokenLogprobs,
)
from omnistage.engines.ar import graphs
from omnistage.engines.ar.attention import PagedContext
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.graphs import DecodeGraphs, StepTensors
from omnistage.engines.ar.inputs import ContentKeys
from omnistage.engines.ar.memory import block_bytes
from omnistage.engines.ar.merged import merge_linears
from omnistage.engines.ar.scheduler import ScheduledSequence
from omnistage.engines.ar.stage import ARStage
from omnistage.hf import transformers
from omnistage.models.causal_lm import tiny
from omnistage.models.causal_lm.component import CausalLM
from omnistage.models.causal_lm.processor import CausalLMProcessor
from omnistage.models.registry import REGISTRY
from omnistage.pipeline.build import build_stage
from tests.unit.faults import PanicException

EOS = tiny.special_ids()["<|im_end|>"]
PROMPT = (5, 17, 42, 300, 7, 81, 640, 12, 99)
OTHER = (400, 3, 3, 250, 61)
STOP, LENGTH, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny.write(path)
    return path


@pytest.fixture(scope="session")
def model(folder: Path) -> CausalLM:
    resolved = resolve(OmniEngineArgs(model=str(folder), device="cpu", dtype="float32"), registry=REGISTRY)
    config = resolved.config.pipeline.stages["thinker"]
    context = LoadContext(resolved.model, "thinker", config, torch.device("cpu"), torch.float32)
    component = REGISTRY.component(config.component)(context)
    assert isinstance(component, CausalLM)
    return component


@pytest.fixture(scope="session")
def processor(folder: Path) -> CausalLMProcessor:
    return CausalLMProcessor.load(folder)


class Around(ARComponent):
    """A component around the tiny model, to change one thing about it."""

    def __init__(self, inner: CausalLM, **spec: object) -> None:
        self.inner = inner
        self.spec = replace(inner.spec, **spec)  # type: ignore[arg-type]
        self.decoder, self.device, self.dtype = inner.decoder, inner.device, inner.dtype
        self.eos_token_ids, self.tokenizer = inner.eos_token_ids, inner.tokenizer
        self.steps = 0
        self.before_forward: Callable[[int], None] = lambda step: None
        self.change_logits: Callable[[int, torch.Tensor], torch.Tensor] = lambda step, logits: logits
        self.seen_logits: list[torch.Tensor] = []

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.inner.embed(token_ids)

    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, paged: PagedContext) -> torch.Tensor:
        self.steps += 1
        self.before_forward(self.steps)
        return self.inner.forward(embeds, positions, paged)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.change_logits(self.steps, self.inner.logits(hidden))
        self.seen_logits.append(logits)
        return logits

    def emit(self, embeds: torch.Tensor, hidden: torch.Tensor, media: torch.Tensor) -> torch.Tensor:
        return torch.cat((embeds.masked_fill(media, 0.0), hidden), dim=1)

    def encode(self, span: MediaSpan) -> torch.Tensor:
        if "broken" in span.inputs:
            raise ArithmeticError("cannot be encoded")
        return span.inputs["rows"]

    def final_side_rows(self) -> torch.Tensor:
        return torch.full((1, self.spec.embed_size), 0.25)


RUN_AHEAD = False


@pytest.fixture(autouse=True, params=[False, True], ids=["plain", "ahead"])
def _run_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs twice: tokens are read before the next step is launched, and after."""
    monkeypatch.setattr(f"{__name__}.RUN_AHEAD", request.param)


def make_stage(component: ARComponent, **budget: object) -> ARStage:
    """Only the newest stage of a component may step: the decoder holds one set of caches."""
    options: dict[str, object] = {"kv_blocks": 64, "block_size": 8, "run_ahead": RUN_AHEAD, **budget}
    return ARStage("thinker", component, ARBudget(**options))  # type: ignore[arg-type]


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    hidden_rows: int = 0
    prompts: int = 0
    chunks: int = 0
    ended_by: int | None = None
    finish: FinishReason | None = None
    error: OmniError | None = None

    def take(self, chunk: StageChunk) -> None:
        assert self.finish is None, "a chunk after the last one"
        self.finish, self.error = chunk.finish, chunk.error
        self.chunks += 1
        if not isinstance(chunk.payload, TokenChunk):
            return
        payload = chunk.payload
        self.tokens += payload.token_ids
        self.text += payload.text
        self.logprobs += payload.logprobs
        self.prompts += payload.prompt is not None
        self.ended_by = payload.ended_by
        if payload.hidden is not None:
            assert payload.hidden_start == self.hidden_rows, "hidden rows out of order"
            self.hidden.append(payload.hidden.clone())
            self.hidden_rows += len(payload.hidden)


class Answers(dict[tuple[str, int], Answer]):
    """Answers by request and index, from a stage's chunks; counts each request's started marker."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []

    def take(self, chunks: Sequence[StageChunk]) -> None:
        for chunk in chunks:
            if chunk.payload is None and chunk.finish is None:
                self.started.append(chunk.request_id)
            else:
                assert chunk.request_id in self.started, "a chunk before the started marker"
                self.setdefault((chunk.request_id, chunk.index), Answer()).take(chunk)


def request(name: str, payload: ARInput | Sequence[int], *, emit: bool = False, **params: object) -> StageInput:
    if not isinstance(payload, ARInput):
        payload = ARInput(tuple(payload))
    options: dict[str, object] = {"temperature": 0.0, "max_tokens": 8, **params}
    return StageInput(RequestInfo(name), SamplingParams.parse(options), payload, emit)


def drain(stage: ARStage, answers: Answers | None = None) -> Answers:
    answers = answers if answers is not None else Answers()
    while stage.has_work():
        answers.take(stage.step())
        stage.check_integrity()
    return answers


def run(stage: ARStage, *requests: StageInput) -> Answers:
    for item in requests:
        stage.submit(item)
    return drain(stage)


def one(stage: ARStage, payload: ARInput | Sequence[int], **params: object) -> Answer:
    """The answer to a single request."""
    answers = run(stage, request("only", payload, **params))
    assert answers.started == ["only"]
    return answers["only", 0]


def all_free(stage: ARStage) -> bool:
    extra = stage.stats().extra
    return extra["blocks_free"] == extra["blocks"]


# ------------------------------------------------------------------------------------------ the ordinary


def test_the_engine_builds_the_stage_that_these_tests_build_by_hand(folder: Path, model: CausalLM) -> None:
    resolved = resolve(OmniEngineArgs(model=str(folder), device="cpu", dtype="float32"), registry=REGISTRY)
    config = resolved.config
    stage = build_stage(resolved.model, "thinker", config.pipeline.stages["thinker"], config.deployment)
    assert isinstance(stage, ARStage)
    built = one(stage, PROMPT)
    assert built.tokens == one(make_stage(model), PROMPT).tokens


def test_a_request_gives_one_marker_then_a_token_a_chunk_and_one_end(model: CausalLM) -> None:
    stage = make_stage(model)
    stage.submit(request("a", PROMPT, max_tokens=3))
    assert stage.has_work()
    first = stage.step() + (stage.step() if RUN_AHEAD else [])
    assert [(c.payload is None, c.finish) for c in first] == [(True, None), (False, None)]
    payload = first[1].payload
    assert isinstance(payload, TokenChunk)
    assert payload.prompt is not None
    assert payload.prompt.token_ids == PROMPT
    rest = stage.drain()
    assert [c.finish for c in rest] == [None, LENGTH]
    assert all(isinstance(c.payload, TokenChunk) and len(c.payload.token_ids) == 1 for c in rest)
    assert all(isinstance(c.payload, TokenChunk) and c.payload.prompt is None for c in rest)
    assert all_free(stage)
    assert not stage.has_work()


def test_a_step_without_requests_gives_nothing(model: CausalLM) -> None:
    stage = make_stage(model)
    assert not stage.has_work()
    assert stage.step() == []


def test_the_text_is_that_of_the_tokens(model: CausalLM) -> None:
    answer = one(make_stage(model), PROMPT, max_tokens=12)
    assert model.tokenizer is not None
    assert answer.text == model.tokenizer.decode(answer.tokens)


def test_requests_in_one_batch_answer_as_they_do_alone(model: CausalLM) -> None:
    alone = [one(make_stage(model), p).tokens for p in (PROMPT, OTHER)]
    together = run(make_stage(model), request("a", PROMPT), request("b", OTHER))
    assert [together["a", 0].tokens, together["b", 0].tokens] == alone


# --------------------------------------------------------------------------------------------- the end


def test_an_answer_ends_at_max_tokens(model: CausalLM) -> None:
    answer = one(make_stage(model), PROMPT, max_tokens=5)
    assert (len(answer.tokens), answer.finish, answer.ended_by) == (5, LENGTH, None)


def test_the_models_end_token_ends_the_answer_and_leaves_no_text(model: CausalLM) -> None:
    answer = one(make_stage(model), PROMPT, logit_bias={EOS: 100.0})
    assert (answer.tokens, answer.text, answer.finish, answer.ended_by) == ([EOS], "", STOP, EOS)


def test_ignore_eos_goes_on_past_the_end_token(model: CausalLM) -> None:
    answer = one(make_stage(model), PROMPT, logit_bias={EOS: 100.0}, ignore_eos=True, max_tokens=4)
    assert (answer.tokens, answer.finish) == ([EOS] * 4, LENGTH)


def test_a_stop_id_ends_the_answer_and_is_dropped_from_its_text(model: CausalLM) -> None:
    free = one(make_stage(model), PROMPT)
    stop = free.tokens[3]
    first = free.tokens.index(stop)
    answer = one(make_stage(model), PROMPT, stop_token_ids=(stop,))
    assert (answer.tokens, answer.finish, answer.ended_by) == (free.tokens[: first + 1], STOP, stop)
    assert model.tokenizer is not None
    assert answer.text == model.tokenizer.decode(free.tokens[:first])


def test_a_stop_string_ends_the_answer_before_it(model: CausalLM) -> None:
    free = one(make_stage(model), PROMPT, max_tokens=12)
    stop = free.text[6:9]
    cut = free.text.index(stop)
    answer = one(make_stage(model), PROMPT, max_tokens=12, stop=stop)
    assert (answer.text, answer.finish, answer.ended_by) == (free.text[:cut], STOP, None)
    assert len(answer.tokens) < len(free.tokens)
    kept = one(make_stage(model), PROMPT, max_tokens=12, stop=stop, include_stop_str_in_output=True)
    assert kept.text == free.text[:cut] + stop


def test_text_held_back_for_a_stop_string_comes_out_at_the_end(model: CausalLM) -> None:
    free = one(make_stage(model), PROMPT, max_tokens=6)
    answer = one(make_stage(model), PROMPT, max_tokens=6, stop=free.text[-2:] + "never")
    assert (answer.text, answer.finish) == (free.text, LENGTH)


def test_nothing_stops_an_answer_before_min_tokens(model: CausalLM) -> None:
    answer = one(make_stage(model), PROMPT, logit_bias={EOS: 100.0}, min_tokens=3)
    assert EOS not in answer.tokens[:3]
    assert (answer.tokens[3:], answer.finish) == ([EOS], STOP)


def test_max_tokens_is_clamped_to_the_room_behind_the_prompt(model: CausalLM) -> None:
    stage = make_stage(model, max_model_len=len(PROMPT) + 4)
    answer = one(stage, PROMPT, max_tokens=1000)
    assert (len(answer.tokens), answer.finish) == (4, LENGTH)


def test_a_sequence_may_fill_the_whole_pool(model: CausalLM) -> None:
    stage = make_stage(model, kv_blocks=2)
    assert stage.max_length == 16
    assert len(one(stage, PROMPT, max_tokens=1000).tokens) == 16 - len(PROMPT)
    assert all_free(stage)


# ----------------------------------------------------------------------------------- several answers


def test_each_of_n_answers_can_be_had_alone_with_its_own_seed(model: CausalLM) -> None:
    params: dict[str, object] = {"temperature": 1.0, "max_tokens": 6}
    answers = run(make_stage(model), request("a", PROMPT, n=3, seed=11, **params))
    assert answers.started == ["a"]
    together = [answers["a", i].tokens for i in range(3)]
    alone = [one(make_stage(model), PROMPT, seed=11 + i, **params).tokens for i in range(3)]
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) == 3
    assert [answers["a", i].prompts for i in range(3)] == [1, 1, 1]


def test_the_largest_seed_has_successors(model: CausalLM) -> None:
    answers = run(make_stage(model), request("a", PROMPT, n=2, seed=2**63 - 1, temperature=1.0))
    again = one(make_stage(model), PROMPT, seed=0, temperature=1.0)
    assert answers["a", 1].tokens == again.tokens


def test_a_seed_gives_the_same_answer_twice_and_another_seed_another(model: CausalLM) -> None:
    one_seed, same, other = (
        one(make_stage(model), PROMPT, temperature=1.0, seed=seed, max_tokens=12).tokens for seed in (3, 3, 4)
    )
    assert one_seed == same != other


def test_logprobs_are_those_of_the_raw_logits(model: CausalLM) -> None:
    component = Around(model)
    answer = one(make_stage(component), PROMPT, logprobs=3, max_tokens=4, logit_bias={EOS: 0.5})
    assert len(answer.logprobs) == 4
    for token, reported, logits in zip(answer.tokens, answer.logprobs, component.seen_logits, strict=True):
        expected = logits[0].double().log_softmax(-1)
        assert reported.chosen.token_id == token
        assert reported.chosen.logprob == pytest.approx(float(expected[token]), abs=1e-5)
        values, ids = expected.topk(3)
        assert [t.token_id for t in reported.top] == ids.tolist()
        assert [t.logprob for t in reported.top] == pytest.approx(values.tolist(), abs=1e-5)


# ------------------------------------------------------------------------------------------------ abort


def test_an_aborted_request_gives_no_more_chunks_and_its_blocks_back(model: CausalLM) -> None:
    alone = one(make_stage(model), OTHER).tokens
    stage = make_stage(model)
    answers = Answers()
    stage.submit(request("gone", PROMPT, n=2))
    stage.submit(request("stays", OTHER))
    for _ in range(1 + RUN_AHEAD):
        answers.take(stage.step())
    before = {key: answer.chunks for key, answer in answers.items()}
    stage.abort("gone")
    stage.check_integrity()
    drain(stage, answers)
    assert {key: answer.chunks for key, answer in answers.items() if key[0] == "gone"} == {
        ("gone", 0): before["gone", 0],
        ("gone", 1): before["gone", 1],
    }
    assert answers["stays", 0].tokens == alone
    assert all_free(stage)


def test_a_request_aborted_before_its_first_step_never_starts(model: CausalLM) -> None:
    stage = make_stage(model)
    stage.submit(request("gone", PROMPT))
    stage.abort("gone")
    assert not stage.has_work()
    assert stage.step() == []


def test_unknown_ids_are_ignored_by_abort_and_feed(model: CausalLM) -> None:
    stage = make_stage(model)
    stage.abort("nobody")
    stage.feed("nobody", SideRows(torch.zeros(1, 64), final=True))
    stage.check_integrity()


# ------------------------------------------------------------------------------------------ what is wrong


def payload_of(count: int) -> ARInput:
    return ARInput(tuple(range(count)))


@pytest.mark.parametrize(
    ("payload", "error", "words"),
    [
        (ARInput(()), InvalidRequestError, "empty"),
        (payload_of(32), PromptTooLongError, "32 tokens"),
        (ARInput((1, 1024)), InvalidRequestError, r"\[0, 1024\)"),
        (ARInput((1, -1)), InvalidRequestError, r"\[0, 1024\)"),
        (ARInput((1, 2), embeds=torch.zeros(3, 64)), InvalidRequestError, r"\[2, 64\], got \[3, 64\]"),
        (ARInput((1, 2), embeds=torch.zeros(2, 63)), InvalidRequestError, r"\[2, 64\], got \[2, 63\]"),
        (ARInput((1, 2), embeds=torch.zeros(2)), InvalidRequestError, r"\[2, 64\], got \[2\]"),
        (ARInput((1, 2), positions=torch.arange(3)), InvalidRequestError, "3 of 2"),
        (ARInput((1, 2), streaming=True), InvalidRequestError, "support streaming"),
    ],
)
def test_input_that_can_never_run_is_refused_and_leaves_nothing_behind(
    model: CausalLM, payload: ARInput, error: type[OmniError], words: str
) -> None:
    stage = make_stage(model, max_model_len=32)
    wrong = request("wrong", payload)
    with pytest.raises(error, match=words):
        stage.check(wrong)
    with pytest.raises(error, match=words):
        stage.submit(wrong)
    stage.check_integrity()
    assert not stage.has_work()


@pytest.mark.parametrize(
    ("budget", "advice"),
    [
        ({"max_model_len": 32}, r"shorten it or raise thinker\.budget\.max_model_len$"),
        ({"kv_blocks": 4}, r"shorten it or raise thinker\.budget\.kv_memory$"),
        ({"kv_blocks": 1024}, "shorten it$"),  # the model itself takes no more
    ],
)
def test_a_prompt_that_is_too_long_is_told_what_would_help(
    model: CausalLM, budget: dict[str, object], advice: str
) -> None:
    stage = make_stage(model, **budget)
    with pytest.raises(PromptTooLongError, match=advice):
        stage.check(request("a", ARInput((5,) * stage.max_length)))


def test_min_tokens_beyond_the_room_is_refused(model: CausalLM) -> None:
    stage = make_stage(model, max_model_len=16)
    wrong = request("a", PROMPT, min_tokens=8, max_tokens=8)
    with pytest.raises(CapacityError, match="min_tokens=8 does not fit: 7 tokens"):
        stage.check(wrong)
    with pytest.raises(CapacityError):
        stage.submit(wrong)
    assert len(one(stage, PROMPT, min_tokens=7, max_tokens=8).tokens) == 7
    stage.check_integrity()


def test_an_id_in_use_is_refused_until_its_request_has_ended(model: CausalLM) -> None:
    stage = make_stage(model)
    stage.submit(request("a", PROMPT))
    with pytest.raises(InvalidRequestError, match="already"):
        stage.submit(request("a", OTHER))
    assert drain(stage)["a", 0].tokens == one(make_stage(model), PROMPT).tokens
    stage = make_stage(model)
    run(stage, request("a", PROMPT))
    assert run(stage, request("a", OTHER))["a", 0].finish is LENGTH


def test_params_and_payloads_of_other_engines_are_refused(model: CausalLM) -> None:
    stage = make_stage(model)
    with pytest.raises(InvalidRequestError, match="SamplingParams"):
        stage.submit(StageInput(RequestInfo("a"), CodecParams(), ARInput((1,))))
    with pytest.raises(StageError, match="takes ARInput, not CodecInput"):  # only a bridge or processor can be at fault
        stage.submit(StageInput(RequestInfo("a"), SamplingParams(), CodecInput()))
    with pytest.raises(StageError, match="cannot be fed CodecFrames"):
        stage.feed("a", CodecFrames(()))


def test_a_failure_while_a_request_is_opened_leaves_the_stage_as_it_was(model: CausalLM) -> None:
    component = Around(model)
    stage = make_stage(component)
    component.tokenizer = object()  # type: ignore[assignment]  # found out only once the sequence is queued
    with pytest.raises(ConfigError, match="fast tokenizer"):
        stage.submit(request("a", PROMPT, n=2))
    stage.check_integrity()
    assert not stage.has_work()
    component.tokenizer = model.tokenizer
    assert run(stage, request("a", PROMPT, n=2))["a", 1].finish is LENGTH


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (OmniTokensPrompt(), "empty"),
        (OmniTokensPrompt((1, 2048)), r"\[0, 1024\)"),
        (OmniTokensPrompt(("a",)), "whole numbers"),  # type: ignore[arg-type]
        (OmniTokensPrompt((1.5,)), "whole numbers"),  # type: ignore[arg-type]
        (OmniTokensPrompt(prompt_embeds=torch.zeros(0, 64)), r"\[n, 64\]"),
        (OmniTokensPrompt(prompt_embeds=torch.zeros(2, 3)), r"\[n, 64\]"),
        (OmniTokensPrompt(prompt_embeds=[[0.0] * 64]), "got list"),  # type: ignore[arg-type]
        (OmniTokensPrompt(prompt_embeds=torch.zeros(2, 64, dtype=torch.long)), "finite"),
        (OmniTokensPrompt(prompt_embeds=torch.full((2, 64), float("nan"))), "finite"),
        (OmniTokensPrompt(prompt_embeds=torch.full((2, 64), float("inf"))), "finite"),
        (OmniTokensPrompt(prompt_embeds=torch.full((2, 64), 1e300, dtype=torch.float64)), "finite"),
        (OmniTokensPrompt((1,), torch.zeros(2, 64)), "one id a row"),
        (OmniTokensPrompt((1, 10**9), torch.zeros(2, 64)), r"\[0, 1024\)"),
    ],
)
def test_prompts_of_tokens_and_embeddings_are_checked(
    processor: CausalLMProcessor, prompt: OmniTokensPrompt, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        processor.tokens(prompt)


# ------------------------------------------------------------------------------------------- embeddings


def test_embeddings_as_a_prompt_answer_like_the_ids_they_are_of(model: CausalLM, processor: CausalLMProcessor) -> None:
    rows = model.embed(torch.tensor(PROMPT))
    by_rows = one(make_stage(model), processor.tokens(OmniTokensPrompt(prompt_embeds=rows)))
    assert by_rows.tokens == one(make_stage(model), PROMPT).tokens


def test_ids_beside_embeddings_are_never_looked_up(model: CausalLM) -> None:
    # A bridge may hand over ids of another stage's vocabulary.
    payload = ARInput((10**9,) * len(PROMPT), embeds=model.embed(torch.tensor(PROMPT)))
    answers = run(make_stage(model), request("rows", payload), request("ids", OTHER))
    assert answers["rows", 0].tokens == one(make_stage(model), PROMPT).tokens
    assert answers["ids", 0].tokens == one(make_stage(model), OTHER).tokens


def test_embeddings_neither_give_nor_take_prefixes(model: CausalLM) -> None:
    stage = make_stage(model)
    long = tuple(range(100, 140))
    rows = model.embed(torch.tensor(OTHER * 8))
    by_ids = one(stage, long).tokens
    one(stage, ARInput(long, embeds=rows))
    assert stage.stats().extra["prefix_hits"] == 0
    assert one(stage, long).tokens == by_ids


# ---------------------------------------------------------------------------------------- prefix caching

LONG = tuple((7 * i) % 800 for i in range(40))


def test_a_repeated_prompt_hits_the_cache_and_answers_the_same(model: CausalLM) -> None:
    stage = make_stage(model)
    first = one(stage, LONG)
    computed = stage.stats().tokens
    second = one(stage, LONG)
    extra = stage.stats().extra
    assert second.tokens == first.tokens == one(make_stage(model, prefix_caching=False), LONG).tokens
    # 39 of 40 tokens could be reused, that is 4 blocks of 8.
    assert (extra["prefix_hits"], extra["prefix_lookups"]) == (4, 8)
    assert stage.stats().tokens - computed == computed - 32


def test_with_prefix_caching_off_nothing_is_looked_up(model: CausalLM) -> None:
    stage = make_stage(model, prefix_caching=False)
    one(stage, LONG)
    one(stage, LONG)
    extra = stage.stats().extra
    assert (extra["prefix_hits"], extra["prefix_lookups"]) == (0, 0)


def test_equal_tokens_at_other_positions_are_not_reused(model: CausalLM) -> None:
    stretched = ARInput(LONG, positions=torch.arange(40) * 3, position_delta=80)
    expected = one(make_stage(model, prefix_caching=False), stretched)
    stage = make_stage(model)
    plain = one(stage, LONG)
    assert one(stage, stretched).tokens == expected.tokens != plain.tokens
    hits = stage.stats().extra["prefix_hits"]
    assert one(stage, stretched).tokens == expected.tokens
    assert stage.stats().extra["prefix_hits"] == hits + 4


def test_another_delta_is_another_content_behind_the_prompt(model: CausalLM) -> None:
    stage = make_stage(model)
    first = one(stage, ARInput(LONG[:7], position_delta=50), max_tokens=20)
    again = (*LONG[:7], *first.tokens)
    assert one(stage, again).tokens == one(make_stage(model, prefix_caching=False), again).tokens


# ------------------------------------------------------------------------------------------------ media


def picture(key: bytes, where: Sequence[int], rows: torch.Tensor, **inputs: torch.Tensor) -> MediaSpan:
    return MediaSpan(Modality.IMAGE, key, torch.tensor(list(where)), {"rows": rows, **inputs})


def random_rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed)) * 0.5


def with_pictures(*spans: MediaSpan) -> ARInput:
    return ARInput(LONG, media=spans)


def replaced(*spans: MediaSpan, model: CausalLM) -> ARInput:
    """The same prompt with its media put in by hand."""
    rows = model.embed(torch.tensor(LONG)).clone()
    for span in spans:
        rows[span.positions] = span.inputs["rows"]
    return ARInput(LONG, embeds=rows)


@pytest.mark.parametrize("chunk", [None, 3])
def test_media_rows_stand_where_their_span_says(model: CausalLM, chunk: int | None) -> None:
    # Interleaved, as the sound and the frames of one clip are.
    spans = (picture(b"a", (3, 4, 8, 9), random_rows(4, 0)), picture(b"b", (5, 6, 7, 20), random_rows(4, 1)))
    expected = one(make_stage(model), replaced(*spans, model=model)).tokens
    assert expected != one(make_stage(model), LONG).tokens
    assert one(make_stage(Around(model), prefill_chunk=chunk), with_pictures(*spans)).tokens == expected


def test_equal_prompts_with_other_media_share_no_prefix_and_equal_media_do(model: CausalLM) -> None:
    cat = picture(b"cat", range(2, 6), random_rows(4, 0))
    dog = picture(b"dog", range(2, 6), random_rows(4, 1))
    later_cat = picture(b"cat", range(4, 8), random_rows(4, 0))
    expected = [one(make_stage(model), replaced(span, model=model)).tokens for span in (cat, dog, later_cat, cat)]
    stage = make_stage(Around(model))
    hits, got = [], []
    for span in (cat, dog, later_cat, cat):
        got.append(one(stage, with_pictures(span)).tokens)
        hits.append(stage.stats().extra["prefix_hits"])
    assert got == expected
    assert hits == [0, 0, 0, 4]


def test_tokens_that_attend_to_those_of_the_next_item_share_no_prefix_with_others() -> None:
    """Two pictures side by side are one range: the first one's keys and values depend on the second one."""

    def hashed(*spans: MediaSpan, both_ways: Sequence[tuple[int, int]]) -> list[bytes]:
        return ContentKeys(replace(with_pictures(*spans), both_ways=tuple(both_ways)))(4, 8)

    first = picture(b"cat", range(4, 8), random_rows(4, 0))
    second, other = (picture(key, range(8, 12), random_rows(4, 1)) for key in (b"dog", b"cow"))
    alone, together = hashed(first, both_ways=[(4, 8)]), hashed(first, second, both_ways=[(4, 12)])
    assert len({tuple(alone), tuple(together), tuple(hashed(first, other, both_ways=[(4, 12)]))}) == 3
    assert together == hashed(first, second, both_ways=[(4, 12)])
    assert alone == hashed(first, second, both_ways=[(4, 8), (8, 12)])  # a text between them


def test_an_encoded_item_is_kept_for_the_next_request(model: CausalLM) -> None:
    stage = make_stage(Around(model), prefix_caching=False)
    span = picture(b"cat", range(2, 6), random_rows(4, 0))
    for _ in range(2):
        one(stage, with_pictures(span))
    extra = stage.stats().extra
    assert (extra["encoder_cache_hits"], extra["encoder_cache_bytes"]) == (1, 4 * 64 * 4)


def test_the_encoder_cache_stays_within_its_bound(model: CausalLM) -> None:
    stage = make_stage(Around(model), prefix_caching=False, encoder_cache=1500)
    for name in (b"cat", b"dog", b"cat"):
        one(stage, with_pictures(picture(name, range(2, 6), random_rows(4, 0))))
        assert stage.stats().extra["encoder_cache_bytes"] == 1024
    assert stage.stats().extra["encoder_cache_hits"] == 0


@pytest.mark.parametrize(
    ("span", "words"),
    [
        (picture(b"x", range(4), torch.zeros(4, 64), broken=torch.ones(1)), "ArithmeticError"),
        (picture(b"y", range(4), torch.zeros(3, 64)), "3 rows for 4 placeholders"),
    ],
)
def test_media_that_cannot_be_encoded_ends_its_own_request_only(model: CausalLM, span: MediaSpan, words: str) -> None:
    stage = make_stage(Around(model))
    answers = run(stage, request("bad", with_pictures(span)), request("good", OTHER))
    assert answers["bad", 0].finish is ERROR
    assert words in str(answers["bad", 0].error)
    assert all_free(stage)
    assert answers["good", 0].tokens == one(make_stage(model), OTHER).tokens


def test_a_component_without_an_encoder_refuses_media(model: CausalLM) -> None:
    answer = one(make_stage(model), with_pictures(picture(b"x", range(4), torch.zeros(4, 64))))
    assert answer.finish is ERROR
    assert isinstance(answer.error, StageError)


# --------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("kind", [ArithmeticError, SystemExit, PanicException])
def test_a_failed_step_ends_its_own_requests_and_the_others_go_on(model: CausalLM, kind: type[BaseException]) -> None:
    component = Around(model)
    stage = make_stage(component, max_running=2)

    def fail(step: int) -> None:
        if step == 2:
            raise kind("out of luck")

    component.before_forward = fail
    answers = run(stage, request("a", PROMPT), request("b", OTHER), request("c", LONG))
    for name in "ab":
        assert answers[name, 0].finish is ERROR
        assert isinstance(answers[name, 0].error, StageError)
        assert kind.__name__ in str(answers[name, 0].error)
        assert "out of luck" not in str(answers[name, 0].error)
    assert answers["c", 0].finish is LENGTH
    assert all_free(stage)
    assert answers["c", 0].tokens == one(make_stage(model), LONG).tokens


def test_all_answers_of_a_request_end_with_its_failed_step(model: CausalLM) -> None:
    component = Around(model)
    stage = make_stage(component)
    error = StageError("as it was raised")

    def fail(step: int) -> None:
        raise error

    component.before_forward = fail
    answers = run(stage, request("a", PROMPT, n=3))
    assert {key: (a.finish, a.error) for key, a in answers.items()} == {("a", i): (ERROR, error) for i in range(3)}
    assert all_free(stage)


def test_no_prefix_from_before_a_failed_step_is_reused(model: CausalLM) -> None:
    expected = one(make_stage(model), LONG).tokens
    component = Around(model)
    stage = make_stage(component)
    one(stage, LONG)

    def fail(step: int) -> None:
        for module in component.decoder.modules():
            for store in getattr(module, "kv_cache", ()):
                store.fill_(3.0)  # half-written: nothing in the pool is to be trusted
        component.before_forward = lambda step: None
        raise ArithmeticError

    component.before_forward = fail
    assert one(stage, OTHER).finish is ERROR
    hits = stage.stats().extra["prefix_hits"]
    assert one(stage, LONG).tokens == expected
    assert stage.stats().extra["prefix_hits"] == hits


def test_nan_logits_end_their_row_alone(model: CausalLM) -> None:
    component = Around(model)
    stage = make_stage(component)

    def spoil(step: int, logits: torch.Tensor) -> torch.Tensor:
        if step == 3:
            logits = logits.clone()
            logits[0] = float("nan")
        return logits

    component.change_logits = spoil
    answers = run(stage, request("a", PROMPT), request("b", OTHER))
    assert answers["a", 0].finish is ERROR
    assert "NaN" in str(answers["a", 0].error)
    assert len(answers["a", 0].tokens) == 2
    assert all_free(stage)
    assert answers["b", 0].tokens == one(make_stage(model), OTHER).tokens


@pytest.mark.parametrize("place", ["append", "cached"])
def test_whatever_breaks_in_one_answer_s_update_ends_it_alone(
    model: CausalLM, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage(model)
    inner = getattr(stage.scheduler, place)

    def broken(key: str, *rest: int) -> object:
        if key.startswith("a/0"):
            raise RuntimeError("a secret of the user")
        return inner(key, *rest)

    monkeypatch.setattr(stage.scheduler, place, broken)
    answers = run(stage, request("a", PROMPT, n=2), request("b", OTHER))
    assert answers["a", 0].finish is ERROR
    assert isinstance(answers["a", 0].error, StageError)
    assert "secret" not in str(answers["a", 0].error)
    assert answers["a", 1].finish is LENGTH
    assert answers["b", 0].tokens == one(make_stage(model), OTHER).tokens
    assert all_free(stage)


# ---------------------------------------------------------------------------------------------- insight


def test_of_many_answers_those_that_wait_let_the_next_request_pass(model: CausalLM) -> None:
    stage = make_stage(model, max_running=2)
    stage.submit(request("many", PROMPT, n=8, max_tokens=4, ignore_eos=True))
    stage.step()
    stage.submit(request("next", OTHER, max_tokens=2, ignore_eos=True))
    ended: list[str] = []
    while stage.has_work():
        ended += [chunk.request_id for chunk in stage.step() if chunk.finish is not None]
    assert ended == ["many", "many", "next", *["many"] * 6]
    assert all_free(stage)


def test_stats_say_what_waits_runs_and_was_done(model: CausalLM) -> None:
    stage = make_stage(model, max_running=1, run_ahead=False)
    stage.submit(request("a", PROMPT, max_tokens=3))
    stage.submit(request("b", OTHER, max_tokens=1))
    assert (stage.stats().waiting, stage.stats().running) == (2, 0)
    stage.step()
    stats = stage.stats()
    assert (stats.waiting, stats.running, stats.starved, stats.steps) == (1, 1, 0, 1)
    assert stats.tokens == len(PROMPT)
    assert stats.extra["blocks_free"] == stats.extra["blocks"] - 2
    stage.drain()
    stats = stage.stats()
    assert (stats.waiting, stats.running, stats.steps) == (0, 0, 4)
    assert stats.tokens == len(PROMPT) + 2 + len(OTHER)


def test_the_integrity_check_finds_tables_that_disagree(model: CausalLM) -> None:
    stage = make_stage(model)
    stage.submit(request("a", PROMPT))
    stage.runner.remove("a/0/1")
    with pytest.raises(StageError, match="different sequences"):
        stage.check_integrity()


@pytest.mark.parametrize(("memory", "blocks"), [(1, 1), (5, 5), (10**6, 16)])
def test_kv_memory_becomes_blocks_never_more_than_are_useful(model: CausalLM, memory: int, blocks: int) -> None:
    size = block_bytes(model, 8)
    stage = make_stage(model, kv_blocks=None, kv_memory=memory * size + 1, max_running=4, max_model_len=32)
    assert stage.stats().extra["blocks"] == blocks


def test_memory_for_less_than_a_block_is_refused(model: CausalLM) -> None:
    with pytest.raises(CapacityError, match="holds no block"):
        make_stage(model, kv_blocks=None, kv_memory=block_bytes(model, 8) - 1)


def test_planned_memory_holds_at_least_one_sequence_of_full_length(model: CausalLM) -> None:
    assert make_stage(model, kv_blocks=None, kv_memory="auto").max_length == model.spec.max_length


# -------------------------------------------------------------------------------------------- side rows


@pytest.fixture(scope="session")
def talker(model: CausalLM) -> Around:
    return Around(model, side_input=True)


SIDE = random_rows(6, 5)


def streaming(rows: torch.Tensor | None = None, prompt: Sequence[int] = PROMPT) -> ARInput:
    return ARInput(tuple(prompt), streaming=True, side_rows=rows)


def test_without_side_rows_a_request_starves_after_its_first_token(talker: Around) -> None:
    stage = make_stage(talker)
    answers = run(stage, request("a", streaming()))
    assert len(answers["a", 0].tokens) == 1
    assert answers["a", 0].finish is None
    assert stage.stats().starved == 1
    stage.feed("a", SideRows(SIDE[:2]))
    assert stage.has_work()
    drain(stage, answers)
    assert len(answers["a", 0].tokens) == 3
    stage.feed("a", SideRows(SIDE[2:], final=True))
    drain(stage, answers)
    assert (len(answers["a", 0].tokens), answers["a", 0].finish) == (8, LENGTH)
    assert all_free(stage)


def test_a_starved_request_does_not_hold_back_others(talker: Around, model: CausalLM) -> None:
    stage = make_stage(talker)
    answers = run(stage, request("starved", streaming()), request("free", OTHER))
    assert answers["free", 0].finish is LENGTH
    assert answers["starved", 0].finish is None
    stage.abort("starved")
    assert all_free(stage)


@pytest.mark.parametrize("cuts", [(6,), (1, 2, 3), (0, 6), (3, 0, 3), (1, 1, 1, 1, 1, 1)])
@pytest.mark.parametrize("known", [0, 2, 6])
def test_the_answer_does_not_depend_on_how_the_rows_were_cut(talker: Around, cuts: tuple[int, ...], known: int) -> None:
    whole = make_stage(talker)
    whole.submit(request("a", streaming(SIDE), max_tokens=10))
    whole.feed("a", SideRows(SIDE[:0], final=True))
    expected = drain(whole)["a", 0].tokens
    assert len(expected) == 10

    stage = make_stage(talker)
    stage.submit(request("a", streaming(SIDE[:known]), max_tokens=10))
    answers = Answers()
    sent = known
    for cut in cuts:
        drain(stage, answers)
        piece = SIDE[sent : max(sent, min(sum(cuts), sent + cut))]
        stage.feed("a", SideRows(piece))
        sent += len(piece)
    stage.feed("a", SideRows(SIDE[sent:], final=True))
    drain(stage, answers)
    assert answers["a", 0].tokens == expected


def test_side_rows_matter(talker: Around) -> None:
    def tokens(rows: torch.Tensor) -> list[int]:
        stage = make_stage(talker)
        stage.submit(request("a", streaming(rows), max_tokens=7))
        return drain(stage)["a", 0].tokens

    assert tokens(SIDE) == tokens(SIDE.clone()) != tokens(SIDE.flip(0))


def test_the_last_final_row_serves_every_further_token(talker: Around) -> None:
    stage = make_stage(talker)
    stage.submit(request("a", streaming(), max_tokens=10))
    stage.feed("a", SideRows(SIDE[:3], final=True))
    repeated = drain(stage)["a", 0].tokens
    spelled = torch.cat((SIDE[:3], talker.final_side_rows().expand(7, -1)))
    stage = make_stage(talker)
    stage.submit(request("a", streaming(spelled), max_tokens=10))
    assert drain(stage)["a", 0].tokens == repeated


def test_when_the_upstream_has_ended_none_of_its_memory_is_held(talker: Around) -> None:
    stage = make_stage(talker)
    stage.submit(request("a", streaming(), max_tokens=10))
    for row in SIDE[:3]:
        stage.feed("a", SideRows(row.repeat(50, 1)[:1]))
    stage.feed("a", SideRows(SIDE[3:4].repeat(50, 1)[:1], final=True))
    (rows,) = stage.runner._rows.values()
    assert len(rows.side) == 5
    assert max(row.untyped_storage().nbytes() for row in rows.side) == 5 * SIDE[0].nbytes
    assert len(drain(stage)["a", 0].tokens) == 10


def test_more_rows_than_a_buffer_holds_are_kept(talker: Around) -> None:
    rows = random_rows(150, 9)
    stage = make_stage(talker)
    stage.submit(request("a", streaming(rows), max_tokens=140))
    expected = drain(stage)["a", 0].tokens
    stage = make_stage(talker)
    stage.submit(request("a", streaming(), max_tokens=140))
    answers = Answers()
    for start in range(0, 150, 30):
        stage.feed("a", SideRows(rows[start : start + 30]))
        drain(stage, answers)
    assert answers["a", 0].tokens == expected


def test_a_request_preempted_while_it_streams_answers_as_if_it_had_not_been(talker: Around) -> None:
    def tokens(blocks: int) -> tuple[list[int], float]:
        stage = make_stage(talker, kv_blocks=blocks, max_running=2)
        stage.submit(request("first", OTHER, max_tokens=24))
        stage.submit(request("second", streaming(), max_tokens=12))
        answers = Answers()
        for row in SIDE:
            answers.take(stage.step())
            stage.check_integrity()
            stage.feed("second", SideRows(row[None]))
        stage.feed("second", SideRows(SIDE[:0], final=True))
        drain(stage, answers)
        return answers["second", 0].tokens, stage.stats().preemptions

    tight, preemptions = tokens(4)
    roomy, none = tokens(64)
    assert (preemptions > 0, none) == (True, 0)
    assert tight == roomy


def test_a_step_that_only_preempts_is_not_forgotten_by_the_runner(talker: Around) -> None:
    """The better-ranked request starves on its blocks, so the other one gives way in a step without a batch."""

    def tokens(blocks: int) -> tuple[list[list[int]], float]:
        stage = make_stage(talker, kv_blocks=blocks, prefix_caching=False)
        stage.submit(request("starved", streaming(prompt=LONG[:15]), max_tokens=9))
        stage.submit(request("pushed", LONG[20:27], max_tokens=9))
        answers = drain(stage)
        preemptions = stage.stats().preemptions
        # A third one gets the very block that the pushed one had before.
        stage.submit(request("heir", OTHER, max_tokens=3))
        stage.feed("starved", SideRows(SIDE, final=True))
        drain(stage, answers)
        assert all_free(stage)
        return [answers[name, 0].tokens for name in ("starved", "pushed", "heir")], preemptions

    tight, preemptions = tokens(3)
    roomy, none = tokens(64)
    assert (preemptions, none) == (1, 0)
    assert tight == roomy


# ------------------------------------------------------------------------------------------ hidden rows


@pytest.fixture(scope="session")
def emitter(model: CausalLM) -> Around:
    return Around(model, emit_size=128)


def rows_of(answer: Answer) -> torch.Tensor:
    return torch.cat(answer.hidden)


@pytest.mark.parametrize(
    "budget",
    [
        {},
        {"prefix_caching": False},
        {"prefill_chunk": 3},
        {"max_batch_tokens": 7},
        {"kv_blocks": 9, "max_running": 3},
        {"kv_blocks": 9, "max_running": 3, "prefix_caching": False, "prefill_chunk": 5},
    ],
)
def test_each_computed_token_gives_its_hidden_row_once_and_the_same_way(
    emitter: Around, budget: dict[str, object]
) -> None:
    prompts = {"a": LONG, "b": LONG[:30] + OTHER, "c": LONG}
    expected = {}
    for name, prompt in prompts.items():
        expected[name] = run(make_stage(emitter, prefix_caching=False), request(name, prompt, emit=True))[name, 0]
    stage = make_stage(emitter, **budget)
    answers = run(stage, *(request(name, prompt, emit=True) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        answer = answers[name, 0]
        assert answer.tokens == expected[name].tokens
        # The last sampled token is never fed back, so it has no row.
        assert answer.hidden_rows == len(prompt) + len(answer.tokens) - 1
        torch.testing.assert_close(rows_of(answer), rows_of(expected[name]), rtol=1e-4, atol=1e-4)
    if "kv_blocks" in budget:
        assert stage.stats().preemptions > 0


def test_rows_of_a_reused_prefix_come_from_those_computed_before(emitter: Around) -> None:
    stage = make_stage(emitter)
    first = run(stage, request("a", LONG))["a", 0]
    assert not first.hidden
    second = run(stage, request("b", LONG, emit=True))["b", 0]
    assert stage.stats().extra["prefix_hits"] == 4
    fresh = run(make_stage(emitter), request("c", LONG, emit=True))["c", 0]
    assert second.hidden_rows == fresh.hidden_rows
    torch.testing.assert_close(rows_of(second), rows_of(fresh), rtol=1e-4, atol=1e-4)


def test_rows_know_where_media_stand(emitter: Around) -> None:
    span = picture(b"cat", range(2, 6), random_rows(4, 0))
    answer = run(make_stage(emitter), request("a", with_pictures(span), emit=True))["a", 0]
    embeds = rows_of(answer)[:, :64]
    assert not embeds[2:6].any()
    torch.testing.assert_close(embeds[6:40], emitter.embed(torch.tensor(LONG[6:])))


def test_a_prompt_in_chunks_hands_its_rows_out_as_they_come(emitter: Around) -> None:
    stage = make_stage(emitter, prefill_chunk=16)
    stage.submit(request("a", LONG, emit=True))
    chunks = [c for _ in range(3 + RUN_AHEAD) for c in stage.step() if isinstance(c.payload, TokenChunk)]
    sizes = [(c.payload.hidden_start, len(c.payload.token_ids)) for c in chunks if isinstance(c.payload, TokenChunk)]
    assert sizes == [(0, 0), (16, 0), (32, 1)]
    stage.abort("a")


@pytest.mark.parametrize("kind", [LookupError, PanicException])
def test_an_answer_whose_text_breaks_ends_alone(
    model: CausalLM, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage(model)
    expected = one(make_stage(model), OTHER).tokens
    stage = make_stage(model)
    stage.submit(request("bad", PROMPT))
    stage.submit(request("good", OTHER))
    broken = next(a for key, a in stage._answers.items() if key.startswith("bad/")).text

    def push(token_id: int) -> str:
        raise kind("what the user said")

    monkeypatch.setattr(broken, "push", push, raising=True)
    answers = drain(stage)
    assert answers["bad", 0].finish is ERROR
    assert "what the user said" not in str(answers["bad", 0].error)
    assert (answers["good", 0].finish, answers["good", 0].tokens) == (LENGTH, expected)
    assert all_free(stage)


class FakeGraphs:
    """What a captured step does, without a graph: logits of every row that it is given."""

    def __init__(self, stage: ARStage) -> None:
        self._runner = stage.runner
        self.rows = 0

    def run(self, batch: Sequence[ScheduledSequence], *_others: object) -> StepTensors:
        assert all(item.sample and item.count == 1 for item in batch)
        self.rows += len(batch)
        return self._runner._forward(batch)


@pytest.mark.parametrize("chunk", [1, 3])
def test_captured_steps_serve_only_rows_that_are_sampled(model: CausalLM, chunk: int) -> None:
    """Recomputed tokens of a preempted sequence come one at a time too, but nothing is sampled from them."""
    budget = {"kv_blocks": 9, "block_size": 8, "prefill_chunk": chunk, "prefix_caching": False}
    requests = [request(str(i), LONG[i : i + 12], max_tokens=24, ignore_eos=True) for i in range(4)]
    plain = run(make_stage(model, **budget), *requests)
    stage = make_stage(model, **budget)
    graphs = FakeGraphs(stage)
    stage.runner.graphs = graphs  # type: ignore[assignment]
    graphed = run(stage, *requests)
    assert graphs.rows > 0
    assert stage.stats().preemptions > 0
    assert {k: a.tokens for k, a in graphed.items()} == {k: a.tokens for k, a in plain.items()}


def test_where_tokens_are_codes_ignore_eos_never_samples_an_end_token(model: CausalLM) -> None:
    component = Around(model)
    component.tokenizer = None
    component.eos_token_ids = (one(make_stage(model), PROMPT).tokens[0],)
    answer = one(make_stage(component), PROMPT, ignore_eos=True, max_tokens=6)
    assert answer.finish is LENGTH
    assert not set(component.eos_token_ids) & set(answer.tokens)


# -------------------------------------------------------------------------------------------- run ahead


def test_a_step_is_launched_before_the_last_ones_tokens_are_read(model: CausalLM) -> None:
    stage = make_stage(model, run_ahead=True)
    stage.submit(request("a", PROMPT, max_tokens=3))
    seen = []
    while stage.has_work():
        chunks = [c for c in stage.step() if c.payload is not None]
        seen.append((stage.scheduler.steps, len(chunks)))
    # Three steps are launched and read one after another, each read a step late; none is launched in vain.
    assert seen == [(1, 0), (2, 1), (3, 1), (3, 1)]


def test_a_request_that_takes_the_id_of_an_aborted_one_gets_none_of_its_tokens(model: CausalLM) -> None:
    expected = one(make_stage(model), OTHER).tokens
    stage = make_stage(model, run_ahead=True)
    stage.submit(request("a", PROMPT))
    stage.step()
    stage.abort("a")
    assert run(stage, request("a", OTHER))["a", 0].tokens == expected
    assert all_free(stage)


def test_an_end_that_is_noticed_late_gives_no_token_too_many(model: CausalLM) -> None:
    whole = one(make_stage(model), PROMPT).tokens
    stage = make_stage(model, run_ahead=True)
    stopped = run(stage, request("a", PROMPT, stop_token_ids=(whole[3],)), request("b", OTHER, max_tokens=12))
    assert stopped["a", 0].tokens == whole[: whole.index(whole[3]) + 1]
    assert stopped["b", 0].tokens == one(make_stage(model), OTHER, max_tokens=12).tokens
    assert all_free(stage)


@pytest.mark.parametrize("call", ["launch", "read"])
def test_a_step_that_fails_ends_its_own_requests_alone(
    model: CausalLM, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage(model, run_ahead=True)
    stage.submit(request("a", PROMPT))
    answers = Answers()
    answers.take(stage.step())
    monkeypatch.setattr(stage.runner, call, lambda *_: (_ for _ in ()).throw(ArithmeticError("broken")))
    answers.take(stage.step())
    monkeypatch.undo()
    drain(stage, answers)
    assert answers["a", 0].finish is ERROR
    assert run(stage, request("b", OTHER))["b", 0].finish is LENGTH
    assert all_free(stage)


def test_a_launch_that_fails_takes_nothing_from_those_that_have_just_ended(model: CausalLM) -> None:
    """What the step before sampled is read first: "a" has its stop token, though nobody knew when "b" was launched."""
    component = Around(model)
    first = one(make_stage(component), PROMPT).tokens[0]
    stage = make_stage(component, run_ahead=True)
    answers = Answers()
    stage.submit(request("a", PROMPT, stop_token_ids=(first,)))
    answers.take(stage.step())
    stage.submit(request("b", OTHER))
    component.before_forward = lambda step: (_ for _ in ()).throw(ArithmeticError("broken"))
    answers.take(stage.step())
    component.before_forward = lambda step: None
    drain(stage, answers)
    assert (answers["a", 0].finish, answers["a", 0].tokens) == (STOP, [first])
    assert answers["b", 0].finish is ERROR
    assert all_free(stage)


def test_media_that_cannot_be_encoded_are_tried_once(emitter: Around, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    encode = emitter.encode
    monkeypatch.setattr(emitter, "encode", lambda span: tried.append(span) or encode(span))
    span = replace(picture(b"cat", range(2, 6), random_rows(4, 0)), inputs={"broken": torch.zeros(1)})
    answers = run(make_stage(emitter, prefill_chunk=4), request("a", with_pictures(span)))
    assert answers["a", 0].finish is ERROR
    assert len(tried) == 1


# ----------------------------------------------------------------------------------------- merged layers


def test_layers_over_the_same_input_are_one_product_with_the_same_tokens(folder: Path, model: CausalLM) -> None:
    expected = one(make_stage(model, merge_linears=False), PROMPT).tokens
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    groups = merge_linears(plain.get_decoder())
    assert groups == 2 * model.spec.num_layers
    assert merge_linears(plain.get_decoder()) == 0, "once"
    ids = torch.tensor([PROMPT])
    tokens = plain.generate(ids, max_new_tokens=8, do_sample=False)[0, len(PROMPT) :].tolist()
    assert tokens == expected[: len(tokens)]


def test_a_merged_layer_asked_alone_or_out_of_turn_gives_its_own_output() -> None:
    parent = torch.nn.Module()
    for name, size in (("q_proj", 6), ("k_proj", 2), ("v_proj", 2)):
        setattr(parent, name, torch.nn.Linear(4, size))
    layers = [parent.q_proj, parent.k_proj, parent.v_proj]
    assert merge_linears(parent) == 1
    x, y = torch.randn(3, 4), torch.randn(5, 4)
    for index, given in ((2, x), (0, x), (1, y), (1, x), (0, y), (2, y)):
        merged = (parent.q_proj, parent.k_proj, parent.v_proj)[index]
        torch.testing.assert_close(merged(given), layers[index](given))


def test_layers_that_differ_are_not_merged() -> None:
    parent = torch.nn.Module()
    parent.gate_proj, parent.up_proj = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6, bias=False)
    assert merge_linears(parent) == 0


# ---------------------------------------------------------------------------------------------- warm-up


@pytest.mark.parametrize("budget", [{}, {"max_running": 1}, {"max_model_len": 6}])
def test_a_warm_up_leaves_nothing_behind(model: CausalLM, budget: dict[str, object]) -> None:
    expected = one(make_stage(model, **budget), (5, 17), max_tokens=3).tokens
    stage = make_stage(model, **budget)
    stage.warm_up()
    stage.check_integrity()
    assert all_free(stage)
    assert not stage.has_work()
    assert one(stage, (5, 17), max_tokens=3).tokens == expected


# --------------------------------------------------------------------------------------------- CUDA graphs


def test_steps_that_cannot_be_captured_run_without(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan has room for graphs, but others may use the device, too."""
    tried: list[tuple[int, int]] = []

    def capture(runner: object, size: int, length: int, pool: object) -> object:
        tried.append((size, length))
        if length == 8:
            return object()
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(graphs, "_LENGTHS", (8,))
    monkeypatch.setattr(graphs, "_Captured", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    expected = run(make_stage(model), request("a", PROMPT))["a", 0].tokens
    stage = make_stage(model)
    stage.runner.graphs = DecodeGraphs(stage.runner, [1, 2], stage.max_length)
    answer = run(stage, request("a", PROMPT))["a", 0]
    assert (answer.tokens, answer.finish) == (expected, LENGTH)
    assert tried == [(2, stage.max_length), (2, 8), (1, 8), (1, stage.max_length)]
    assert caplog.text.count("no CUDA graph for") == 2
