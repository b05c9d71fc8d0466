"""A random Qwen-Image checkpoint in the layout of the published ones, from a toy up to the true shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omnistage.core.errors import ConfigError
from omnistage.hf import transformers
from omnistage.models import _tiny_common as common
from omnistage.models._diffusers import tiny as parts
from omnistage.models._diffusers.loading import diffusers
from omnistage.models._tiny_common import Draw, between

VARIANTS = {
    "image": "QwenImagePipeline",
    "edit": "QwenImageEditPipeline",
    "edit_plus": "QwenImageEditPlusPipeline",
}
REAL_VOCAB, FIRST_SPECIAL = 152064, 151643
# In the order of the real vocabulary.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_SMALLEST_VOCAB = common.BASE_VOCAB + REAL_VOCAB - FIRST_SPECIAL
_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def write(
    folder: Path,
    *,
    seed: int = 0,
    scale: float = 0.0,
    progress: Callable[[str, float], None] | None = None,
    variant: str = "image",
) -> None:
    """Write the checkpoint into `folder`, which must be new or empty. `variant` says what it is made for."""
    common.check_scale(scale)
    if variant not in VARIANTS:
        raise ConfigError(f"there is no {variant!r}; known: {', '.join(VARIANTS)}", param="variant")
    common.new_folder(folder)
    dtype = parts.stored_dtype(scale)
    ids = special_ids(scale)
    models: dict[str, tuple[Any, common.Rule]] = {
        "text_encoder": (text_encoder(scale), encoder_draw),
        "transformer": (transformer(scale, plus=variant == "edit_plus"), parts.transformer_draw),
        "vae": (vae(scale, editing=variant != "image"), vae_draw),
    }
    for done, (name, (model, rule)) in enumerate(models.items()):
        if progress is not None:
            progress(name, done / len(models))
        hub = hub_name if name == "text_encoder" else str
        parts.write_model(folder / name, model, rule, seed=seed, dtype=dtype, hub_name=hub)
    # The published schedule: shifted by the picture's size, ending short of noiseless.
    parts.write_flow_scheduler(
        folder / "scheduler",
        base_shift=0.5,
        max_shift=0.9,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        use_dynamic_shifting=True,
    )
    write_tokenizer(folder / "tokenizer", ids)
    index: dict[str, tuple[str, str] | None] = {
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
        "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration"),
        "tokenizer": ("transformers", "Qwen2Tokenizer"),
        "transformer": ("diffusers", "QwenImageTransformer2DModel"),
        "vae": ("diffusers", "AutoencoderKLQwenImage"),
    }
    if variant != "image":
        _write_processor(folder / "processor", ids)
        index["processor"] = ("transformers", "Qwen2VLProcessor")
    parts.write_index(folder, VARIANTS[variant], index)


def special_ids(scale: float) -> dict[str, int]:
    """The special tokens lie as far from the vocabulary's end as in the real one."""
    first = between(scale, (_SMALLEST_VOCAB, REAL_VOCAB), 16) - REAL_VOCAB + FIRST_SPECIAL
    return {token: first + offset for offset, token in enumerate(SPECIAL_TOKENS)}


def text_encoder(scale: float) -> Any:
    """Qwen2.5-VL, at scale 1 that of 7B, on no device."""
    ids = special_ids(scale)
    heads, head_dim = between(scale, (4, 28), 4), between(scale, (16, 128), 16)
    width = heads * head_dim
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": between(scale, (_SMALLEST_VOCAB, REAL_VOCAB), 16),
            "hidden_size": width,
            "intermediate_size": between(scale, (128, 18944), 32),
            "num_hidden_layers": between(scale, (2, 28)),
            "num_attention_heads": heads,
            "num_key_value_heads": 2 if scale < 0.5 else 4,
            "max_position_embeddings": 128000,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1_000_000.0,
                # Time, height and width share the head's half in the ratio 16 : 24 : 24.
                "mrope_section": [head_dim // 8, 3 * head_dim // 16, 3 * head_dim // 16],
            },
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config=_vision(scale, width),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    return parts.on_meta(lambda: transformers.Qwen2_5_VLForConditionalGeneration(config))


def _vision(scale: float, width: int) -> dict[str, object]:
    heads, head_dim, depth = between(scale, (2, 16), 2), between(scale, (16, 80), 8), between(scale, (2, 32))
    # One block in eight attends to the whole picture, the others to their windows; the last block always to all.
    full = max(1, depth // 8)
    return {
        "depth": depth,
        "hidden_size": heads * head_dim,
        "intermediate_size": between(scale, (64, 3420), 4),
        "num_heads": heads,
        "out_hidden_size": width,
        "fullatt_block_indexes": [(number + 1) * depth // full - 1 for number in range(full)],
        "window_size": 112,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def transformer(scale: float, *, plus: bool = False) -> Any:
    """The MMDiT; the newest editing checkpoints take their input pictures as free of noise (`zero_cond_t`)."""
    head_dim = between(scale, (32, 128), 32)
    return parts.on_meta(
        lambda: diffusers().QwenImageTransformer2DModel(
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
    )


def vae(scale: float, *, editing: bool = False) -> Any:
    """The video VAE that draws one frame; the statistics of its latents are the published ones.

    Pictures to edit are always brought to a million pixels: a toy that edits halves them once more, else most of its
    time would go into the attention inside the VAE.
    """
    deeper = editing and scale == 0.0
    return parts.on_meta(
        lambda: diffusers().AutoencoderKLQwenImage(
            base_dim=between(scale, (4, 96), 4),
            z_dim=16,
            dim_mult=[1, 2, 4, 4, *([4] * deeper)],
            num_res_blocks=between(scale, (1, 2)),
            temperal_downsample=[*([False] * deeper), False, True, True],
        )
    )


def encoder_draw(name: str, shape: Sequence[int]) -> Draw:
    if name.endswith("patch_embed.proj.weight"):
        return common.normal(shape)
    return common.decoder_draw(name, shape)


def vae_draw(name: str, shape: Sequence[int]) -> Draw:
    """Causal convolutions over one frame see a third of their weights: the others meet the padding before it."""
    if name.endswith("gamma"):
        return Draw(0.1, mean=1.0)
    if len(shape) == 5 and shape[2] == 3:
        gain = 0.5 if name == "decoder.conv_out.weight" else 1.0
        return common.normal(shape, fan_in=shape[1] * shape[3] * shape[4], gain=gain)
    return parts.vae_draw(name, shape)


def hub_name(name: str) -> str:
    """A tensor's name in the published checkpoint, from its name in transformers (which has moved some of them)."""
    for new, old in (("model.language_model.", "model."), ("model.visual.", "visual.")):
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name


def write_tokenizer(folder: Path, ids: dict[str, int], **settings: object) -> None:
    """Qwen's tokenizer with these special tokens."""
    folder.mkdir()
    common.write_tokenizer(
        folder,
        ids,
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "add_prefix_space": False,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "errors": "replace",
            "model_max_length": 131072,
            **settings,
        },
    )


def _write_processor(folder: Path, ids: dict[str, int]) -> None:
    write_tokenizer(folder, ids, processor_class="Qwen2VLProcessor")
    common.write_json(
        folder / "preprocessor_config.json",
        {
            "processor_class": "Qwen2VLProcessor",
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 3136,
            "max_pixels": 12845056,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": _CLIP_MEAN,
            "image_std": _CLIP_STD,
        },
    )
