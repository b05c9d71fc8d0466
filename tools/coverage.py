"""Which causal LMs of the installed transformers are served exactly, by small random checkpoints of each type.

Each type gets a checkpoint of a few narrow layers, is loaded and served as a user's would be (`Omni`), and is compared
with transformers' own `generate`, one prompt at a time: six prompts at once, greedy, longer than the sliding window,
prefill in chunks, too few blocks for all of them so that some are preempted, and the same prompts again from the prefix
cache. Tokens must be equal and log probabilities within the tolerance of the dtype.

    exact      the same tokens and log probabilities, on the paged engine; some types run there in groups, by their own
               forward over the engine's cache, instead of in flattened batches
    fallback   the same, one sequence at a time with transformers' own cache
    family     another family's: the type has a processor for media (see docs/multimodal_models.md)
    refused    not loaded, with the reason
    wrong      loaded, and answers differ: never acceptable
    crashed    an error that is not one of ours, or one while it generates
    unbuilt    no small checkpoint could be made, or transformers itself cannot run it

python tools/coverage.py llama gemma2                  these types
python tools/coverage.py --sample                      the fixed sample of the tests
python tools/coverage.py --all --seeds 2 --write       docs/models.md and the table of `omnistage models`
python tools/coverage.py --all --part 1/4              a quarter of them
python tools/coverage.py --sample --dtype float16
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from omnistage.compat import prepare_torchvision
from omnistage.config.checkpoint import detect_family
from omnistage.core.errors import OmniError
from omnistage.core.params import SamplingParams
from omnistage.core.types import OmniTokensPrompt
from omnistage.hf import transformers
from omnistage.models import _tiny_common as common
from omnistage.models.causal_lm import tiny
from omnistage.models.registry import REGISTRY
from omnistage.omni import Omni

SAMPLE = (
    *("llama", "qwen3", "mistral", "phi3", "smollm3", "stablelm", "opt", "gpt2"),
    "phimoe",  # its window is in the mask alone
    *("gemma2", "gemma3_text"),  # soft caps in attention and on logits, windows
    "gpt_oss",  # attention sinks
    *("granite", "cohere2", "nemotron"),  # scaled logits, layers without positions, norms of their own
    "deepseek_v3",  # values narrower than keys
    *("mixtral", "qwen3_moe"),
    "bert",  # layers before its output embedding
    *("gptj", "falcon", "xglm"),  # attention in their own code
    *("bloom", "mpt"),  # relative positions
    "doge",  # a mask of its own
    *("mamba", "mamba2", "rwkv"),  # recurrent
    *("qwen3_next", "lfm2", "falcon_h1", "jamba", "bamba", "nemotron_h", "granitemoehybrid"),  # hybrid
    *("qwen3_5", "kimi_linear", "zamba2"),
    "rembert",  # a cache for two kinds of attention
    "recurrent_gemma",  # its state is in its modules
    "llama4_text",  # attention in chunks
    "gemma3n_text",  # token ids in every layer
    "moshi",  # its cache and its mask disagree
    "deepseek_v32",  # sparse attention
    "bart",  # positions from its own cache
    "xlnet",  # not causal
    "emu3",  # transformers cannot make it
)
"""Types that differ in what the engine has to get right, or has to refuse."""

ROOT = Path(__file__).parents[1]
PAGE, TABLE = ROOT / "docs/models.md", ROOT / "omnistage/models/causal_lm/coverage.json"
STATES = ("exact", "fallback", "family", "refused", "wrong", "crashed", "unbuilt")
VOCAB = 1024
MAX_LENGTH = 256
WINDOW = 18
NEW_TOKENS = 16
LAYERS = (4, 8)
"""The second where a type has no full attention among the first four."""
PROMPT_LENGTHS = (3, 11, 25, 37, 52, 70)
TOLERANCES = {"float32": 2e-4, "float16": 0.05, "bfloat16": 0.4}
"""Of a log probability; outside float32 at least four times what transformers itself is off there, and the tokens after
the first that differs are not compared."""
OVERRIDES = (
    "thinker.budget.prefill_chunk=16",
    "thinker.budget.max_batch_tokens=48",
    "thinker.budget.block_size=8",
    "thinker.budget.kv_blocks=24",
)

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_SMALL: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "ffn_hidden_size"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "decoder_ffn_dim", "shared_intermediate_size"), 64),
    **dict.fromkeys(
        ("intermediate_size_mlp", "attention_dim", "dense_intermediate_size", "expert_ffn_hidden_size"), 64
    ),
    **dict.fromkeys(_LAYERS, LAYERS[0]),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    "encoder_attention_heads": 4,
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "attention_head_dim", "swa_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "index_head_dim", "qk_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 32),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), MAX_LENGTH),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers", "index_topk"), 1),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads", "lightning_nkv", "num_global_key_value_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_dt_rank", "time_step_rank"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "num_kv_shared_layers"), 1),
    "mamba_d_ssm": 128,
    "index_n_heads": 4,
    "image_size": 32,
}
"""Sizes by the setting's name, where a config has it and does not leave it unset."""
OF_TYPE: dict[str, dict[str, object]] = json.loads(Path(__file__).with_name("coverage_settings.json").read_text())
"""Settings of single types, where the names above do not make a small model of them, or none like those published."""
_SWITCHED_ON = OF_TYPE["*"]
"""What many types leave unset or without effect by default, and published checkpoints use."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One type. `tokens` of `compared` differ; `logprob` is the largest difference of a log probability."""

    model_type: str
    state: str
    reason: str = ""
    tokens: int = 0
    compared: int = 0
    logprob: float = 0.0
    preemptions: int = 0
    prefix_hits: int = 0
    in_groups: bool = False
    """By the model's own forward over the paged cache, not in flattened batches."""
    recurrent: bool = False
    """With states beside the paged cache."""


