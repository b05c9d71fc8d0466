"""Drawing on a GPU against the same on the CPU, in float32: the same noise, nearly the same picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from omnistage.cli.model_runner import OmniRunner
from omnistage.config import DiffusionBudget
from omnistage.core.params import DiffusionParams
from omnistage.engines.diffusion.component import Denoiser, Row
from omnistage.engines.diffusion.stage import DenoiseStage
from omnistage.models.registry import REGISTRY
from omnistage.omni import Omni
from omnistage.pipeline.outputs import OmniRequestOutput

pytest.importorskip("diffusers")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

FAMILIES = (
    *("stable_diffusion", "stable_diffusion_3", "flux", "flux2", "qwen_image", "z_image", "glm_image"),
    *("wan", "ltx", "hunyuan_video"),
)
FRAMES = {"wan": 5, "ltx": 9, "hunyuan_video": 5}
PROMPTS = ["a red house", "two boats on a lake", "a cat", "snow"]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / request.param
    made.mkdir()
    tiny = REGISTRY.family(request.param).tiny
    assert tiny is not None
    tiny(made, seed=1)
    return made


def params(seed: int) -> DiffusionParams:
    return DiffusionParams(width=64, height=64, steps=4, seed=seed)


def draw(folder: Path, device: str, *settings: str) -> list[np.ndarray]:
    name = folder.name
    given = ("prior.temperature=0",) if name == "glm_image" else settings
    with Omni(folder, device=device, dtype="float32", overrides=given, progress=False) as omni:
        own = [params(seed) for seed in range(len(PROMPTS))]
        if name in FRAMES:
            own = [p.merged(DiffusionParams(num_frames=FRAMES[name])) for p in own]
        outputs = omni.generate(list(PROMPTS), own, progress=False)
        omni.orchestrator.check_idle()
    return [pixels(output) for output in outputs]


def pixels(output: OmniRequestOutput) -> np.ndarray:
    assert output.error is None
    return output.images[0].pixels if output.images else output.videos[0].frames


def test_a_picture_is_that_of_the_cpu(folder: Path) -> None:
    for ours, expected in zip(draw(folder, "cuda"), draw(folder, "cpu"), strict=True):
        difference = np.abs(ours.astype(np.int16) - expected.astype(np.int16))
        assert difference.max() <= 3
        assert difference.mean() < 0.5
        assert expected.std() > 1  # a picture at all


def checkpoint(family: str, folder: Path) -> Path:
    tiny = REGISTRY.family(family).tiny
    assert tiny is not None
    tiny(folder / family, seed=1)
    return folder / family


@pytest.mark.parametrize("family", ["stable_diffusion", "stable_diffusion_3", "flux", "flux2"])
def test_captured_forwards_predict_what_plain_ones_do(family: str, tmp_path: Path) -> None:
    denoiser = OmniRunner(checkpoint(family, tmp_path)).load_component("denoise", device="cuda")
    assert isinstance(denoiser, Denoiser)
    stage = DenoiseStage("denoise", denoiser, DiffusionBudget(warm_sizes=("64x64",), compile=False))
    stage.warm_up()
    graphs = stage._runner._graphs
    assert graphs._graphs.captures == 16
    condition = denoiser.planned_condition(64, 64, 1)
    assert condition is not None
    torch.manual_seed(0)
    for count in (1, 3, 16, 3, 17):
        texts = [{name: torch.randn_like(t) for name, t in condition.positive.items()} for _ in range(count)]
        with stage.stream.use():
            lanes = [
                denoiser.open(replace(condition, positive=text), DiffusionParams(), torch.Generator().manual_seed(i))
                for i, text in enumerate(texts)
            ]
            rows = [Row(lane, "positive") for lane in lanes]
            pairs = list(zip(graphs.forward(rows), denoiser.forward(rows), strict=True))
            for found, expected in pairs:
                torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert graphs._graphs.enabled
    assert graphs._graphs.captures == 16
    stage.close()


@pytest.mark.parametrize("family", ["stable_diffusion", "stable_diffusion_3", "flux2", "z_image"])
def test_pictures_of_compiled_blocks_are_the_plain_ones(family: str, tmp_path: Path) -> None:
    folder = checkpoint(family, tmp_path)
    plain = draw(folder, "cuda", "denoise.compile=false", "denoise.cuda_graphs=false")
    for settings in (("denoise.compile=false",), ("denoise.compile=true",)):
        for ours, expected in zip(draw(folder, "cuda", 'denoise.warm_sizes=["64x64"]', *settings), plain, strict=True):
            difference = np.abs(ours.astype(np.int16) - expected.astype(np.int16))
            assert difference.max() <= 2
            assert difference.mean() < 0.1


def test_nothing_is_compiled_while_requests_run(tmp_path: Path) -> None:
    folder = checkpoint("stable_diffusion_3", tmp_path)
    settings = ("denoise.compile=true", 'denoise.warm_sizes=["64x64"]')
    with Omni(folder, device="cuda", dtype="float32", overrides=settings, progress=False) as omni:
        compiled = counters["stats"]["unique_graphs"]
        assert compiled
        for count in (1, 3, 7):
            own = [DiffusionParams(width=64, height=96, steps=2, seed=seed) for seed in range(count)]
            omni.generate([PROMPTS[0]] * count, own, progress=False)
        assert counters["stats"]["unique_graphs"] == compiled


def test_many_requests_in_flight_do_not_disturb_each_other(tmp_path: Path) -> None:
    folder = checkpoint("flux", tmp_path)
    settings = ('denoise.warm_sizes=["64x64"]',)
    with Omni(folder, device="cuda", dtype="float32", overrides=settings, progress=False) as omni:
        own = [params(seed).merged(DiffusionParams(n=2, preview_every=1)) for seed in range(12)]
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(12)]
        together = omni.generate(prompts, own, progress=False)
        alone = [omni.generate(prompts[i], own[i], progress=False)[0] for i in range(0, 12, 5)]
        omni.orchestrator.check_idle()
    for i, single in zip(range(0, 12, 5), alone, strict=True):
        for a, b in zip(together[i].images, single.images, strict=True):
            assert np.abs(a.pixels.astype(np.int16) - b.pixels.astype(np.int16)).max() <= 2
