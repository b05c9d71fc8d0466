"""A random Z-Image checkpoint in the layout of the published one, from a toy up to the true shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omnistage.hf import transformers
from omnistage.models import _tiny_common as common
from omnistage.models._diffusers import tiny as parts
from omnistage.models._diffusers.loading import diffusers
from omnistage.models._tiny_common import Draw, between

REAL_VOCAB, FIRST_SPECIAL = 151936, 151643
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # in the order of the real vocabulary
_SMALLEST_VOCAB = common.BASE_VOCAB + REAL_VOCAB - FIRST_SPECIAL
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<|im_start|>assistant\\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{- '<think>\\n\\n</think>\\n\\n' -}}"
    "{%- endif -%}"
    "{%- endif -%}"
)


def write(
    folder: Path, *, seed: int = 0, scale: float = 0.0, progress: Callable[[str, float], None] | None = None
) -> None:
    """Write the checkpoint into `folder`, which must be new or empty."""
    common.check_scale(scale)
    common.new_folder(folder)
    models: dict[str, tuple[Any, common.Rule]] = {
        "text_encoder": (text_encoder(scale), common.decoder_draw),
        "transformer": (transformer(scale), transformer_draw),
        "vae": (parts.autoencoder(scale, scaling_factor=0.3611, shift_factor=0.1159), parts.vae_draw),
    }
    for done, (name, (model, rule)) in enumerate(models.items()):
        if progress is not None:
            progress(name, done / len(models))
        parts.write_model(folder / name, model, rule, seed=seed, dtype=parts.stored_dtype(scale))
    parts.write_flow_scheduler(folder / "scheduler", num_train_timesteps=1000, shift=3.0, use_dynamic_shifting=False)
    _write_tokenizer(folder / "tokenizer", special_ids(scale))
    parts.write_index(
        folder,
        "ZImagePipeline",
        {
            "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
            "text_encoder": ("transformers", "Qwen3ForCausalLM"),
            "tokenizer": ("transformers", "Qwen2Tokenizer"),
            "transformer": ("diffusers", "ZImageTransformer2DModel"),
            "vae": ("diffusers", "AutoencoderKL"),
        },
    )


def special_ids(scale: float) -> dict[str, int]:
    """The special tokens lie as far from the vocabulary's end as in the real one."""
    first = between(scale, (_SMALLEST_VOCAB, REAL_VOCAB), 16) - REAL_VOCAB + FIRST_SPECIAL
    return {token: first + offset for offset, token in enumerate(SPECIAL_TOKENS)}


def text_encoder(scale: float) -> Any:
    """Qwen3, at scale 1 that of 4B, on no device."""
    ids = special_ids(scale)
    config = transformers.Qwen3Config(
        vocab_size=between(scale, (_SMALLEST_VOCAB, REAL_VOCAB), 16),
        hidden_size=_text_width(scale),
        intermediate_size=between(scale, (128, 9728), 32),
        num_hidden_layers=between(scale, (3, 36)),
        num_attention_heads=between(scale, (4, 32), 8 if scale >= 0.5 else 2),
        num_key_value_heads=2 if scale < 0.5 else 8,
        head_dim=between(scale, (16, 128), 16),
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
    )
    return parts.on_meta(lambda: transformers.Qwen3ForCausalLM(config))


def transformer(scale: float) -> Any:
    """The single-stream transformer, on no device."""
    heads, head_dim = between(scale, (2, 30)), between(scale, (32, 128), 32)
    return parts.on_meta(
        lambda: diffusers().ZImageTransformer2DModel(
            in_channels=16,
            dim=heads * head_dim,
            n_layers=between(scale, (2, 30)),
            n_refiner_layers=between(scale, (1, 2)),
            n_heads=heads,
            n_kv_heads=heads,
            cap_feat_dim=_text_width(scale),
            axes_dims=[head_dim // 4, 3 * head_dim // 8, 3 * head_dim // 8],
            axes_lens=[1536, 512, 512],
        )
    )


def transformer_draw(name: str, shape: Sequence[int]) -> Draw:
    if name.endswith("pad_token"):
        return Draw(0.5)
    return parts.transformer_draw(name, shape)


def _text_width(scale: float) -> int:
    return between(scale, (64, 2560), 64)


def _write_tokenizer(folder: Path, ids: dict[str, int]) -> None:
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
            "chat_template": _CHAT_TEMPLATE,
        },
    )
