"""A random CSM checkpoint with its tokenizer, in the layout that published ones have.

`scale` 0 is a toy of about 0.3 million parameters, 1 has the shapes of csm-1b (with 2,048 codes, not 2,051).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from omnistage.compat import prepare_torchvision
from omnistage.core.checkpoint import read_json
from omnistage.core.verification import Progress
from omnistage.models import _tiny_common as common
from omnistage.models._tiny_common import Init, between

if TYPE_CHECKING:
    from transformers import CsmConfig

SPECIAL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|AUDIO|>", "<|audio_eos|>")


def special_ids() -> dict[str, int]:
    """The special tokens' ids, the same at every size: they follow the base vocabulary."""
    return common.following_ids(SPECIAL_TOKENS)


def config_for(scale: float) -> CsmConfig:
    """The configuration at `scale` in [0, 1]; every size grows with it."""
    from transformers import CsmConfig

    common.check_scale(scale)
    begin, end, audio, audio_end = special_ids().values()
    codes, codebooks = 1 << between(scale, (6, 11)), between(scale, (4, 32))
    kv_heads = between(scale, (2, 8), 2)
    heads, depth_heads = between(scale, (4, 32), kv_heads), between(scale, (4, 8), 2)
    codec_heads = between(scale, (2, 8))
    width, depth_width = heads * between(scale, (16, 64), 8), depth_heads * between(scale, (8, 128), 8)
    codec_width = codec_heads * between(scale, (16, 64), 8)
    return CsmConfig(
        num_codebooks=codebooks,
        vocab_size=codes,
        text_vocab_size=between(scale, (1024, 128_256), 64),
        hidden_size=width,
        intermediate_size=between(scale, (128, 8192), 64),
        num_hidden_layers=between(scale, (3, 16)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        pad_token_id=end,
        bos_token_id=begin,
        audio_token_id=audio,
        audio_eos_token_id=audio_end,
        codebook_eos_token_id=0,
        codebook_pad_token_id=codes - 1,
        depth_decoder_config={
            "num_codebooks": codebooks,
            "backbone_hidden_size": width,
            "vocab_size": codes,
            "hidden_size": depth_width,
            "intermediate_size": between(scale, (64, 8192), 64),
            "num_hidden_layers": between(scale, (2, 4)),
            "num_attention_heads": depth_heads,
            "num_key_value_heads": 2,
            "max_position_embeddings": codebooks + 1,
        },
        codec_config={
            "model_type": "mimi",
            "hidden_size": codec_width,
            "num_filters": between(scale, (4, 64), 4),
            "num_hidden_layers": between(scale, (2, 8)),
            "intermediate_size": between(scale, (64, 2048), 64),
            "num_attention_heads": codec_heads,
            "num_key_value_heads": codec_heads,
            "codebook_size": codes,
            "codebook_dim": between(scale, (16, 256), 16),
            "vector_quantization_hidden_dimension": between(scale, (16, 256), 16),
            "num_quantizers": codebooks,
            "upsample_groups": codec_width,
            "sliding_window": between(scale, (12, 250)),
        },
        architectures=["CsmForConditionalGeneration"],
        dtype="float32" if scale <= 0.5 else "bfloat16",
    )


def weight_rule(name: str, shape: Sequence[int]) -> Init:
    """Weights for greedy speech that varies, and stays clear of the loudest samples."""
    if name.endswith("layer_scale.scale"):
        return Init(0.05, mean=0.5)
    if len(shape) == 1:
        return common.vector_init(name)
    if "embed" in name:
        return Init(1.0 if name.endswith("embed_sum") else 0.5)
    if name.endswith("codebooks_head.weight"):  # [codebooks, width, codes]
        return common.normal(shape, fan_in=shape[1], gain=4.0)
    if name.startswith("codec_model."):
        return common.normal(shape)
    return common.head_init(shape, (0, shape[0])) if name == "lm_head.weight" else common.decoder_init(name, shape)


def write(folder: Path, *, seed: int = 0, scale: float = 0.0, progress: Progress | None = None) -> None:
    """Write the checkpoint into `folder`, which must be new or empty."""
    prepare_torchvision(required=False)
    from transformers import CsmForConditionalGeneration

    common.start(folder, scale)
    config, ids = config_for(scale), special_ids()
    ends = {"bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[1], "pad_token": SPECIAL_TOKENS[1]}
    settings = common.tokenizer_settings("PreTrainedTokenizerFast", 2048, ends, qwen=False)
    common.write_tokenizer(folder, ids, settings)
    if progress is not None:
        progress("making weights", 0.1)
    model = CsmForConditionalGeneration(config)
    # One matrix, as the config says; some versions of transformers do not tie them.
    model.backbone_model.embed_tokens.embed_audio_tokens.weight = model.depth_decoder.model.embed_tokens.weight
    tables = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("embed_sum")]
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *tables):
            tensor.copy_(common.initial(name, tensor.shape, weight_rule, seed))
    if progress is not None:
        progress("writing weights", 0.5)
    # transformers' own: it gives the codec's modules the names that published checkpoints have.
    model.to(common.stored_dtype(scale)).save_pretrained(folder, max_shard_size=common.MAX_SHARD_BYTES)
    # As published ones have it, which older versions of transformers insist on.
    settings = read_json(folder / "config.json")
    common.write_json(folder / "config.json", {**settings, "tie_word_embeddings": False})
    if progress is not None:
        progress("weights written", 1.0)
