"""A random Qwen-Image checkpoint in the layout of the published ones, from a toy up to the true shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from omnistage.hf import transformers
from omnistage.models import _tiny_common as common
from omnistage.models._diffusers import tiny as parts
from omnistage.models._diffusers.tiny import TinyModel, TinyPart, TinyPipeline
from omnistage.models._tiny_common import Init, between

VARIANTS = {
    "image": "QwenImagePipeline",
    "edit": "QwenImageEditPipeline",
    "edit_plus": "QwenImageEditPlusPipeline",
}
REAL_VOCAB, FIRST_SPECIAL = 152064, 151643
# In the order of the real vocabulary.
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
_MIN_VOCAB = common.BASE_VOCAB + REAL_VOCAB - FIRST_SPECIAL


def checkpoint(scale: float, variant: str) -> TinyPipeline:
    ids, edits = special_ids(scale), variant != "image"
    # The published schedule: shifted by the picture's size, ending short of noiseless.
    scheduler = parts.flow_scheduler(
        base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02, use_dynamic_shifting=True
    )
    others: dict[str, TinyPart | None] = {"scheduler": scheduler, "tokenizer": parts.qwen_tokenizer(ids)}
    if edits:
        others["processor"] = TinyPart("transformers", "Qwen2VLProcessor", lambda path: _write_processor(path, ids))
    return TinyPipeline(
        VARIANTS[variant],
        {
            "text_encoder": TinyModel(text_encoder(scale), _encoder_init, _hub_name),
            "transformer": TinyModel(transformer(scale, plus=variant == "edit_plus"), parts.transformer_init),
            "vae": TinyModel(vae(scale, editing=edits), _vae_init),
        },
        others,
        order=("scheduler", "text_encoder", "tokenizer", "transformer", "vae", *(["processor"] if edits else [])),
    )


write = parts.writer(checkpoint, VARIANTS)


def special_ids(scale: float) -> dict[str, int]:
    return common.special_ids(SPECIAL_TOKENS, _vocab_size(scale), REAL_VOCAB, FIRST_SPECIAL)


def _vocab_size(scale: float) -> int:
    return between(scale, (_MIN_VOCAB, REAL_VOCAB), 16)


def text_encoder(scale: float) -> nn.Module:
    """Qwen2.5-VL, at scale 1 that of 7B, on no device."""
    ids = special_ids(scale)
    heads, head_dim = between(scale, (4, 28), 4), between(scale, (16, 128), 16)
    width = heads * head_dim
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": _vocab_size(scale),
            "hidden_size": width,
            "intermediate_size": between(scale, (128, 18944), 32),
            "num_hidden_layers": between(scale, (2, 28)),
            "num_attention_heads": heads,
            "num_key_value_heads": 2 if scale < 0.5 else 4,
            "max_position_embeddings": 128000,
            "rope_parameters": common.mrope(head_dim),
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config=common.qwen_vision_config(scale, width, heads=2, width=64),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    return parts.on_meta(lambda: transformers.Qwen2_5_VLForConditionalGeneration(config))


def transformer(scale: float, *, plus: bool = False) -> nn.Module:
    """The MMDiT; the newest editing checkpoints take their input pictures as free of noise (`zero_cond_t`)."""
    head_dim = between(scale, (32, 128), 32)
    return parts.diffusers_model(
        "QwenImageTransformer2DModel",
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=between(scale, (2, 60)),
        attention_head_dim=head_dim,
        num_attention_heads=between(scale, (2, 24)),
        joint_attention_dim=between(scale, (4, 28), 4) * between(scale, (16, 128), 16),
        axes_dims_rope=(head_dim // 8, 7 * head_dim // 16, 7 * head_dim // 16),
        zero_cond_t=plus,
    )


def vae(scale: float, *, editing: bool = False) -> nn.Module:
    """The video VAE that draws one frame; the statistics of its latents are the published ones.

    Pictures to edit are always brought to a million pixels: a toy that edits halves them once more, else most of its
    time would go into the attention inside the VAE.
    """
    deeper = editing and scale == 0.0
    return parts.diffusers_model(
        "AutoencoderKLQwenImage",
        base_dim=between(scale, (4, 96), 4),
        z_dim=16,
        dim_mult=[1, 2, 4, 4, *([4] * deeper)],
        num_res_blocks=between(scale, (1, 2)),
        temperal_downsample=[*([False] * deeper), False, True, True],
    )


def _encoder_init(name: str, shape: Sequence[int]) -> Init:
    if name.endswith("patch_embed.proj.weight"):
        return common.normal(shape)
    return common.decoder_init(name, shape)


def _vae_init(name: str, shape: Sequence[int]) -> Init:
    """Causal convolutions over one frame see a third of their weights: the others meet the padding before it."""
    if name.endswith("gamma"):
        return Init(0.1, mean=1.0)
    if len(shape) == 5 and shape[2] == 3:
        gain = 0.5 if name == "decoder.conv_out.weight" else 1.0
        return common.normal(shape, fan_in=shape[1] * shape[3] * shape[4], gain=gain)
    return parts.vae_init(name, shape)


def _hub_name(name: str) -> str:
    """A tensor's name in the published checkpoint, from its name in transformers (which has moved some of them)."""
    for new, old in (("model.language_model.", "model."), ("model.visual.", "visual.")):
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name


def _write_processor(folder: Path, ids: dict[str, int]) -> None:
    parts.qwen_tokenizer(ids, processor_class="Qwen2VLProcessor").write(folder)
    settings = common.qwen_image_processor("Qwen2VLProcessor", max_pixels=12845056)
    common.write_json(folder / "preprocessor_config.json", settings)
