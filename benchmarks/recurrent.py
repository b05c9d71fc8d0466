"""Six requests at once to language models with recurrent layers, or that run in groups, against one at a time.

`one at a time` is transformers' own cache, a sequence a forward (`OwnCacheLM`); `served` is the paged engine with
states (`CausalLM`) or in groups (`OwnForwardLM`). Both in one run, in turn, the best times; random weights.

    python benchmarks/recurrent.py
    python benchmarks/recurrent.py qwen3_5_text gptj --repeat 5
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence

import torch

from omnistage.config.schema import ARBudget
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, RequestInfo, StageInput, TokenChunk
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.stage import ARStage
from omnistage.hf import transformers
from omnistage.models.causal_lm.component import CausalLM
from omnistage.models.causal_lm.own_cache import OwnCacheLM
from omnistage.models.causal_lm.own_forward import OwnForwardLM

HIDDEN, LAYERS = 512, 6
_PLAIN: dict[str, object] = {
    "vocab_size": 8192,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 1024,
}
_ATTENTION: dict[str, object] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
}
MODELS: dict[str, tuple[type[ARComponent], dict[str, object]]] = {
    "qwen3_5_text": (
        CausalLM,
        {**_PLAIN, **_ATTENTION, "linear_num_key_heads": 8, "linear_num_value_heads": 16}
        | {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    ),
    "lfm2": (CausalLM, {**_PLAIN, **_ATTENTION, "layer_types": ["conv", "full_attention"] * (LAYERS // 2)}),
    "mamba2": (CausalLM, {**_PLAIN, "num_heads": 16, "head_dim": 64, "state_size": 64, "n_groups": 1}),
    "mamba": (CausalLM, _PLAIN),
    "gptj": (
        OwnForwardLM,
        {"vocab_size": 8192, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 8, "n_positions": 1024},
    ),
    "bloom": (OwnForwardLM, {"vocab_size": 8192, "hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": 8}),
    "falcon": (OwnForwardLM, {**_PLAIN, "num_attention_heads": 8}),
}
PROMPT_LENGTHS = (24, 40, 31, 64, 18, 52)


def make_model(kind: str) -> transformers.PreTrainedModel:
    config = transformers.CONFIG_MAPPING[kind](**MODELS[kind][1], bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def seconds(component: ARComponent, tokens: int) -> tuple[float, list[int]]:
    """Of six requests, and the tokens of the first."""
    budget = ARBudget(kv_blocks=256, block_size=16, prefix_caching=False)
    stage = ARStage("thinker", component, budget)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    for number, length in enumerate(PROMPT_LENGTHS):
        stage.submit(StageInput(RequestInfo(str(number)), params, ARInput(tuple(range(3, 3 + length)))))
    chunks = stage.drain()
    wall = time.perf_counter() - start
    first = [c.payload.token_ids for c in chunks if c.request_id == "0" and isinstance(c.payload, TokenChunk)]
    return wall, [token for ids in first for token in ids]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=list(MODELS))
    parser.add_argument("--tokens", type=int, default=24, help="generated for each request")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    for kind in args.types:
        served, slow = MODELS[kind][0](make_model(kind)), OwnCacheLM(make_model(kind))  # type: ignore[call-arg]
        times: dict[ARComponent, list[float]] = {served: [], slow: []}
        for _ in range(args.repeat):
            answers = []
            for component, taken in times.items():
                wall, tokens = seconds(component, args.tokens)
                taken.append(wall)
                answers.append(tokens)
            if answers[0] != answers[1]:
                raise SystemExit(f"{kind}: the answers differ")
        best, other = min(times[served]), min(times[slow])
        print(f"{kind:14} one at a time {other:6.2f} s   served {best:6.2f} s   {other / best:4.1f} times", flush=True)


if __name__ == "__main__":
    main()
