"""vLLM's side of `starter_language_model.py`, in an environment of its own: `starter_vllm.py FOLDER`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from side_process import Generate, Ids, answer


def prepare() -> tuple[dict[str, Any], Generate]:
    import torch
    import vllm

    engine = vllm.LLM(
        model=sys.argv[1],
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=16,
        enable_prefix_caching=False,  # prompts come again in every round
        seed=0,
        disable_log_stats=True,
    )

    def generate(prompts: Sequence[Ids], tokens: int, side: str, penalty: float) -> list[Ids]:
        del side
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=True, seed=0, repetition_penalty=penalty
        )
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return {"vllm": vllm.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}, generate


if __name__ == "__main__":
    answer(prepare)
