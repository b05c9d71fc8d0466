"""What holds for every family that draws: its small checkpoints, and that `verify` finds no difference in them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest

from omnistage.cli.model_runner import OmniRunner
from omnistage.config import OmniEngineArgs, resolve
from omnistage.core.errors import ConfigError, OmniError
from omnistage.models.registry import REGISTRY

Checkpoints = Callable[..., Path]

PIPELINES = {
    ("flux", "dev"): "FluxPipeline",
    ("flux", "schnell"): "FluxPipeline",
    ("flux", "kontext"): "FluxKontextPipeline",
    ("flux", "fill"): "FluxFillPipeline",
    ("flux2", "base"): "Flux2KleinPipeline",
    ("flux2", "distilled"): "Flux2KleinPipeline",
    ("flux2", "dev"): "Flux2Pipeline",
    ("stable_diffusion", "v1"): "StableDiffusionPipeline",
    ("stable_diffusion", "v2"): "StableDiffusionPipeline",
    ("stable_diffusion", "inpaint"): "StableDiffusionInpaintPipeline",
    ("stable_diffusion", "lcm"): "StableDiffusionPipeline",
    ("stable_diffusion", "xl"): "StableDiffusionXLPipeline",
    ("stable_diffusion", "controlnet"): "StableDiffusionControlNetPipeline",
    ("stable_diffusion", "xl_controlnet"): "StableDiffusionXLControlNetPipeline",
    ("stable_diffusion_3", None): "StableDiffusion3Pipeline",
    ("z_image", None): "ZImagePipeline",
    ("qwen_image", "image"): "QwenImagePipeline",
    ("qwen_image", "edit"): "QwenImageEditPipeline",
    ("qwen_image", "edit_plus"): "QwenImageEditPlusPipeline",
    ("wan", None): "WanPipeline",
    ("ltx", "v0_9"): "LTXPipeline",
    ("hunyuan_video", None): "HunyuanVideoPipeline",
}
FAMILIES = sorted({family for family, _ in PIPELINES} | {"glm_image"})
LARGEST = {"glm_image": 12_000_000}
"""Bytes of a small checkpoint, where it is not 8 million."""


def bytes_of(folder: Path) -> dict[Path, bytes]:
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(("family", "variant"), PIPELINES)
def test_a_small_checkpoint_is_what_diffusers_loads(
    checkpoint_of: Checkpoints, family: str, variant: str | None
) -> None:
    folder = checkpoint_of(family, variant)
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    assert type(pipe).__name__ == PIPELINES[family, variant]
    if family == "flux2" and variant != "dev":
        assert pipe.config.is_distilled is (variant == "distilled")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_checkpoint_is_small_and_its_familys(checkpoint_of: Checkpoints, family: str) -> None:
    folder = checkpoint_of(family)
    assert sum(map(len, bytes_of(folder).values())) < LARGEST.get(family, 8_000_000)
    assert resolve(OmniEngineArgs(model=str(folder)), registry=REGISTRY).model.family == family


@pytest.mark.parametrize("family", FAMILIES)
def test_the_seed_decides_every_byte_of_a_small_checkpoint(
    checkpoint_of: Checkpoints, tmp_path: Path, family: str
) -> None:
    tiny: Any = REGISTRY.family(family).tiny
    seen: list[float] = []
    tiny(tmp_path / "again", seed=0, progress=lambda what, share: seen.append(share))
    tiny(tmp_path / "other", seed=1)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    here, again, other = bytes_of(checkpoint_of(family)), bytes_of(tmp_path / "again"), bytes_of(tmp_path / "other")
    assert here == again
    weights = [path for path in here if path.suffix == ".safetensors"]
    assert weights
    assert all(here[path] != other[path] for path in weights if path.parts[0] in ("transformer", "vae"))
    with pytest.raises(OmniError, match="not empty"):
        tiny(tmp_path / "again", seed=0)


@pytest.mark.parametrize("family", sorted({family for family, variant in PIPELINES if variant is not None} | {"wan"}))
def test_variants_that_do_not_exist_are_refused_with_those_that_do(tmp_path: Path, family: str) -> None:
    module = importlib.import_module(f"omnistage.models.{family}.tiny")
    with pytest.raises(ConfigError, match=", ".join(module.VARIANTS)):
        module.write(tmp_path / "model", variant="v2v")


@pytest.mark.parametrize(
    ("family", "variant", "cases"),
    [
        ("flux", "schnell", 2),
        ("flux", "fill", 2),
        ("flux2", "distilled", 2),
        ("glm_image", None, 2),
        ("qwen_image", None, 4),
        ("stable_diffusion", "xl_controlnet", 2),
        ("stable_diffusion_3", None, 2),
        ("wan", "ti2v", 2),
        ("ltx", "v0_9_1", 2),
        ("hunyuan_video", None, 2),
        ("z_image", None, 4),
    ],
)
def test_verify_compares_every_quantity_and_finds_no_difference(
    checkpoint_of: Checkpoints, family: str, variant: str | None, cases: int
) -> None:
    verify: Any = REGISTRY.family(family).verify
    seen: list[str] = []
    runner = OmniRunner(checkpoint_of(family, variant))
    rows = verify(runner, cases=cases, seed=3, progress=lambda what, share: seen.append(what))
    assert len(rows) == 3 * cases
    assert [row for row in rows if not row.ok] == []
    # Each case, then all at once; GLM-Image tells of its prior and of loading too.
    assert len(seen) == cases + (3 if family == "glm_image" else 1)
    with pytest.raises(ConfigError):
        verify(runner, cases=0)
