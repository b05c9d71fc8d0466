"""Linear layers of few rows: the same product, however many rows there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from omnistage.config import OmniEngineArgs
from omnistage.engines.ar.cpu_kernels import MAX_ROWS, MIN_ROWS, FusedRMSNorm, WeightFirstLinear, apply_cpu_kernels
from omnistage.engines.ar.stage import ARStage
from omnistage.models.causal_lm.component import CausalLM
from omnistage.models.causal_lm.tiny import write
from omnistage.pipeline.build import build_parts

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch has no MKL here")


@needs_mkl
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, MIN_ROWS - 1, MIN_ROWS, 16, 17, MAX_ROWS, MAX_ROWS + 1, 100])
def test_the_product_is_that_of_a_plain_layer(rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    plain = nn.Linear(48, 80, bias=bias)
    quick = nn.Linear(48, 80, bias=bias)
    quick.load_state_dict(plain.state_dict())
    apply_cpu_kernels(quick)
    given = torch.randn(1, rows, 48, generator=generator)
    got, expected = quick(given), plain(given)
    assert got.shape == expected.shape
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@needs_mkl
def test_inputs_of_any_layout_will_do() -> None:
    plain, quick = nn.Linear(6, 4), nn.Linear(6, 4)
    quick.load_state_dict(plain.state_dict())
    apply_cpu_kernels(quick)
    given = torch.randn(6, 5, 3).permute(2, 1, 0)
    torch.testing.assert_close(quick(given), plain(given))


@needs_mkl
def test_only_plain_layers_of_the_cpu_in_float32_are_changed() -> None:
    class Quantised(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "plain": nn.Linear(4, 4),
            "narrow": nn.Linear(4, 4, dtype=torch.float16),
            "other": Quantised(4, 4),
            "elsewhere": nn.Linear(4, 4, device="meta"),
        }
    )
    weights = {name: value.data_ptr() for name, value in model.state_dict().items()}
    apply_cpu_kernels(model)
    changed = {name for name, module in model.items() if type(module) is WeightFirstLinear}
    assert changed == {"plain"}
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == weights


def test_nothing_is_changed_where_there_is_no_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    layer = nn.Linear(4, 4)
    apply_cpu_kernels(layer)
    assert type(layer) is nn.Linear


@needs_mkl
@pytest.mark.parametrize("rows", [1, MIN_ROWS - 1, MIN_ROWS, MAX_ROWS, MAX_ROWS + 1])
def test_the_weight_comes_first_for_few_rows_alone(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    layer = nn.Linear(6, 4)
    apply_cpu_kernels(layer)
    seen: list[int] = []
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda one, two: seen.append(two.shape[1]) or product(one, two))
    layer(torch.randn(rows, 6))
    assert seen == ([rows] if MIN_ROWS <= rows <= MAX_ROWS else [])


@needs_mkl
def test_a_language_model_without_packed_weights_has_such_layers(tmp_path: Path) -> None:
    write(tmp_path / "lm", seed=0)
    plain = ("thinker.budget.pack_weights=false",)
    args = OmniEngineArgs(model=str(tmp_path / "lm"), device="cpu", dtype="float32", overrides=plain)
    parts = build_parts(args, progress=False)
    stage = parts.stages["thinker"]
    assert isinstance(stage, ARStage)
    assert isinstance(stage.component, CausalLM)
    kinds = {type(module) for module in stage.component.model.modules() if isinstance(module, nn.Linear)}
    stage.close()
    assert kinds == {WeightFirstLinear}


class PlainRMSNorm(nn.Module):
    """As most families of transformers have it; `added` is what some add to the weight."""

    def __init__(self, size: int, added: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))
        self.variance_epsilon = 1e-5
        self.added = added

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        spread = hidden_states.pow(2).mean(-1, keepdim=True)
        return (self.weight + self.added) * (hidden_states * torch.rsqrt(spread + self.variance_epsilon))


def test_a_norm_is_taken_as_a_whole_where_that_gives_the_same_numbers() -> None:
    norms = nn.ModuleList([PlainRMSNorm(576), PlainRMSNorm(576, added=1.0), nn.LayerNorm(576)])
    rows = torch.randn(2, 5, 576, generator=torch.Generator().manual_seed(0))
    before = [norm(rows) for norm in norms]
    apply_cpu_kernels(norms)
    assert [isinstance(norm, FusedRMSNorm) for norm in norms] == [True, False, False]
    assert isinstance(norms[0], PlainRMSNorm)
    assert all(torch.equal(norm(rows), expected) for norm, expected in zip(norms, before, strict=True))


def test_applied_twice_the_kernels_are_those_of_the_first_time() -> None:
    model = nn.ModuleList([PlainRMSNorm(8), nn.Linear(8, 8)])
    apply_cpu_kernels(model)
    kinds = [type(module) for module in model]
    apply_cpu_kernels(model)
    assert [type(module) for module in model] == kinds
