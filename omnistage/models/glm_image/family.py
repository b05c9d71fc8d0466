"""The GLM-Image family: a drawing family with a language model in front."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.core.family import AnyProcessor, LoadContext
from omnistage.models._diffusers.family import drawing_family
from omnistage.models.glm_image.bridges import BRIDGES

if TYPE_CHECKING:
    from omnistage.core.checkpoint import Checkpoint


def _prior(context: LoadContext) -> object:
    from omnistage.models.glm_image import prior

    return prior.load_prior(context)


def _processor(model: Checkpoint) -> AnyProcessor:
    from omnistage.models.glm_image.processor import GlmImageInputProcessor

    return GlmImageInputProcessor.load(model.folder)


FAMILY = drawing_family(
    "glm_image",
    ("GlmImagePipeline",),
    processor=_processor,
    components={"glm_image.prior": _prior},
    bridges=BRIDGES,
)
