"""A stage that fails on a GPU is rebuilt there: its memory comes free, and it writes what it wrote before."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch

from omnistage.core.errors import StageError, StageUnavailableError
from omnistage.core.params import SamplingParams
from omnistage.core.types import OmniTokensPrompt
from omnistage.models.causal_lm import tiny
from omnistage.omni import Omni
from omnistage.pipeline import supervision
from omnistage.pipeline.loop import MAX_FAILED_STEPS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SETTINGS = ("max_model_len=1024", "kv_blocks=4096", "graph_batch_sizes=[1,2]")


def device_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()  # this process's: others may use the device


def generate(omni: Omni) -> list[int]:
    return omni.generate(OmniTokensPrompt((5, 6, 7, 8)), GREEDY, progress=False)[0].token_ids


def wait_until_rebuilt(omni: Omni, end: float) -> list[int]:
    while True:
        try:
            return generate(omni)
        except StageUnavailableError:
            assert time.monotonic() < end, "the stage was not rebuilt"
            time.sleep(0.05)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_failed_stage_is_rebuilt_with_its_graphs_and_cache_in_the_memory_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    monkeypatch.setattr(supervision, "REBUILD_PAUSES", (0.0,))
    tiny.write(tmp_path / "lm", seed=1)
    overrides = [f"pipeline.stages.thinker.budget.{setting}" for setting in SETTINGS]
    with Omni(tmp_path / "lm", device="cuda", dtype="float32", overrides=overrides, progress=False) as omni:
        expected, used = generate(omni), device_bytes()
        if frozen:  # as `serve` does once its models are loaded
            gc.freeze()
        try:
            for _ in range(2):
                failed = omni.orchestrator.stages["thinker"]

                def fail() -> None:
                    raise RuntimeError("a defect")

                monkeypatch.setattr(failed, "step", fail)
                for _step in range(MAX_FAILED_STEPS):
                    with pytest.raises(StageError):
                        generate(omni)
                monkeypatch.undo()
                monkeypatch.setattr(supervision, "REBUILD_PAUSES", (0.0,))
                del failed, fail
                assert wait_until_rebuilt(omni, time.monotonic() + 120) == expected
            # Each stage has a stream, and cuBLAS a workspace for each stream: tens of megabytes, which come back.
            torch._C._cuda_clearCublasWorkspaces()
            assert device_bytes() < used * 1.1 + 64 * 2**20, "the memory of a failed stage was kept"
        finally:
            gc.unfreeze()
        omni.orchestrator.check_idle()
