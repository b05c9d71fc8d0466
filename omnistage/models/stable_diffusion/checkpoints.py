"""Which of Stable Diffusion's models a checkpoint is, and whether it can be served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from omnistage.core.checkpoint import read_json
from omnistage.core.errors import UnsupportedModelError
from omnistage.core.params import DiffusionParams
from omnistage.models._diffusers.base import default_to
from omnistage.models._diffusers.loading import Parts, check_config

_SUPPORTED = {"class_embed_type": None, "num_class_embeds": None, "encoder_hid_dim_type": None}
"""Settings of a UNet that these pipelines have nothing for."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a checkpoint's index and its UNet's configuration say."""

    xl: bool
    control: bool
    """It has a ControlNet: the last picture of a request is the one that controls."""
    changes: bool
    """Its ControlNet pipeline starts from a picture."""
    inpainting: bool
    """Its UNet sees the mask and the masked picture beside the latents."""
    distilled: bool
    """Its UNet is told the guidance as a number (latent consistency models)."""

    @classmethod
    def of(cls, parts: Parts) -> Self:
        """Raise `UnsupportedModelError` for a checkpoint that these pipelines cannot draw with."""
        name = parts.pipeline_class
        xl = name.startswith("StableDiffusionXL")
        if xl and (parts.index.get("requires_aesthetics_score") or not parts.has("text_encoder")):
            raise UnsupportedModelError(
                f"{parts.folder} is SDXL's refiner, which finishes the latents of another model; serve the base model"
            )
        unet = _config(parts, "unet")
        for setting, value in {**_SUPPORTED, "addition_embed_type": "text_time" if xl else None}.items():
            if unet.get(setting) != value:
                raise UnsupportedModelError(
                    f"the UNet in {parts.folder} has {setting}={unet.get(setting)!r}, which {name} cannot feed"
                )
        channels, latents = unet.get("in_channels", 4), _config(parts, "vae").get("latent_channels", 4)
        if channels not in (latents, 2 * latents + 1):
            raise UnsupportedModelError(
                f"the UNet in {parts.folder} takes {channels} channels; {latents} are served, and for inpainting "
                f"{2 * latents + 1}"
            )
        control = "ControlNet" in name
        if control:
            _check_controlnet(parts, plain=channels == latents)
        return cls(
            xl=xl,
            control=control,
            changes=control and "Img2Img" in name,
            inpainting=channels != latents,
            distilled=unet.get("time_cond_proj_dim") is not None,
        )

    @property
    def pipeline(self) -> str:
        """The pipeline class that sets the scheduler up."""
        task = "ControlNet" if self.control else "Inpaint" if self.inpainting else ""
        return f"StableDiffusion{'XL' if self.xl else ''}{task}Pipeline"

    @property
    def encoder_pipeline(self) -> str:
        """The pipeline class with processors for pictures and masks."""
        xl = "XL" if self.xl else ""
        return self.pipeline if self.control else f"StableDiffusion{xl}InpaintPipeline"

    def guidance(self, params: DiffusionParams, *, painting: bool) -> float:
        """As asked, else as diffusers' pipelines have it."""
        return default_to(params.guidance, 5.0 if self.xl and not painting else 7.5)

    def strength(self, params: DiffusionParams, *, painting: bool) -> float:
        if self.xl and not self.control:
            return default_to(params.strength, 0.9999 if painting else 0.3)
        return default_to(params.strength, 1.0 if painting else 0.8)

    def control_scale(self, params: DiffusionParams) -> float:
        return default_to(params.control_scale, 0.8 if self.changes else 1.0)


def vae_dtypes(parts: Parts, dtype: torch.dtype, *, encoding: bool) -> dict[str, torch.dtype]:
    """The VAE of SDXL overflows in float16; its pipelines encode pictures in float32 whatever the dtype."""
    upcast = bool(_config(parts, "vae").get("force_upcast", True)) and parts.pipeline_class.startswith(
        "StableDiffusionXL"
    )
    return {"vae": torch.float32} if upcast and (encoding or dtype is torch.float16) else {}


def _config(parts: Parts, name: str) -> Mapping[str, Any]:
    folder: Path = parts.folder_of(name)
    check_config(folder)
    config: Mapping[str, Any] = read_json(folder / "config.json")
    return config


def _check_controlnet(parts: Parts, *, plain: bool) -> None:
    if not plain:
        raise UnsupportedModelError(
            f"{parts.folder} has a ControlNet and a UNet for inpainting, which are not served together"
        )
    cls = parts.part_class("controlnet").__name__
    if cls != "ControlNetModel":
        raise UnsupportedModelError(f"{parts.folder} has a {cls}; only checkpoints with one ControlNetModel are served")
    if _config(parts, "controlnet").get("global_pool_conditions"):
        raise UnsupportedModelError(
            f"the ControlNet in {parts.folder} pools its conditions, which needs a mode that is not served"
        )
