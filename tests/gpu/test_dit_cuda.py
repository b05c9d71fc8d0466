"""Token2wav's DiT on Triton kernels against the same on torch, on a GPU."""

from __future__ import annotations

import pytest
import torch

from omnistage.engines.graphs import GraphCache, allow_tf32
from tests.dit_harness import LARGE, SMALL, UTTERANCES, build, check, distance, errors, inputs, velocities

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("config", [SMALL, LARGE], ids=["small", "large"])
def test_the_layers_on_triton_are_those_on_torch(config: dict[str, object]) -> None:
    found = errors(config, "cuda")
    print("", *(f"{case}: {error}" for case, error in found.items()), sep="\n")
    check(found, 1e-4)


def test_tf32_is_near() -> None:
    dit = build(LARGE, "cuda")
    ways = velocities(dit, "cuda")
    given = inputs(dit, UTTERANCES["several"], guided=True, padded=True)
    with torch.inference_mode():
        exact = ways["torch"](*given)
        with allow_tf32(True):
            plain, fused = (distance(ways[way](*given), exact) for way in ("torch", "triton"))
    print(f"\ntf32: torch {plain:.2g}, triton {fused:.2g}")
    assert fused < max(2 * plain, 1e-3)


@pytest.mark.parametrize("way", ["triton", "triton half"])
def test_a_captured_evaluation_follows_the_inputs_it_is_replayed_with(way: str) -> None:
    """Other neighbours, other kept rows, another length of the last block."""
    dit = build(LARGE, "cuda")
    function = velocities(dit, "cuda")[way]
    graphs = GraphCache(enabled=True)
    batches = ([(2.67, True), (1.0, False), (2.0, True)], [(1.0, True), (1.5, True), (2.92, False)])
    with torch.inference_mode():
        for seed, windows in enumerate((*batches, batches[0])):
            given = inputs(dit, windows, guided=True, padded=True, seed=seed)
            found = [tensor.clone() for tensor in graphs("key", function, *given)]
            assert distance(found, function(*given)) < 1e-3
    assert graphs.captures == 1


def test_a_block_is_computed_as_it_is_without_company() -> None:
    """To the bit in what Triton computes; products of other sizes may round in another way."""
    from omnistage.models.qwen2_5_omni.dit_kernels import block_attention

    torch.manual_seed(0)
    qkv = torch.randn(9, 24, 3 * 1024, device="cuda", dtype=torch.float16)
    turns = torch.randn(2, 72, 64, device="cuda").unbind()
    rows = torch.arange(8, device="cuda")
    valid = torch.ones(8, 24, dtype=torch.bool, device="cuda")
    many = block_attention(qkv, 16, turns, torch.cat((rows[:1] + 8, rows[:-1])), (rows + 1).clamp(max=7), valid)
    few = block_attention(
        qkv[2:5].contiguous(), 16, turns, rows[:3] - 1 + (rows[:3] == 0), (rows[:3] + 1).clamp(max=2), valid[:3]
    )
    assert torch.equal(many[3], few[1])
