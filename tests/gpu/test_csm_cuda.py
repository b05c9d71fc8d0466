"""CSM on a GPU against transformers on the CPU, in float32: equal codes, nearly equal sound; all of it from graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from omnistage.core.params import CodecParams, SamplingParams
from omnistage.engines.codec import CodecStage
from omnistage.models.csm.mimi import Mimi
from omnistage.models.csm.tiny import write
from omnistage.models.csm.verify import Reference, make_cases
from omnistage.omni import Omni

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SMALL = ("backbone.kv_blocks=256", "backbone.graph_batch_sizes=[1,2,4,8]")


@pytest.fixture(autouse=True, scope="module")
def _full_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("csm") / "model"
    write(folder)
    return folder


@pytest.mark.parametrize(
    ("graphs", "chunk"),
    [(True, 512), (False, 512), (True, 1)],
    ids=["graphs", "no graphs", "prompts token by token"],
)
def test_codes_and_sound_are_those_of_transformers(
    folder: Path, graphs: bool, chunk: int, caplog: pytest.LogCaptureFixture
) -> None:
    cases, reference = make_cases(6, seed=5), Reference(folder)
    overrides = (*SMALL, f"backbone.cuda_graphs={str(graphs).lower()}", f"codec.cuda_graphs={str(graphs).lower()}")
    overrides += (f"backbone.prefill_chunk={chunk}",)
    with Omni(folder, device="cuda", dtype="float32", overrides=overrides, progress=False) as omni:
        codec = omni.orchestrator.stages["codec"]
        assert isinstance(codec, CodecStage)
        assert isinstance(codec.component, Mimi)
        captured = codec.component._graphs.captures
        assert (captured > 0) is graphs
        params = [
            {"backbone": SamplingParams(temperature=0.0, max_tokens=case.frames), "codec": CodecParams()}
            for case in cases
        ]
        outputs = omni.chat([case.as_sent() for case in cases], params)
        assert codec.component._graphs.captures == captured
    assert "no CUDA graph" not in caplog.text
    for case, output in zip(cases, outputs, strict=True):
        expected = reference.run(case).samples
        assert output.audio is not None
        wave = np.asarray(output.audio.samples)
        assert wave.shape == expected.shape
        assert np.abs(wave - expected).max() < 1e-2 * max(np.abs(expected).max(), 1e-3)


def test_a_seed_gives_the_same_speech_in_any_company(folder: Path) -> None:
    said = [{"role": "assistant", "content": "Hello, how are you?"}]
    with Omni(folder, device="cuda", dtype="float32", overrides=SMALL, progress=False) as omni:
        params = {"backbone": SamplingParams(temperature=0.9, top_k=50, max_tokens=20, seed=7)}
        alone = omni.chat(said, params)
        others = [[{"role": "assistant", "content": f"Number {i}"}] for i in range(5)]
        together = omni.chat([said, *others], params)
    assert alone.audio is not None
    assert together[0].audio is not None
    assert np.abs(alone.audio.samples - together[0].audio.samples).max() < 1e-3
