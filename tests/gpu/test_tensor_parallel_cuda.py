"""A language model over two ranks on GPUs: the tokens and log probabilities of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omnistage.core.params import SamplingParams
from omnistage.models.causal_lm import tiny
from omnistage.omni import Omni
from omnistage.pipeline import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(300),
]

PROMPTS = ["Hello", "one two three four five six seven", "x", "the quick brown fox jumps over the lazy dog"]


def answers(folder: Path, size: int) -> list[tuple[tuple[int, ...], list[float]]]:
    settings = (f"thinker.tensor_parallel={size}", "thinker.kv_blocks=64", "thinker.prefill_chunk=16")
    params = SamplingParams(max_tokens=24, temperature=0.7, seed=3, logprobs=1, ignore_eos=True)
    with Omni(folder, device="cuda", dtype="float32", overrides=settings, progress=False) as omni:
        outputs = [output.outputs[0] for output in omni.generate(PROMPTS, params, progress=False)]
    return [(tuple(each.token_ids), [p.chosen.logprob for p in each.logprobs]) for each in outputs]


def compare(folder: Path) -> None:
    tiny.write(folder)
    for (tokens, logprobs), (expected, reference) in zip(answers(folder, 2), answers(folder, 1), strict=True):
        assert tokens == expected
        assert logprobs == pytest.approx(reference, abs=1e-3)


def test_two_ranks_that_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses that, so it is gloo; all else is as on two."""
    monkeypatch.setattr(ranks, "rank_devices", lambda device, size, _stage: [torch.device("cuda:0")] * size)
    compare(tmp_path / "model")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_on_two_gpus(tmp_path: Path) -> None:
    compare(tmp_path / "model")
