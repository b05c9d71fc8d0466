"""Steps of Qwen3-Omni can be captured in a CUDA graph: they read nothing of the device, and nothing of the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omnistage.config import OmniEngineArgs, resolve
from omnistage.core.family import LoadContext
from omnistage.engines.ar.attention import AttentionPlan, PagedContext, bind_caches
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.experts import EXPERTS_NAME, experts_for, set_experts
from omnistage.engines.ar.memory import NoAttention
from omnistage.models.qwen3_omni_moe import tiny
from omnistage.models.registry import REGISTRY
from tests.graph_harness import HostTensors

META = torch.device("meta")
ROWS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("q3") / "model"
    tiny.write(path)
    return path


def planned(folder: Path, stage: str, dtype: torch.dtype) -> ARComponent:
    resolved = resolve(OmniEngineArgs(model=str(folder), device="cpu", dtype="float32"), registry=REGISTRY)
    settings = resolved.config.pipeline.stages[stage]
    context = LoadContext(resolved.model, stage, settings, META, dtype)
    component = REGISTRY.component(settings.component)(context)
    assert isinstance(component, ARComponent)
    return component


def step(component: ARComponent) -> torch.Tensor:
    """A decode step as `graphs.py` captures it; its kernels for sampling aside."""
    spec, dtype = component.spec, component.dtype
    cache = torch.empty(1, 1, spec.num_kv_heads, spec.head_dim, dtype=dtype, device=META)
    bind_caches(component.attention_modules, [(cache, cache)] * spec.num_layers)
    paged = PagedContext(NoAttention(), torch.empty(ROWS, dtype=torch.int64, device=META), AttentionPlan())
    ids = torch.empty(ROWS, dtype=torch.int64, device=META)
    if spec.residual is None:
        embeds = component.embed(ids)
    else:
        embeds = component.embed_frames(ids[:, None].expand(-1, 1 + spec.residual.count))
        embeds = component.add_side(embeds, torch.empty(ROWS, spec.side_size, dtype=dtype, device=META))
    hidden = component.forward(embeds, torch.empty(3, ROWS, dtype=torch.float64, device=META), paged)
    logits = component.logits(hidden)
    if spec.emit_size:
        component.emit(embeds, hidden, torch.empty(ROWS, 1, dtype=torch.bool, device=META))
    if spec.residual is None:
        return logits
    return component.predict(hidden, ids, lambda logits, _index: logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", ["thinker", "talker"])
def test_nothing_of_a_step_is_read_or_comes_from_the_host(folder: Path, stage: str, dtype: torch.dtype) -> None:
    component = planned(folder, stage, dtype)
    cuda = torch.device("cuda")
    assert experts_for(cuda) == EXPERTS_NAME
    set_experts(component.decoder, "auto", cuda, dtype)
    with torch.inference_mode(), HostTensors() as noted:
        assert len(step(component)) == ROWS
    assert noted.found == []


def test_the_loop_over_experts_cannot_be_captured(folder: Path) -> None:
    component = planned(folder, "talker", torch.float32)
    set_experts(component.decoder, "eager", META, torch.float32)
    with torch.inference_mode(), pytest.raises((NotImplementedError, RuntimeError)):
        step(component)
