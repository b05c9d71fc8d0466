"""The GLM-Image family: how it is recognised and what serves it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omnistage.models.glm_image.bridges import BRIDGES
from omnistage.pipeline.registry import AnyProcessor, Family, LoadContext

if TYPE_CHECKING:
    from omnistage.config import OmniModelConfig


def _prior(context: LoadContext) -> object:
    from omnistage.models.glm_image import prior

    return prior.load_prior(context)


def _encoder(context: LoadContext) -> object:
    from omnistage.models.glm_image import components

    return components.load_encoder(context)


def _denoiser(context: LoadContext) -> object:
    from omnistage.models.glm_image import components

    return components.load_denoiser(context)


def _decoder(context: LoadContext) -> object:
    from omnistage.models.glm_image import components

    return components.load_decoder(context)


def _processor(model: OmniModelConfig) -> AnyProcessor:
    from omnistage.models.glm_image.processor import GlmImageInputProcessor

    return GlmImageInputProcessor.load(model.folder)


def _tiny(folder: Path, **options: object) -> None:
    from omnistage.models.glm_image import tiny

    tiny.write(folder, **options)  # type: ignore[arg-type]


def _verify(folder: Path, **options: object) -> object:
    from omnistage.models.glm_image import verify

    return verify.run(folder, **options)  # type: ignore[arg-type]


FAMILY = Family(
    name="glm_image",
    architectures=("GlmImagePipeline",),
    pipeline=Path(__file__).with_name("pipeline.yaml"),
    components={
        "glm_image.prior": _prior,
        "glm_image.encoder": _encoder,
        "glm_image.denoiser": _denoiser,
        "glm_image.decoder": _decoder,
    },
    bridges=BRIDGES,
    processor=_processor,
    tiny=_tiny,
    verify=_verify,
)