@dataclass(frozen=True, slots=True)
class Served:
    """Both rounds of answers, and what the stage did meanwhile."""

    answers: list[Answer]
    one_by_one: bool
    in_groups: bool
    recurrent: bool
    preemptions: int
    prefix_hits: int


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]


def all_types() -> list[str]:
    """Every type that `AutoModelForCausalLM` knows, in the installed transformers."""
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return sorted(mapping)


# ------------------------------------------------------------------------------------------- checkpoints


def small_settings(config: transformers.PreTrainedConfig, layers: int) -> dict[str, object]:
    """Settings that make a type's default config small, those of the configs inside it included."""
    settings: dict[str, object] = {}
    values = vars(config)
    for name in config.sub_configs:
        if isinstance(values.get(name), transformers.PreTrainedConfig):
            settings[name] = small_settings(values[name], layers)
    for name, value in values.items():
        if name in _SWITCHED_ON:
            settings[name] = _SWITCHED_ON[name]
        elif name in _SMALL and isinstance(value, int):
            settings[name] = layers if name in _LAYERS else _SMALL[name]
    _group_heads(values, settings)
    if "qk_rope_head_dim" in values and "head_dim" in settings:
        settings["head_dim"] = _SMALL["qk_rope_head_dim"]  # what latent attention rotates
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        settings["rope_parameters"] = {**rope, "mrope_section": [2, 3, 3]}
    return settings


def _group_heads(values: dict[str, object], settings: dict[str, object]) -> None:
    """Half as many key heads as query heads, where the default has fewer."""
    heads = next((values[n] for n in ("num_attention_heads", "n_head", "num_heads") if n in values), None)
    for name in ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "swa_num_key_value_heads"):
        if name in values:
            settings[name] = 4 if values[name] in (None, heads) else 2


def _merged(settings: dict[str, object], more: dict[str, object]) -> dict[str, object]:
    merged = {**settings, **more}
    for name, value in more.items():
        inner = settings.get(name)
        if isinstance(value, dict) and isinstance(inner, dict) and not name.startswith("rope"):
            merged[name] = _merged(inner, value)
    return merged


def build(model_type: str, seed: int, layers: int = LAYERS[0]) -> transformers.PreTrainedModel:
    """A small model of this type with random weights that make answers depend on every token before."""
    kind = transformers.CONFIG_MAPPING[model_type]
    config = kind(**_merged(small_settings(kind(), layers), OF_TYPE.get(model_type, {})))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                parameter.add_(noise * (0.5 if "sink" in name else 0.05))
            elif "emb" in name or "wte" in name:
                parameter.copy_(noise * 0.5)
            else:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
    return model


def write(model: transformers.PreTrainedModel, folder: Path) -> None:
    """The checkpoint with a tokenizer, as a published one lies in its folder."""
    settings = common.tokenizer_settings("PreTrainedTokenizerFast", MAX_LENGTH, qwen=False)
    common.write_tokenizer(folder, tiny.special_ids(), settings)
    model.generation_config = transformers.GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)


def prompts(seed: int) -> list[tuple[int, ...]]:
    """Six of different lengths; the longer ones begin alike."""
    generator = torch.Generator().manual_seed(seed)
    longest = torch.randint(3, VOCAB, (max(PROMPT_LENGTHS),), generator=generator).tolist()
    own = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    return [
        tuple(longest[: n - 8] + ids[-8:]) if n > 30 else tuple(ids) for n, ids in zip(PROMPT_LENGTHS, own, strict=True)
    ]


