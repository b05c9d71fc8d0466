"""Our side of `starter_language_model.py`: `starter_omnistage.py FOLDER`; QUANTIZE in the environment is a scheme."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from side_process import Generate, Ids, answer

from omnistage import Omni
from omnistage.core.params import SamplingParams
from omnistage.core.types import OmniTokensPrompt


def prepare() -> tuple[dict[str, Any], Generate]:
    # Prompts come again in every round.
    off = ("thinker.budget.prefix_caching=false",)
    scheme = os.environ.get("QUANTIZE")
    omni = Omni(sys.argv[1], device="cpu", dtype="float32", overrides=off, quantize=scheme, progress=False)

    def generate(prompts: Sequence[Ids], tokens: int, side: str) -> list[Ids]:
        del side
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        given = [OmniTokensPrompt(tuple(ids)) for ids in prompts]
        return [list(one.outputs[0].token_ids) for one in omni.generate(given, params, progress=False)]

    return {"threads": torch.get_num_threads()}, generate


if __name__ == "__main__":
    answer(prepare)
