"""Qwen-Image and Qwen-Image-Edit: pictures from text, and from pictures."""

from __future__ import annotations

from omnistage.models._diffusers.family import drawing_family

FAMILY = drawing_family(
    "qwen_image",
    (
        "QwenImagePipeline",
        "QwenImageImg2ImgPipeline",
        "QwenImageEditPipeline",
        "QwenImageEditPlusPipeline",
    ),
    variants=("image", "edit", "edit_plus"),
    aliases=("qwen-image",),
    full_precision=(r"(^|\.)img_mlp\.",),  # in float8 these alone change pictures visibly
)