# -------------------------------------------------------------------------------------------- comparison


@torch.inference_mode()
def reference(folder: Path, dtype: str, asked: Sequence[tuple[int, ...]]) -> list[Answer]:
    """Greedy answers of transformers, one prompt at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    answers = []
    for prompt in asked:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = out.sequences[0, len(prompt) :]
        logprobs = torch.stack(out.logits)[:, 0].double().log_softmax(-1)
        answers.append(Answer(tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist()))
    return answers


def served(folder: Path, dtype: str, asked: Sequence[tuple[int, ...]]) -> Served:
    """Ours, all at once; then all again, with the prefix cache filled."""
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=0)
    answers = []
    with Omni(folder, device="cpu", dtype=dtype, overrides=OVERRIDES, progress=False) as omni:
        for _ in range(2):
            outputs = omni.generate([OmniTokensPrompt(p) for p in asked], params, progress=False)
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(f"while generating: {output.error}") from output.error
                logprobs = output.outputs[0].logprobs or []
                answers.append(Answer(output.token_ids, [item.chosen.logprob for item in logprobs]))
        stats = omni.stats().stages["thinker"]
    extra = stats.extra
    one_by_one, in_groups, recurrent = (bool(extra[name]) for name in ("one_by_one", "in_groups", "recurrent"))
    return Served(answers, one_by_one, in_groups, recurrent, stats.preemptions, int(extra["prefix_hits"]))


def judge(
    model_type: str, expected: Sequence[Answer], got: Sequence[Answer], dtype: str, rounding: float = 0.0
) -> Outcome:
    """Compare all rounds of ours with the reference, whose own log probabilities are off by `rounding`."""
    different, compared, gaps = differences([*expected] * (len(got) // len(expected)), got)
    worst, tolerance = max(gaps), max(TOLERANCES[dtype], 4 * rounding)
    # Outside float32 rounding may choose another expert, and so another answer to one of the prompts.
    allowed = 0 if dtype == "float32" else 2
    exact = sum(gap > tolerance for gap in gaps) <= allowed and (different == 0 or dtype != "float32")
    reason = "" if exact else f"{different} of {compared} tokens differ, log probabilities by up to {worst:.2g}"
    return Outcome(model_type, "exact" if exact else "wrong", reason, different, compared, worst)


def differences(expected: Sequence[Answer], got: Sequence[Answer]) -> tuple[int, int, list[float]]:
    """Tokens that differ, tokens in all, and for each prompt the largest difference of a log probability before."""
    different, compared, worst = 0, 0, []
    for mine, theirs in zip(got, expected, strict=True):
        same = 0
        while same < min(len(mine.tokens), len(theirs.tokens)) and mine.tokens[same] == theirs.tokens[same]:
            same += 1
        # The first token that differs is compared by its log probability: two may be equally likely.
        end = min(same + 1, len(mine.tokens), len(theirs.tokens))
        gaps = [abs(a - b) for a, b in zip(mine.logprobs[:end], theirs.logprobs[:end], strict=True)]
        worst.append(max(gaps, default=0.0))
        compared += len(theirs.tokens)
        different += max(len(mine.tokens), len(theirs.tokens)) - same
    return different, compared, worst


def cover(model_type: str, *, dtype: str = "float32", seed: int = 0) -> Outcome:
    """Build, serve and compare one type."""
    made_as = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    family = detect_family({"model_type": model_type, "architectures": [made_as]}, REGISTRY).name
    if family != "causal_lm":
        return Outcome(model_type, "family", f"of the family {family}, which serves or refuses it with its processor")
    asked = prompts(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected: list[Answer] = []
        for layers in LAYERS:
            try:
                write(build(model_type, seed, layers), folder)
                expected = reference(folder, dtype, asked)
                break
            except Exception as error:  # whatever a type's own code may raise
                unbuilt = Outcome(model_type, "unbuilt", _message(error))
        if not expected:
            return unbuilt
        rounding = 0.0 if dtype == "float32" else max(differences(reference(folder, "float32", asked), expected)[2])
        try:
            got = served(folder, dtype, asked)
        except OmniError as error:
            return Outcome(model_type, "refused", _message(error))
        except Exception as error:  # this is what the tool looks for
            return Outcome(model_type, "crashed", _message(error))
    outcome = judge(model_type, expected, got.answers, dtype, rounding)
    state = "fallback" if outcome.state == "exact" and got.one_by_one else outcome.state
    return replace(
        outcome,
        state=state,
        preemptions=got.preemptions,
        prefix_hits=got.prefix_hits,
        in_groups=got.in_groups,
        recurrent=got.recurrent,
    )


def cover_seeds(model_type: str, *, dtype: str, seeds: int) -> Outcome:
    """The worst of several checkpoints with other weights and prompts."""
    outcomes = [cover(model_type, dtype=dtype, seed=seed) for seed in range(seeds)]
    return max(outcomes, key=lambda outcome: _BADNESS.index(outcome.state))


_BADNESS = ("exact", "fallback", "family", "refused", "unbuilt", "wrong", "crashed")


def _message(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text.partition(" Model type should be one of ")[0]  # a list of some hundred
    text = text if isinstance(error, OmniError) else f"{type(error).__name__}: {text}"
    return text if len(text) <= 300 else text[:299] + "…"


# ------------------------------------------------------------------------------------------------ output


def as_markdown(outcomes: Sequence[Outcome], dtype: str) -> str:
    """The page of the documentation: counts, what is served, and why the rest is not."""

    def names(state: str, *, in_groups: bool = False, recurrent: bool = False) -> str:
        chosen = (o for o in outcomes if (o.state, o.in_groups, o.recurrent) == (state, in_groups, recurrent))
        return ", ".join(f"`{outcome.model_type}`" for outcome in chosen)

    rest = [
        f"| {o.model_type} | {o.state} | {o.reason.replace('|', chr(92) + '|').replace('<', '&lt;')} |"
        for o in outcomes
        if o.state not in ("exact", "fallback")
    ]
    return (
        Path(__file__)
        .with_name("coverage_page.md")
        .read_text()
        .format(
            command="python tools/coverage.py --all --seeds 2 --write",
            version=transformers.__version__,
            dtype=dtype,
            summary=summary(outcomes),
            exact=names("exact"),
            recurrent=names("exact", recurrent=True),
            groups=names("exact", in_groups=True),
            fallback=names("fallback"),
            rest="\n".join(rest),
        )
    )


def as_table(outcomes: Sequence[Outcome]) -> str:
    """What `omnistage models` reads: the state of each type, and the reason where it is not served."""
    types = {outcome.model_type: [outcome.state, outcome.reason] for outcome in outcomes}
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in types.items())
    return f'{{\n "transformers": "{transformers.__version__}",\n "types": {{\n{rows}\n }}\n}}\n'


def summary(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(outcome.state for outcome in outcomes)
    groups = sum(outcome.in_groups for outcome in outcomes if outcome.state == "exact")
    notes = {"exact": f" ({groups} of them in groups)"} if groups else {}
    return ", ".join(f"{counts[state]} {state}{notes.get(state, '')}" for state in STATES)


def quiet() -> None:
    """Keep what transformers logs about random weights out of the table."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; none: --sample or --all")
    parser.add_argument("--sample", action="store_true", help="the fixed sample of the tests")
    parser.add_argument("--all", action="store_true", help="every type of the installed transformers")
    parser.add_argument("--part", default="1/1", help="which part of the list, such as 2/4")
    parser.add_argument("--dtype", default="float32", choices=sorted(TOLERANCES))
    parser.add_argument("--seeds", type=int, default=1, help="checkpoints of each type")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--parts", type=Path, nargs="+", default=[], help="results of --json instead of a run, the last counts"
    )
    parser.add_argument("--write", action="store_true", help="write docs/models.md and the table of `omnistage models`")
    args = parser.parse_args(argv)
    types = args.types or (all_types() if args.all else list(SAMPLE) if args.sample else [])
    if args.parts:
        types = []
    unknown = sorted(set(types) - set(all_types()))
    if unknown or not (types or args.parts):
        parser.error(f"unknown types: {', '.join(unknown)}" if unknown else "name types, or give --sample or --all")
    part, parts = (int(number) for number in args.part.split("/"))
    prepare_torchvision(required=False)
    quiet()
    known = {row["model_type"]: row for path in args.parts for row in json.loads(path.read_text())["types"]}
    outcomes = [Outcome(**known[name]) for name in sorted(known)]
    for model_type in types[part - 1 :: parts]:
        start = time.monotonic()
        outcome = cover_seeds(model_type, dtype=args.dtype, seeds=args.seeds)
        outcomes.append(outcome)
        print(f"{model_type:28} {outcome.state:8} {time.monotonic() - start:5.1f} s  {outcome.reason}", flush=True)
    print(summary(outcomes))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(outcome) for outcome in outcomes]
        args.json.write_text(json.dumps({"transformers": transformers.__version__, "types": rows}, indent=1) + "\n")
    if args.write:
        PAGE.write_text(as_markdown(outcomes, args.dtype))
        TABLE.write_text(as_table(outcomes))
    return int(any(outcome.state in ("wrong", "crashed") for outcome in outcomes))


if __name__ == "__main__":
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    sys.exit(main())
