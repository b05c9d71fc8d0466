"""The bridges of every drawing pipeline: what one stage gives is what the next one takes."""

from __future__ import annotations

from omnistage.core.family import BridgeResult
from omnistage.core.types import Condition, Latents, RequestInfo, StageChunk


def encode2denoise(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
    """An encoded prompt starts the denoiser."""
    return state, [chunk.payload] if isinstance(chunk.payload, Condition) else []


def denoise2decode(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
    """Latents go to the decoder, previews among them; progress goes to the user only."""
    return state, [chunk.payload] if isinstance(chunk.payload, Latents) else []


BRIDGES = {"diffusion.encode2denoise": encode2denoise, "diffusion.denoise2decode": denoise2decode}
"""Registered beside the families, which all use them."""
