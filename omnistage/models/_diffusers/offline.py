"""The three components of a checkpoint without an engine, for comparisons."""

from __future__ import annotations

from pathlib import Path

from omnistage.core.errors import UnsupportedModelError
from omnistage.engines.diffusion.component import Denoiser, LatentDecoder, PromptEncoder
from omnistage.models.registry import REGISTRY


def load_components(folder: Path) -> tuple[PromptEncoder, Denoiser, LatentDecoder]:
    """Load a drawing checkpoint in float32 on the CPU."""
    from omnistage.config import OmniEngineArgs, resolve
    from omnistage.core.family import LoadContext
    from omnistage.pipeline.build import load_component, resolve_device, resolve_dtype

    resolved = resolve(
        OmniEngineArgs.parse({"model": str(folder), "device": "cpu", "dtype": "float32"}), registry=REGISTRY
    )
    device = resolve_device("cpu")
    loaded = [
        load_component(LoadContext(resolved.model, name, stage, device, resolve_dtype("float32", device)))
        for name, stage in resolved.config.pipeline.stages.items()
    ]
    encoder = next((part for part in loaded if isinstance(part, PromptEncoder)), None)
    denoiser = next((part for part in loaded if isinstance(part, Denoiser)), None)
    decoder = next((part for part in loaded if isinstance(part, LatentDecoder)), None)
    if encoder is None or denoiser is None or decoder is None:
        raise UnsupportedModelError(f"{folder} is not a pipeline that encodes, denoises and decodes")
    return encoder, denoiser, decoder
