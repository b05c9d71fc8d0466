"""A picture over two ranks, each a process: a rank that dies ends the stage's requests, and is replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from omnistage.core.errors import StageLostError
from omnistage.core.params import DiffusionParams
from omnistage.engines.diffusion.context_parallel import ParallelDenoiseStage
from omnistage.models.flux import tiny
from omnistage.omni import Omni
from omnistage.pipeline import supervision
from omnistage.pipeline.ranks import Ranks
from tests.unit.placement_harness import eventually

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def omni(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Omni]:
    tiny.write(tmp_path / "model", seed=5)
    monkeypatch.setattr(supervision, "REBUILD_PAUSES", (0.0,))
    overrides = ("denoise.context_parallel=2",)
    with Omni(tmp_path / "model", device="cpu", dtype="float32", overrides=overrides, progress=False) as omni:
        yield omni
        pids = ranks_of(omni).pids()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def ranks_of(omni: Omni) -> Ranks:
    stage = omni.orchestrator._loops["denoise"].stage
    assert isinstance(stage, ParallelDenoiseStage)
    assert isinstance(stage._ranks, Ranks)
    return stage._ranks


def draw(omni: Omni) -> np.ndarray:
    params = DiffusionParams(width=64, height=64, steps=2, seed=3)
    (output,) = omni.generate(["a red square"], {"denoise": params}, progress=False)
    return output.images[0].pixels


def test_requests_end_with_a_rank_that_dies_and_the_stage_is_rebuilt(omni: Omni) -> None:
    before, ranks = draw(omni), ranks_of(omni)
    params = DiffusionParams(width=64, height=64, steps=900, seed=3, preview_every=1)
    stream = omni.stream_chat([{"role": "user", "content": "a red square"}], {"denoise": params})
    next(stream)
    os.kill(ranks.pids()[0], signal.SIGKILL)
    with pytest.raises(StageLostError, match=r"rank 1 of stage 'denoise' has ended \(signal 9, as when"):
        for _ in stream:
            pass
    eventually(lambda: omni.health()["denoise"].rebuilds == 1)
    assert ranks_of(omni).pids() != ranks.pids()
    np.testing.assert_array_equal(draw(omni), before)
