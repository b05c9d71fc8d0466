"""How mixtures of experts are computed."""

from __future__ import annotations

import pytest
import torch

from omnistage.core.errors import ConfigError
from omnistage.engines.ar.experts import EXPERTS_NAME, experts_for, set_experts
from omnistage.hf import transformers

CPU = torch.device("cpu")


@pytest.fixture(name="decoder", scope="module")
def _decoder() -> torch.nn.Module:
    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_experts=6,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.Qwen3MoeModel(config).eval()


@torch.inference_mode()
def hidden_of(decoder: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = decoder(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
    return out


@pytest.mark.parametrize("choice", ["grouped_mm", "batched_mm", EXPERTS_NAME])
def test_every_implementation_gives_what_the_loop_over_experts_gives(decoder: torch.nn.Module, choice: str) -> None:
    for count in (1, 5, 200):
        tokens = torch.randint(0, 64, (count,), generator=torch.Generator().manual_seed(count))
        set_experts(decoder, "eager", CPU, torch.float32)
        expected = hidden_of(decoder, tokens)
        set_experts(decoder, choice, CPU, torch.float32)
        torch.testing.assert_close(hidden_of(decoder, tokens), expected, atol=1e-5, rtol=1e-5)


def test_steps_that_are_captured_wait_for_nothing() -> None:
    cuda = torch.device("cuda")
    assert experts_for(CPU) == "eager"
    assert experts_for(cuda) == EXPERTS_NAME


def test_a_small_batch_is_computed_without_looking_at_its_data(decoder: torch.nn.Module) -> None:
    """On the meta device there is nothing to look at; the loop over experts fails there, as it does in a capture."""
    config = decoder.config
    with torch.device("meta"):
        planned = transformers.Qwen3MoeModel(config)
        rows = torch.empty(1, 4, 32)
    set_experts(planned, EXPERTS_NAME, CPU, torch.float32)
    assert planned.layers[0].mlp(rows).shape == rows.shape
    set_experts(planned, "eager", CPU, torch.float32)
    with pytest.raises((NotImplementedError, RuntimeError)):
        planned.layers[0].mlp(rows)


def test_a_decoder_without_experts_is_left_alone_unless_they_are_asked_for() -> None:
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with torch.device("meta"):
        dense = transformers.LlamaModel(config)
    set_experts(dense, "auto", torch.device("cuda"), torch.bfloat16)
    set_experts(torch.nn.Linear(1, 1), "grouped_mm", CPU, torch.float32)
    with pytest.raises(ConfigError, match="experts"):
        set_experts(dense, "grouped_mm", CPU, torch.float32)
