"""Adapters in captured and compiled steps on a GPU against the same on the CPU, in float32: equal tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from omnistage.core.params import SamplingParams
from omnistage.core.types import OmniTokensPrompt
from omnistage.engines.ar.stage import ARStage
from omnistage.hf import transformers
from omnistage.models.causal_lm import tiny
from omnistage.omni import Omni
from tests.parity.adapter_checkpoints import CONFIGS, with_adapters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SMALL = ("max_model_len=1024", "kv_blocks=256", "graph_batch_sizes=[1,2,4,8]")
MODES = {
    "graphs": ("attention=triton",),
    "graphs, compiled": ("attention=triton", "compile=true"),
    "graphs, layers as they are": ("attention=triton", "merge_linears=false"),
    "small graphs, more rows": ("attention=triton", "graph_batch_sizes=[2]"),
    "captured prompts": ("attention=triton", "graph_prefill_tokens=[16,64]", "max_batch_tokens=64"),
    "no graphs": ("attention=sdpa", "cuda_graphs=false"),
}
WANTED = [(), *CONFIGS, [{"name": "attention", "weight": 0.5}, {"name": "feed", "weight": -1.0}]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    model, adapters = tmp_path_factory.mktemp("lm") / "model", tmp_path_factory.mktemp("adapters")
    tiny.write(model, seed=1)
    with_adapters(transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), folder=adapters)
    return model, {name: adapters / name for name in CONFIGS}


def answers(folders: tuple[Path, dict[str, Path]], device: str, *options: str, slots: int = 5) -> list[list[int]]:
    """The tokens of a request for each of `WANTED`, all in one batch, twice over."""
    model, adapters = folders
    given = [f"thinker.{option}" for option in (*SMALL, *options)]
    rng = np.random.default_rng(0)
    prompts = [OmniTokensPrompt(tuple(rng.integers(0, 800, n).tolist())) for n in (3, 17, 64, 130, 30, 9, 200)]
    params = [SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, lora=each) for each in WANTED]
    overrides = (*given, f"deployment.adapter_slots={slots}")
    with Omni(model, device=device, dtype="float32", adapters=adapters, overrides=overrides, progress=False) as omni:
        stage = omni.orchestrator.stages["thinker"]
        assert isinstance(stage, ARStage)
        assert (stage.runner.graphs is not None) == (device == "cuda" and "cuda_graphs=false" not in options)
        first = [output.token_ids for output in omni.generate(prompts, params, progress=False)]
        again = [output.token_ids for output in omni.generate(prompts, params, progress=False)]  # from cached prefixes
        assert again == first
    return first


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, dict[str, Path]]) -> list[list[int]]:
    found = answers(folders, "cpu")
    assert len(set(map(tuple, found))) == len(found)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_mixed_batch_is_answered_as_on_the_cpu(
    folders: tuple[Path, dict[str, Path]], expected: list[list[int]], mode: str
) -> None:
    assert answers(folders, "cuda", *MODES[mode]) == expected


def test_adapters_that_take_turns_change_nothing(
    folders: tuple[Path, dict[str, Path]], expected: list[list[int]]
) -> None:
    assert answers(folders, "cuda", "attention=triton", slots=2) == expected
