"""A model over several ranks: the same tokens as on one, an equal share of weights and keys, and what is refused."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from omnistage.config import ARStageConfig, OmniEngineArgs, resolve
from omnistage.config.schema import ARBudget
from omnistage.core.errors import ConfigError, OmniError, StageLostError, UnsupportedModelError
from omnistage.core.family import LoadContext
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, RequestInfo, StageInput, TokenChunk
from omnistage.engines.ar.attention import PagedContext
from omnistage.engines.ar.component import ARComponent, ARSpec
from omnistage.engines.ar.memory import block_bytes
from omnistage.engines.ar.parallel import FollowingComponent, LeadingRank, ParallelStage
from omnistage.engines.ar.sharding import RankGroup
from omnistage.engines.ar.stage import ARStage
from omnistage.engines.ar.step_plan import Forward, Logits
from omnistage.hf import transformers
from omnistage.models.causal_lm import tiny
from omnistage.models.causal_lm.component import CausalLM
from omnistage.models.registry import REGISTRY
from omnistage.pipeline.build import load_component, plan_memory

pytestmark = pytest.mark.timeout(300)

SIZES = {
    "vocab_size": 131,  # not divided evenly: the last rank's rows are filled up
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),  # with biases
    "qwen3": Qwen3Config(**SIZES, head_dim=16),  # with norms over heads
    "mistral": MistralConfig(**SIZES, sliding_window=16),
    "granite": GraniteConfig(**SIZES, logits_scaling=4.0, residual_multiplier=0.5),
    "gemma2": Gemma2Config(**SIZES, head_dim=16, sliding_window=16, attn_logit_softcapping=5.0),
    "phi3": Phi3Config(**SIZES),  # with fused projections: every rank has all heads
    "qwen3_moe": Qwen3MoeConfig(**SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None),
    "deepseek_v3": DeepseekV3Config(
        **SIZES,
        first_k_dense_replace=1,  # and a layer with shared experts
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
}
PROMPTS = [tuple((7 * i + 3 * j) % 131 for j in range(length)) for i, length in enumerate((40, 3, 17, 26, 9))]
PROMPTS.append((*PROMPTS[0][:32], 5, 6))  # begins as the first does


def causal_lm(config: PreTrainedConfig, adapter: type[CausalLM] = CausalLM) -> CausalLM:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return adapter(model)


class ThreadRanks:
    """The other ranks in threads of this process, over the same group as processes have."""

    def __init__(self, component: ARComponent, size: int, budget: ARBudget, folder: Path) -> None:
        self.group = RankGroup(0, size)
        self.failure: StageLostError | None = None
        self._store = str(folder / "store")
        self._queues: list[queue.SimpleQueue[int | Forward | Logits | None]] = []
        self._threads = []
        for rank in range(1, size):
            share, group = copy.deepcopy(component), RankGroup(rank, size)
            share.shard(group, torch.device("cpu"))
            self._queues.append(queue.SimpleQueue())
            follower = FollowingComponent(share, group, budget)
            self._threads.append(threading.Thread(target=self._follow, args=(follower, group, self._queues[-1])))
            self._threads[-1].start()
        component.shard(self.group, torch.device("cpu"))

    def _follow(
        self,
        follower: FollowingComponent,
        group: RankGroup,
        steps: queue.SimpleQueue[int | Forward | Logits | None],
    ) -> None:
        while (step := steps.get()) is not None:
            if isinstance(step, int):
                group.connect("gloo", self._store, torch.device("cpu"))
                follower.serve(step)
            else:
                follower.run(step)

    def serve(self, kv_blocks: int) -> None:
        self._put(kv_blocks)
        self.group.connect("gloo", self._store, torch.device("cpu"))

    def send(self, step: Forward | Logits) -> None:
        self._put(step)

    def _put(self, item: int | Forward | Logits | None) -> None:
        for each in self._queues:
            each.put(item)

    def fail(self, error: BaseException) -> StageLostError:
        self.failure = StageLostError(f"a step failed with {type(error).__name__}")
        return self.failure

    def close(self) -> None:
        self._put(None)
        for thread in self._threads:
            thread.join()


@contextmanager
def parallel_stage(component: CausalLM, size: int, budget: ARBudget, folder: Path) -> Iterator[ParallelStage]:
    ranks = ThreadRanks(component, size, budget, folder)
    try:
        yield ParallelStage("thinker", component, budget, ranks)
    finally:
        ranks.close()


def run(stage: ARStage, prompts: Sequence[tuple[int, ...]], prefix: str = "r") -> list[tuple[list[int], list[float]]]:
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=12, logprobs=2, seed=number, temperature=0.8 if number % 2 else 0.0)
        stage.submit(StageInput(RequestInfo(f"{prefix}{number}"), params, ARInput(prompt)))
    answers: dict[str, tuple[list[int], list[float]]] = {f"{prefix}{n}": ([], []) for n in range(len(prompts))}
    for chunk in stage.drain():
        if chunk.error is not None:
            raise chunk.error
        if isinstance(chunk.payload, TokenChunk):
            tokens, logprobs = answers[chunk.request_id]
            tokens.extend(chunk.payload.token_ids)
            logprobs.extend(each.logprob for token in chunk.payload.logprobs for each in token.top)
    return list(answers.values())


def assert_same(ours: list[tuple[list[int], list[float]]], theirs: list[tuple[list[int], list[float]]]) -> None:
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    for (_, mine), (_, reference) in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(reference, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama", 2),
        ("qwen2", 4),
        ("qwen3", 2),
        ("mistral", 2),
        ("granite", 2),
        ("gemma2", 2),
        ("phi3", 2),
        ("qwen3_moe", 2),
        ("mixtral", 4),
        ("deepseek_v3", 2),
    ],
)
def test_tokens_and_log_probabilities_are_those_of_one_rank(name: str, size: int, tmp_path: Path) -> None:
    """Prompts in chunks beside generated tokens, too few blocks for all, and prefixes that are there already."""
    # 18 blocks of 8: not all of the prompts and their answers at once.
    budget = ARBudget(kv_blocks=18, block_size=8, prefill_chunk=8, max_batch_tokens=32, run_ahead=False)
    alone = ARStage("thinker", causal_lm(CONFIGS[name]), budget)
    expected = run(alone, PROMPTS), run(alone, PROMPTS[:1], "again")
    with parallel_stage(causal_lm(CONFIGS[name]), size, budget, tmp_path) as stage:
        assert_same(run(stage, PROMPTS), expected[0])
        stats = stage.stats()
        assert stats.preemptions > 0
        assert_same(run(stage, PROMPTS[:1], "again"), expected[1])
        assert stage.stats().extra["prefix_hits"] > stats.extra["prefix_hits"]
        stage.check_integrity()


def test_keys_and_values_of_each_rank_are_its_share_of_the_heads(tmp_path: Path) -> None:
    whole, budget = causal_lm(CONFIGS["llama"]), ARBudget(kv_blocks=4)
    with parallel_stage(causal_lm(CONFIGS["llama"]), 4, budget, tmp_path) as stage:
        assert block_bytes(stage.component, 16) * 4 == block_bytes(whole, 16)
        assert stage.component.decoder.layers[0].self_attn.o_proj.linear.weight.shape == (64, 16)


class Emitting(CausalLM):
    def emit(self, embeds: torch.Tensor, hidden: torch.Tensor, media: torch.Tensor) -> torch.Tensor:
        return torch.cat((embeds, hidden), dim=1)


def test_hidden_rows_for_the_next_stage_are_those_of_one_rank(tmp_path: Path) -> None:
    budget = ARBudget(kv_blocks=8, run_ahead=False)

    def component() -> CausalLM:
        emitting = causal_lm(CONFIGS["llama"], Emitting)
        emitting.spec = replace(emitting.spec, emit_size=128)
        return emitting

    def rows(stage: ARStage) -> torch.Tensor:
        params = SamplingParams(max_tokens=4, temperature=0.0)
        stage.submit(StageInput(RequestInfo("a"), params, ARInput(PROMPTS[2]), emit_hidden=True))
        payloads = [chunk.payload for chunk in stage.drain()]
        return torch.cat([each.hidden for each in payloads if isinstance(each, TokenChunk) and each.hidden is not None])

    with parallel_stage(component(), 2, budget, tmp_path) as stage:
        torch.testing.assert_close(rows(stage), rows(ARStage("thinker", component(), budget)))


def test_a_thinker_runs_over_ranks_and_the_others_leave_its_encoders_out(tmp_path: Path) -> None:
    family = REGISTRY.family("qwen2_5_omni")
    assert family.tiny is not None
    family.tiny(tmp_path / "model", seed=7)
    args = OmniEngineArgs(model=str(tmp_path / "model"), device="cpu", dtype="float32")
    resolved = resolve(args, registry=REGISTRY)

    def component(stage: str) -> Any:
        config = resolved.config.pipeline.stages[stage]
        assert isinstance(config, ARStageConfig)
        context = LoadContext(resolved.model, stage, config, torch.device("cpu"), torch.float32)
        return load_component(context, registry=REGISTRY)

    budget = ARBudget(kv_blocks=64, block_size=8, prefill_chunk=8, run_ahead=False)
    thinker = component("thinker")
    other = copy.deepcopy(thinker)
    other.shard(RankGroup(1, 2), torch.device("cpu"))
    assert 3 * sum(map(torch.numel, other.model.parameters())) < sum(map(torch.numel, thinker.model.parameters()))
    expected = run(ARStage("thinker", copy.deepcopy(thinker), budget), PROMPTS)
    with parallel_stage(thinker, 2, budget, tmp_path) as stage:
        assert_same(run(stage, PROMPTS), expected)
    with pytest.raises(UnsupportedModelError, match=r"Qwen2_5OmniTalker.* has no tensor parallel plan in transformers"):
        component("talker").shard(RankGroup(0, 2), torch.device("cpu"))


def test_a_step_that_fails_on_rank_0_loses_the_stage(tmp_path: Path) -> None:
    """The other ranks may be anywhere in it."""
    with parallel_stage(causal_lm(CONFIGS["llama"]), 2, ARBudget(kv_blocks=8), tmp_path) as stage:
        run(stage, PROMPTS[1:2])

        def broken(*_args: object) -> torch.Tensor:
            raise MemoryError

        stage.component._inner.logits = broken  # type: ignore[attr-defined]
        stage.component._send = lambda *_args: None  # type: ignore[attr-defined]  # the others must not wait in vain
        stage.submit(StageInput(RequestInfo("a"), SamplingParams(max_tokens=2), ARInput((1, 2))))
        stage.component._inner.forward = lambda embeds, _positions, _paged: embeds  # type: ignore[attr-defined]
        for _ in range(2):
            assert stage.has_work()
            with pytest.raises(StageLostError, match="MemoryError") as caught:
                stage.step()
        assert caught.value.status == 503


# ------------------------------------------------------------------------------------------------- refusals


def shard(config: PreTrainedConfig, size: int) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    CausalLM(model).shard(RankGroup(0, size), torch.device("meta"))


def test_rank_0_hands_on_every_hook_of_a_component() -> None:
    refused = {
        "recurrent_modules",
        "forward_group",
        "advance_group",
        "open_sequence",
    }  # such models do not run over ranks
    before = {"shard"}  # is called with the component itself
    of_defaults = {"modules", "decoders", "heads"}  # the decoder alone is divided and prepared
    attributes = {"eos_token_ids", "suppress_token_ids", "tokenizer"}  # are set when it is made
    hooks = {name for name in vars(ARComponent) if not name.startswith("_")} - attributes
    assert hooks - set(vars(LeadingRank)) == refused | before | of_defaults


def test_heads_that_cannot_be_divided_evenly_are_refused_with_what_can() -> None:
    with pytest.raises(ConfigError, match=r"num_attention_heads of 8, which 3 ranks .* tensor_parallel: 1 or 2 or 4"):
        shard(CONFIGS["llama"], 3)
    with pytest.raises(ConfigError, match=r"num_key_value_heads of 4, which 8 ranks .* tensor_parallel: 1 or 2 or 4"):
        shard(CONFIGS["llama"], 8)
    component = causal_lm(CONFIGS["llama"])
    component.spec = replace(component.spec, layer_shapes=((4, 8, 8), (3, 8, 8)))
    with pytest.raises(ConfigError, match=r"KV heads in layer 1 of 3, which 2 ranks .* tensor_parallel: 1"):
        component.shard(RankGroup(0, 2), torch.device("cpu"))
    uneven = LlamaConfig(**{**SIZES, "intermediate_size": 98})
    with pytest.raises(ConfigError, match=r"width of .*mlp.gate_proj of 98"):
        shard(uneven, 4)


def test_models_whose_plan_is_not_served_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel .* tensor_parallel: 1"):
        shard(GPT2Config(n_layer=1, n_embd=64, n_head=4, vocab_size=100), 2)
    with pytest.raises(ConfigError, match=r"Qwen3MoeForCausalLM .* width of .*mlp.experts of 33.* tensor_parallel: 1"):
        shard(Qwen3MoeConfig(**SIZES, head_dim=16, num_experts=4, moe_intermediate_size=33), 2)


def test_experts_whose_shares_do_not_add_up_are_refused_by_name() -> None:
    component = causal_lm(CONFIGS["qwen3_moe"])
    experts = component.decoder.layers[1].mlp.experts

    class Interleaved(type(experts)):  # type: ignore[misc]
        def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(hidden)
            for row, (chosen, shares) in enumerate(zip(index, weights, strict=True)):
                for expert, share in zip(chosen, shares, strict=True):
                    both = self.gate_up_proj[expert] @ hidden[row]
                    out[row] += share * (self.down_proj[expert] @ (self.act_fn(both[::2]) * both[1::2]))
            return out

    experts.__class__ = Interleaved
    with pytest.raises(UnsupportedModelError, match=r"layers.1.mlp.experts otherwise than by the sum of its shares"):
        component.shard(RankGroup(0, 2), torch.device("cpu"))


class OtherFamily(ARComponent):
    spec = ARSpec(1, 1, 8, 8, 8, 8)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, paged: PagedContext) -> torch.Tensor:
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def test_a_family_that_does_not_say_how_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"OtherFamily .* tensor_parallel: 1"):
        OtherFamily().shard(RankGroup(0, 2), torch.device("cpu"))


@pytest.mark.parametrize("value", ["0", "65", "true", "two"])
def test_the_number_of_ranks_is_checked(value: str, tmp_path: Path) -> None:
    tiny.write(tmp_path / "model")
    args = OmniEngineArgs(model=str(tmp_path / "model"), overrides=(f"thinker.tensor_parallel={value}",))
    with pytest.raises(OmniError, match="tensor_parallel"):
        resolve(args, registry=REGISTRY)


# -------------------------------------------------------------------------------------------------- memory


def test_the_memory_plan_has_one_ranks_share(tmp_path: Path) -> None:
    tiny.write(tmp_path / "model")

    def planned(ranks: int) -> tuple[int, int]:
        settings = (f"thinker.tensor_parallel={ranks}", "thinker.kv_blocks=10")
        args = OmniEngineArgs(model=str(tmp_path / "model"), device="cpu", dtype="float32", overrides=settings)
        memory = plan_memory(resolve(args, registry=REGISTRY)).stages["thinker"].memory
        return memory.weights, memory.kv_cache

    weights, kv_cache = planned(1)
    share, kv_share = planned(2)
    config = tiny.config_for(0.0)
    norms = (2 * config.num_hidden_layers + 1) * config.hidden_size
    whole = 4 * (config.vocab_size * config.hidden_size + norms)  # rank 0 has the embedding and each its norms
    assert (share - whole) * 2 == pytest.approx(weights - whole, rel=1e-3)  # and tables of rotary angles
    assert kv_share * 2 == kv_cache
