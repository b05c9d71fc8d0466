"""Random checkpoints of Stable Diffusion in diffusers' layout.

`scale` 0 is a toy of about a million parameters, 1 has the shapes of Stable Diffusion 1.5, 2.1 or XL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from omnistage.models import _tiny_common as common
from omnistage.models._diffusers import tiny as parts
from omnistage.models._diffusers.loading import diffusers
from omnistage.models._diffusers.tiny import TinyModel, TinyPart, TinyPipeline
from omnistage.models._tiny_common import Init, between

_BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
_LEADING = {**_BETAS, "timestep_spacing": "leading", "steps_offset": 1}


@dataclass(frozen=True, slots=True)
class _Variant:
    pipeline: str
    scheduler: str
    settings: Mapping[str, object]
    unet: Mapping[str, object]
    control: bool = False

    @property
    def xl(self) -> bool:
        return "XL" in self.pipeline


_PNDM = {**_LEADING, "skip_prk_steps": True}
VARIANTS = {
    "v1": _Variant("StableDiffusionPipeline", "PNDMScheduler", _PNDM, {}),
    "v2": _Variant(
        "StableDiffusionPipeline",
        "DDIMScheduler",
        {**_LEADING, "clip_sample": False, "set_alpha_to_one": False, "prediction_type": "v_prediction"},
        {"use_linear_projection": True},
    ),
    "inpaint": _Variant("StableDiffusionInpaintPipeline", "PNDMScheduler", _PNDM, {"in_channels": 9}),
    "lcm": _Variant("StableDiffusionPipeline", "LCMScheduler", _LEADING, {"time_cond_proj_dim": 32}),
    "xl": _Variant("StableDiffusionXLPipeline", "EulerDiscreteScheduler", _LEADING, {"use_linear_projection": True}),
    "controlnet": _Variant("StableDiffusionControlNetPipeline", "UniPCMultistepScheduler", _LEADING, {}, control=True),
    "xl_controlnet": _Variant(
        "StableDiffusionXLControlNetPipeline",
        "EulerDiscreteScheduler",
        _LEADING,
        {"use_linear_projection": True},
        control=True,
    ),
}


def _shared_settings(scale: float, variant: _Variant, text: int, pooled: int) -> dict[str, object]:
    """Settings of a UNet that its ControlNet has too."""
    v2 = "use_linear_projection" in variant.unet
    widths = tuple(between(scale, (16 * n, 320 * n), 16) for n in (1, 2, 4, 4))
    plain, attentive = "DownBlock2D", "CrossAttnDownBlock2D"
    downs: tuple[str, ...] = (plain, attentive, attentive) if variant.xl else (attentive, attentive, attentive, plain)
    heads: int | tuple[int, ...] = tuple(width // between(scale, (16, 64)) for width in widths) if v2 else 8
    if scale == 0:  # two levels are enough to have everything once
        downs, widths = (downs[0], downs[-1]) if variant.xl else (attentive, plain), widths[:2]
        heads = (1, 2) if v2 else 2
    levels = len(downs)
    settings: dict[str, object] = {
        "down_block_types": downs,
        "block_out_channels": widths[:levels],
        "attention_head_dim": heads[:levels] if isinstance(heads, tuple) else heads,
        "layers_per_block": 2 if scale else 1,
        "cross_attention_dim": text,
        "norm_num_groups": 32 if scale else 8,
        "use_linear_projection": v2,
    }
    if variant.xl:
        times = between(scale, (8, 256), 2)
        settings |= {
            "transformer_layers_per_block": (1, 2, 10) if scale else (1, 2),
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": times,
            "projection_class_embeddings_input_dim": 6 * times + pooled,
        }
    return settings


def unet(scale: float, variant: _Variant, *, text: int, pooled: int) -> nn.Module:
    """The UNet at `scale`, on no device, for texts of these widths."""
    shared = _shared_settings(scale, variant, text, pooled)
    downs = shared["down_block_types"]
    assert isinstance(downs, tuple)
    ups = tuple(name.replace("Down", "Up") for name in reversed(downs))
    side = 128 if variant.xl else 96 if variant.unet.get("use_linear_projection") else 64
    return parts.diffusers_model(
        "UNet2DConditionModel",
        **{**shared, "sample_size": between(scale, (8, side)), "up_block_types": ups, **variant.unet},
    )


def controlnet(scale: float, variant: _Variant, *, text: int, pooled: int) -> nn.Module:
    """The ControlNet that fits the UNet, on no device."""
    shared = _shared_settings(scale, variant, text, pooled)
    embedding = (16, 32, 96, 256) if scale else (8, 8, 16, 16)
    return parts.diffusers_model("ControlNetModel", **shared, conditioning_embedding_out_channels=embedding)


def checkpoint(scale: float, variant: str) -> TinyPipeline:
    options = VARIANTS[variant]
    widest = 1024 if variant == "v2" else 768
    first = parts.clip(scale, hidden=(32, widest), layers=(2, 23 if variant == "v2" else 12), projected=False)
    models = {"text_encoder": TinyModel(first, parts.clip_init, parts.clip_hub_name)}
    others: dict[str, TinyPart | None] = {"feature_extractor": None, "image_encoder": None}
    others["tokenizer"] = parts.clip_tokenizer()
    text, pooled = first.config.hidden_size, 0
    if options.xl:
        second = parts.clip(scale, hidden=(32, 1280), layers=(2, 32), projected=True)
        models["text_encoder_2"] = TinyModel(second, parts.clip_init)
        others["tokenizer_2"] = parts.clip_tokenizer(pad_token="!")
        text, pooled = text + second.config.hidden_size, second.config.projection_dim
    else:
        others["safety_checker"] = None
    widths = {"text": text, "pooled": pooled}
    models["unet"] = TinyModel(unet(scale, options, **widths), parts.transformer_init)
    if options.control:
        models["controlnet"] = TinyModel(controlnet(scale, options, **widths), _controlnet_init)
    factor = 0.13025 if options.xl else 0.18215
    vae = parts.autoencoder(
        scale, scaling_factor=factor, latent_channels=4, use_quant_conv=True, use_post_quant_conv=True
    )
    models["vae"] = TinyModel(vae, parts.vae_init)
    scheduler = getattr(diffusers(), options.scheduler)(**options.settings)
    others["scheduler"] = TinyPart("diffusers", options.scheduler, scheduler.save_pretrained)
    settings = {"force_zeros_for_empty_prompt": True} if options.xl else {"requires_safety_checker": False}
    return TinyPipeline(options.pipeline, models, others, settings=settings)


write = parts.writer(checkpoint, VARIANTS)


def _controlnet_init(name: str, shape: Sequence[int]) -> Init:
    """What it adds is small beside what the UNet computes, as that of a trained one is."""
    if name.startswith(("controlnet_down_blocks", "controlnet_mid_block")) and len(shape) > 1:
        return common.normal(shape, gain=0.2)
    return parts.transformer_init(name, shape)
