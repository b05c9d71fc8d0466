"""Model families: one folder each, all that is special to it inside."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omnistage.pipeline.registry import Family

BUILTIN = (
    "qwen2_5_omni",
    "stable_diffusion_3",
    "flux",
    "flux2",
    "qwen_image",
    "z_image",
    "wan",
    "glm_image",
    "starter",
    "diffusers_pipeline",
    "causal_lm",
)


def builtin_families() -> tuple[Family, ...]:
    """The families that come with the package. Nothing heavy is imported until one is used."""
    names = [name for name in BUILTIN if (Path(__file__).parent / name / "family.py").is_file()]
    return tuple(import_module(f"omnistage.models.{name}.family").FAMILY for name in names)
