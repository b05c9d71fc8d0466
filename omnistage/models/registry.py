"""The registry that everything above uses: the built-in families, and those of installed packages."""

from __future__ import annotations

from importlib import import_module

from omnistage.core.family import Family
from omnistage.core.registry import Registry

BUILTIN = (
    "qwen2_5_omni",
    "qwen3_omni_moe",
    "csm",
    "stable_diffusion",
    "stable_diffusion_3",
    "flux",
    "flux2",
    "qwen_image",
    "z_image",
    "wan",
    "ltx",
    "hunyuan_video",
    "glm_image",
    "diffusers_pipeline",
    "text_encoder",
    "speech_to_text",
    "text_to_speech",
    "causal_lm",
    "multimodal_lm",
)


def builtin_families() -> tuple[Family, ...]:
    """The families that come with the package. Nothing heavy is imported until one is used."""
    return tuple(import_module(f"omnistage.models.{name}").FAMILY for name in BUILTIN)


def _register_builtin(registry: Registry) -> None:
    from omnistage.engines.codec import onnx
    from omnistage.models._diffusers.bridges import BRIDGES

    for name, factory in onnx.COMPONENTS.items():
        registry.register_component(name, factory)
    for name, bridge in (*BRIDGES.items(), *onnx.BRIDGES.items()):
        registry.register_bridge(name, bridge)
    for family in builtin_families():
        registry.register(family)


REGISTRY = Registry(_register_builtin)
