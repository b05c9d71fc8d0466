"""The Wan family: how it is recognised and what serves it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omnistage.pipeline.registry import AnyProcessor, Family, LoadContext

if TYPE_CHECKING:
    from omnistage.config import OmniModelConfig


def _encoder(context: LoadContext) -> object:
    from omnistage.models.wan import components

    return components.load_encoder(context)


def _denoiser(context: LoadContext) -> object:
    from omnistage.models.wan import components

    return components.load_denoiser(context)


def _decoder(context: LoadContext) -> object:
    from omnistage.models.wan import components

    return components.load_decoder(context)


def _processor(model: OmniModelConfig) -> AnyProcessor:
    from omnistage.models._diffusers.processor import DrawingProcessor
    from omnistage.models.wan.components import takes_pictures

    return DrawingProcessor(takes_images=takes_pictures(model.hf_config))


def _tiny(folder: Path, **options: object) -> None:
    from omnistage.models.wan import tiny

    tiny.write(folder, **options)  # type: ignore[arg-type]


def _verify(folder: Path, **options: object) -> object:
    from omnistage.models.wan import verify

    return verify.run(folder, **options)  # type: ignore[arg-type]


FAMILY = Family(
    name="wan",
    architectures=("WanPipeline", "WanImageToVideoPipeline"),
    pipeline=Path(__file__).with_name("pipeline.yaml"),
    components={"wan.encoder": _encoder, "wan.denoiser": _denoiser, "wan.decoder": _decoder},
    bridges={},
    processor=_processor,
    tiny=_tiny,
    verify=_verify,
    variants=("t2v", "t2v_experts", "i2v_clip", "flf2v", "i2v_experts", "ti2v"),
    aliases=("wan2",),
)
