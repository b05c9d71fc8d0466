"""Our side of `starter_language_model.py`: `starter_omnistage.py FOLDER`.

In the environment, QUANTIZE is a scheme, INCLUDE a pattern of layers that it takes as well, and PACK_WEIGHTS the key of
that name.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from side_process import Generate, Ids, answer

from omnistage import Omni
from omnistage.bench.fidelity import components
from omnistage.core.params import SamplingParams
from omnistage.core.types import OmniTokensPrompt
from omnistage.engines.quantisation.transform import network_bytes, networks_of


def prepare() -> tuple[dict[str, Any], Generate]:
    # Prompts come again in every round.
    overrides = ["thinker.budget.prefix_caching=false"]
    scheme, include, packed = (os.environ.get(name) for name in ("QUANTIZE", "INCLUDE", "PACK_WEIGHTS"))
    if packed is not None:
        overrides.append(f"thinker.budget.pack_weights={packed}")
    if include is not None:
        overrides.append(f"thinker.quantize.include={json.dumps([include])}")
    omni = Omni(sys.argv[1], device="cpu", dtype="float32", overrides=tuple(overrides), quantize=scheme, progress=False)
    networks = [network for part in components(omni).values() for network in networks_of(part)]

    def generate(prompts: Sequence[Ids], tokens: int, side: str, penalty: float) -> list[Ids]:
        del side
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, repetition_penalty=penalty)
        given = [OmniTokensPrompt(tuple(ids)) for ids in prompts]
        return [list(one.outputs[0].token_ids) for one in omni.generate(given, params, progress=False)]

    return {"threads": torch.get_num_threads(), "weights": sum(map(network_bytes, networks))}, generate


if __name__ == "__main__":
    answer(prepare)
