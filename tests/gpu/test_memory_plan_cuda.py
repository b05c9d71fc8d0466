"""The memory plan on a GPU: what is planned is what torch's allocator measures, and the limit holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from omnistage.core.errors import CapacityError
from omnistage.core.params import SamplingParams
from omnistage.models.registry import REGISTRY
from omnistage.omni import Omni

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
WORKSPACES = 128 * 2**20
"""Of libraries, which the plan has a reserve for."""
SETTINGS = ("deployment.concurrency=4", "deployment.context=1024", "graph_batch_sizes=[1,2]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = REGISTRY.family("causal_lm").tiny
    assert tiny is not None
    path = tmp_path_factory.mktemp("lm") / "model"
    tiny(path, seed=0, scale=0.5)
    return path


@pytest.fixture(autouse=True)
def _no_limit_afterwards() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def overrides() -> tuple[str, ...]:
    return tuple(entry if entry.startswith("deployment") else f"thinker.{entry}" for entry in SETTINGS)


def test_weights_and_cache_are_what_is_planned(folder: Path) -> None:
    with Omni(folder, device="cuda", overrides=overrides(), progress=False) as omni:
        (measured,) = omni.memory
        memory = measured.planned.memory
        assert memory.weights + memory.kv_cache == pytest.approx(measured.loaded, rel=0.1, abs=WORKSPACES)
        assert memory.weights + memory.kv_cache + memory.activations == pytest.approx(
            measured.peak, rel=0.1, abs=WORKSPACES
        )
        assert measured.planned.kv_tokens == 4 * 1024
        assert omni.generate("Hello", SamplingParams(max_tokens=4), progress=False)[0].error is None


def test_a_limit_that_is_too_small_is_refused_before_loading(folder: Path) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()  # of other tests' models
    with pytest.raises(CapacityError, match="does not fit"):
        Omni(folder, device="cuda", gpu_memory="1GiB", progress=False)
    assert torch.cuda.memory_allocated() - before < 2**20


def test_nothing_grows_beyond_the_limit(folder: Path) -> None:
    with (
        Omni(folder, device="cuda", gpu_memory="4GiB", overrides=overrides(), progress=False),
        pytest.raises(torch.OutOfMemoryError),
    ):
        torch.empty(5 * 2**30, dtype=torch.uint8, device="cuda")
