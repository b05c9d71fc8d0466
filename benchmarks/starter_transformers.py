"""The side of `transformers` in `starter_language_model.py`: `starter_transformers.py FOLDER`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from side_process import Generate, Ids, answer

from omnistage.hf import transformers

SINGLE, BATCH = "transformers, one by one", "transformers, a padded batch"


def generated(model: Any, prompts: Sequence[Ids], tokens: int, penalty: float) -> list[Ids]:
    """All prompts as one batch, filled up on the left."""
    longest = max(len(ids) for ids in prompts)
    filled = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    with torch.inference_mode():
        out = model.generate(
            filled,
            attention_mask=mask,
            max_new_tokens=tokens,
            do_sample=False,
            repetition_penalty=penalty,
            eos_token_id=None,  # nothing ends an answer but its length, as with our `ignore_eos`
            pad_token_id=0,
        )
    new: list[Ids] = out[:, longest:].tolist()
    return new


def prepare() -> tuple[dict[str, Any], Generate]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        sys.argv[1], dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()

    def generate(prompts: Sequence[Ids], tokens: int, side: str, penalty: float) -> list[Ids]:
        if side == BATCH:
            return generated(model, prompts, tokens, penalty)
        return [generated(model, [ids], tokens, penalty)[0] for ids in prompts]

    return {"threads": torch.get_num_threads()}, generate


if __name__ == "__main__":
    answer(prepare)
