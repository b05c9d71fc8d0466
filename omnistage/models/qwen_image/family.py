"""The Qwen-Image family: how it is recognised and what serves it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omnistage.pipeline.registry import AnyProcessor, Family, LoadContext

if TYPE_CHECKING:
    from omnistage.config import OmniModelConfig


def _encoder(context: LoadContext) -> object:
    from omnistage.models.qwen_image import components

    return components.load_encoder(context)


def _denoiser(context: LoadContext) -> object:
    from omnistage.models.qwen_image import components

    return components.load_denoiser(context)


def _decoder(context: LoadContext) -> object:
    from omnistage.models.qwen_image import components

    return components.load_decoder(context)


def _processor(model: OmniModelConfig) -> AnyProcessor:
    from omnistage.models._diffusers.processor import DrawingProcessor

    return DrawingProcessor(takes_images=True)


def _tiny(folder: Path, **options: object) -> None:
    from omnistage.models.qwen_image import tiny

    tiny.write(folder, **options)  # type: ignore[arg-type]


def _verify(folder: Path, **options: object) -> object:
    from omnistage.models.qwen_image import verify

    return verify.run(folder, **options)  # type: ignore[arg-type]


FAMILY = Family(
    name="qwen_image",
    architectures=(
        "QwenImagePipeline",
        "QwenImageImg2ImgPipeline",
        "QwenImageEditPipeline",
        "QwenImageEditPlusPipeline",
    ),
    pipeline=Path(__file__).with_name("pipeline.yaml"),
    components={
        "qwen_image.encoder": _encoder,
        "qwen_image.denoiser": _denoiser,
        "qwen_image.decoder": _decoder,
    },
    bridges={},
    processor=_processor,
    tiny=_tiny,
    verify=_verify,
    variants=("image", "edit", "edit_plus"),
    aliases=("qwen-image",),
)
