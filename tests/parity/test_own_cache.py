"""Models that cannot use the paged cache, served one sequence at a time with transformers' own: the same contract."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from omnistage.cli.model_runner import OmniRunner
from omnistage.config import OmniEngineArgs, resolve
from omnistage.config.schema import ARBudget
from omnistage.core.errors import InvalidRequestError, UnsupportedModelError
from omnistage.core.family import LoadContext
from omnistage.core.params import SamplingParams, StructuredOutput
from omnistage.core.types import ARInput, FinishReason, RequestInfo, StageChunk, StageInput, TokenChunk
from omnistage.engines.ar.memory import OWN_RUNNING, ar_needs
from omnistage.engines.ar.scheduler import ScheduledSequence, SchedulerOutput
from omnistage.engines.ar.stage import ARStage
from omnistage.hf import transformers
from omnistage.models import _tiny_common as common
from omnistage.models.causal_lm import tiny, verify
from omnistage.models.causal_lm.component import load_any
from omnistage.models.causal_lm.own_cache import OwnCacheLM
from omnistage.models.registry import REGISTRY

PROMPTS = [tuple(range(3, 3 + length)) for length in (4, 19, 9, 30)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def make_model(kind: str, **changes: object) -> transformers.PreTrainedModel:
    shape = {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, kind)(**{**shape, "pad_token_id": 0, "initializer_range": 0.3, **changes})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config = transformers.GenerationConfig(eos_token_id=2, pad_token_id=0)
    return model


def gptj(**changes: object) -> transformers.PreTrainedModel:
    return make_model("GPTJConfig", num_attention_heads=4, rotary_dim=4, n_positions=512, **changes)


def mamba() -> transformers.PreTrainedModel:
    return make_model("MambaConfig", state_size=8, time_step_rank=4)


def reference(model: transformers.PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=GREEDY.max_tokens)
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def run(stage: ARStage, asked: Sequence[tuple[tuple[int, ...], SamplingParams]]) -> list[list[int]]:
    for number, (prompt, params) in enumerate(asked):
        stage.submit(StageInput(RequestInfo(str(number)), params, ARInput(prompt)))
    return tokens_of(stage.drain(), len(asked))


def tokens_of(chunks: Sequence[StageChunk], count: int) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in range(count)]
    for chunk in chunks:
        assert chunk.error is None
        if isinstance(chunk.payload, TokenChunk):
            answers[int(chunk.request_id)].extend(chunk.payload.token_ids)
    return answers


@pytest.mark.parametrize("make", [gptj, mamba])
def test_requests_in_turn_in_chunks_and_preempted_get_the_answers_of_generate(make: object) -> None:
    model = make()  # type: ignore[operator]
    expected = [reference(model, prompt) for prompt in PROMPTS]
    budget = ARBudget(kv_blocks=9, block_size=8, max_batch_tokens=24, prefill_chunk=8)
    stage = ARStage("thinker", OwnCacheLM(model), budget)
    assert run(stage, [(prompt, GREEDY) for prompt in PROMPTS]) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    stats = stage.stats()
    assert stats.preemptions > 0
    assert stats.extra["one_by_one"] == 1.0
    stage.check_integrity()


def test_a_seed_gives_the_same_answer_in_any_company() -> None:
    component = OwnCacheLM(gptj())
    params = SamplingParams(temperature=1.0, max_tokens=10, seed=5)
    budget = ARBudget(kv_blocks=64, block_size=8)
    alone = run(ARStage("thinker", component, budget), [(PROMPTS[1], params)])[0]
    others = [(prompt, SamplingParams(temperature=1.0, max_tokens=10, seed=9)) for prompt in PROMPTS]
    company = run(ARStage("thinker", component, budget), [*others, (PROMPTS[1], params)])
    assert company[-1] == alone != company[1]


def test_a_token_that_has_to_run_again_does_not_change_the_state() -> None:
    model = mamba()
    stage = ARStage("thinker", OwnCacheLM(model), ARBudget(kv_blocks=16, block_size=8))
    runner, prompt = stage.runner, PROMPTS[1]
    runner.add("a", ARInput(prompt), GREEDY, capacity=40, emit=False)
    with torch.inference_mode():
        whole = runner._forward([ScheduledSequence("a", 0, len(prompt), True, [])]).logits
        # As after a mask that came late: the last token of the prompt is scheduled by itself.
        again = runner._forward([ScheduledSequence("a", len(prompt) - 1, 1, True, [])]).logits
    assert whole is not None
    assert again is not None
    assert torch.equal(whole, again)


def test_a_preempted_sequence_loses_its_state_and_is_computed_again_as_at_first() -> None:
    model = mamba()
    stage = ARStage("thinker", OwnCacheLM(model), ARBudget(kv_blocks=16, block_size=8))
    runner, prompt = stage.runner, PROMPTS[1]
    runner.add("a", ARInput(prompt), GREEDY, capacity=40, emit=False)
    token = runner.read(runner.launch(SchedulerOutput((ScheduledSequence("a", 0, len(prompt), True, []),)))).sampled[
        "a"
    ]
    step = ScheduledSequence("a", len(prompt), 1, True, [])
    with torch.inference_mode():
        before = runner._forward([step]).logits
    runner.launch(SchedulerOutput((), preempted=("a",)))
    assert not runner._states  # type: ignore[attr-defined]
    whole = ScheduledSequence("a", 0, len(prompt) + 1, True, [])
    with torch.inference_mode():
        again = runner._forward([whole]).logits
    assert token.token_id == reference(model, prompt)[0]
    assert before is not None
    assert again is not None
    assert torch.equal(before, again)


def test_an_abort_gives_the_state_back_and_the_others_go_on() -> None:
    model = gptj()
    stage = ARStage("thinker", OwnCacheLM(model), ARBudget(kv_blocks=64, block_size=8))
    for name, prompt in (("0", PROMPTS[0]), ("1", PROMPTS[1])):
        stage.submit(StageInput(RequestInfo(name), GREEDY, ARInput(prompt)))
    chunks = stage.step() + stage.step()
    stage.abort("1")
    assert len(stage.runner._states) == 1  # type: ignore[attr-defined]
    assert tokens_of([*chunks, *stage.drain()], 2)[0] == reference(model, PROMPTS[0])
    assert not stage.runner._states  # type: ignore[attr-defined]


def test_several_answers_stop_tokens_and_logprobs_are_those_of_any_stage() -> None:
    model = gptj()
    expected = reference(model, PROMPTS[1])
    stage = ARStage("thinker", OwnCacheLM(model), ARBudget(kv_blocks=64, block_size=8))
    params = SamplingParams(temperature=0.0, max_tokens=12, n=2, stop_token_ids=(expected[4],), logprobs=2)
    stage.submit(StageInput(RequestInfo("0"), params, ARInput(PROMPTS[1])))
    chunks = stage.drain()
    ends = [chunk.finish for chunk in chunks if chunk.finish is not None]
    assert ends == [FinishReason.STOP] * 2
    first = expected.index(expected[4]) + 1
    for index in range(2):
        payloads = [c.payload for c in chunks if c.index == index and isinstance(c.payload, TokenChunk)]
        assert [token for p in payloads for token in p.token_ids] == expected[:first]
        assert all(len(p.logprobs) == 1 for p in payloads)


# ---------------------------------------------------------------------------------------------- limits


def test_sequences_are_few_their_prefixes_are_not_shared_and_their_length_has_a_default() -> None:
    component = OwnCacheLM(mamba())
    stage = ARStage("thinker", component, ARBudget(block_size=8))
    assert stage.stats().capacity == OWN_RUNNING
    assert not stage.scheduler.pool.prefix_caching
    assert stage.max_length == 4096
    assert ARStage("thinker", component, ARBudget(block_size=8, max_model_len=9000)).max_length == 9000


def test_the_memory_of_a_sequence_is_known_from_the_model() -> None:
    state = OwnCacheLM(gptj()).spec.own_state
    assert state is not None
    assert (state.token_bytes, state.fixed_bytes) == (2 * 3 * 32 * 4, 0)
    recurrent = OwnCacheLM(mamba()).spec.own_state
    assert recurrent is not None
    assert recurrent.token_bytes == 0
    # Three layers of 64 channels, each with 8 numbers of state and 4 of its convolution.
    assert recurrent.fixed_bytes == 3 * 64 * (8 + 4) * 4


def test_the_memory_plan_counts_the_states_of_all_sequences_and_a_whole_prompt() -> None:
    planned = OwnCacheLM(mamba().to("meta"))
    needs = ar_needs(planned, ARBudget(block_size=8), cuda=False)
    state = planned.spec.own_state
    assert state is not None
    assert needs.memory.caches == state.fixed_bytes * OWN_RUNNING > 0
    assert needs.max_running == OWN_RUNNING
    short = ar_needs(planned, ARBudget(block_size=8, max_model_len=64), cuda=False)
    assert needs.memory.activations > short.memory.activations


# ------------------------------------------------------------------------------------------- what we refuse


def test_an_encoder_is_refused() -> None:
    model = make_model("RemBertConfig", num_attention_heads=4, intermediate_size=32, is_decoder=False)
    with pytest.raises(UnsupportedModelError, match="attend to later ones"):
        OwnCacheLM(model)
    OwnCacheLM(make_model("RemBertConfig", num_attention_heads=4, intermediate_size=32, is_decoder=True))


def test_a_model_that_generate_fails_with_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gptj()

    def broken(*args: object, **kwargs: object) -> None:
        raise TypeError("forward() missing 1 required argument")

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(UnsupportedModelError, match="own generate fails with it"):
        OwnCacheLM(model)


def test_a_model_that_remembers_outside_of_its_cache_runs_one_request_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = gptj()
    plain, memory = model.forward, {"shift": 0}

    def forgetful(input_ids: torch.Tensor, **kwargs: object) -> object:
        """The answer depends on the prompt that came last, whosever it was."""
        if input_ids.shape[1] > 1:
            memory["shift"] = int(input_ids[0, 0])
        out = plain(input_ids=input_ids, **kwargs)
        out.logits = out.logits.roll(memory["shift"], -1)
        return out

    monkeypatch.setattr(model, "forward", forgetful)
    component = OwnCacheLM(model)
    assert component.spec.own_state is not None
    assert component.spec.own_state.alone
    prompts = [(first, *PROMPTS[1]) for first in (3, 9, 4)]
    expected = [reference(model, prompt) for prompt in prompts]
    stage = ARStage("thinker", component, ARBudget(kv_blocks=64, block_size=8))
    assert stage.stats().capacity == 1
    assert run(stage, [(prompt, GREEDY) for prompt in prompts]) == expected


def test_prompt_embeddings_are_refused_before_anything_runs() -> None:
    stage = ARStage("thinker", OwnCacheLM(gptj()), ARBudget(kv_blocks=64, block_size=8))
    with pytest.raises(InvalidRequestError, match="token ids, not embeddings"):
        stage.submit(StageInput(RequestInfo("0"), GREEDY, ARInput((0, 0), embeds=torch.zeros(2, 32))))


# ------------------------------------------------------------------------------------------------ loading


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """RWKV, whose state is in no cache of transformers, with a tokenizer."""
    model = make_model("RwkvConfig", vocab_size=1024, attention_hidden_size=32, context_length=512)
    common.write_tokenizer(tmp_path, tiny.special_ids(), common.tokenizer_settings("PreTrainedTokenizerFast", 512))
    model.save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_whose_model_cannot_use_the_paged_cache_is_loaded_and_said_to_be_slow(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resolved = resolve(OmniEngineArgs(model=str(folder), device="cpu", dtype="float32"), registry=REGISTRY)
    context = LoadContext(
        resolved.model, "thinker", resolved.config.pipeline.stages["thinker"], torch.device("cpu"), torch.float32
    )
    with caplog.at_level(logging.WARNING):
        assert isinstance(load_any(context), OwnCacheLM)
    assert "one sequence at a time" in caplog.text
    assert "names no attention heads" in caplog.text
    planned = load_any(LoadContext(context.model, "thinker", context.stage, torch.device("meta"), torch.float32))
    assert isinstance(planned, OwnCacheLM)


def test_verify_compares_such_a_model_too(folder: Path) -> None:
    rows = verify.run(OmniRunner(folder), cases=3)
    assert len(rows) == 6
    assert all(row.ok for row in rows)


def test_a_grammar_holds_for_such_a_model(folder: Path) -> None:
    pytest.importorskip("xgrammar")
    resolved = resolve(OmniEngineArgs(model=str(folder), device="cpu", dtype="float32"), registry=REGISTRY)
    stage_config = resolved.config.pipeline.stages["thinker"]
    component = load_any(LoadContext(resolved.model, "thinker", stage_config, torch.device("cpu"), torch.float32))
    stage = ARStage("thinker", component, ARBudget(kv_blocks=64, block_size=8))
    params = SamplingParams(temperature=0.0, max_tokens=8, structured=StructuredOutput(regex="(yes|no)"))
    stage.submit(StageInput(RequestInfo("0"), params, ARInput(PROMPTS[0])))
    chunks = stage.drain()
    text = "".join(chunk.payload.text for chunk in chunks if isinstance(chunk.payload, TokenChunk))
    assert text in ("yes", "no")


def test_a_config_that_transformers_makes_no_model_of_is_refused_for_that(folder: Path) -> None:
    # A music model without a language model's settings, though transformers lists it among causal LMs.
    config = transformers.MusicgenConfig().to_dict()
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["MusicgenForCausalLM"]}))
    resolved = resolve(OmniEngineArgs(model=str(folder), device="cpu", dtype="float32"), registry=REGISTRY)
    stage = resolved.config.pipeline.stages["thinker"]
    with pytest.raises(UnsupportedModelError, match=r"cannot make the musicgen .* \(AttributeError"):
        load_any(LoadContext(resolved.model, "thinker", stage, torch.device("cpu"), torch.float32))
