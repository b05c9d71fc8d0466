"""GLM-Image: a language model writes a picture's tokens, a diffusion transformer draws them."""

from __future__ import annotations

from omnistage.models._diffusers.family import drawing_family
from omnistage.models.glm_image.bridges import BRIDGES
from omnistage.models.lazy import lazy, lazy_factory

FAMILY = drawing_family(
    "glm_image",
    ("GlmImagePipeline",),
    processor=lambda model: lazy("glm_image.processor", "GlmImageInputProcessor.load")(model.folder),
    components={"glm_image.prior": lazy_factory("glm_image.prior", "load_prior")},
    bridges=BRIDGES,
    verify="run",
)
