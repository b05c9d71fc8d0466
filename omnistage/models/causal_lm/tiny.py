"""A random Llama checkpoint with its tokenizer, in the layout that published ones have.

`scale` 0 is a toy of about 0.2 million parameters, 0.5 about 100 million, 1 the 1.1 billion of TinyLlama's shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from omnistage.compat import prepare_torchvision
from omnistage.core.verification import Progress
from omnistage.models import _tiny_common as common
from omnistage.models._tiny_common import Init, between

if TYPE_CHECKING:
    from transformers import LlamaConfig

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if loop.first and message.role != 'system' -%}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}"
    "{%- else -%}{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def special_ids() -> dict[str, int]:
    """The special tokens' ids, the same at every size: they follow the base vocabulary."""
    return common.following_ids(SPECIAL_TOKENS)


def config_for(scale: float) -> LlamaConfig:
    """The configuration at `scale` in [0, 1]; every size grows with it."""
    from transformers import LlamaConfig

    common.check_scale(scale)
    ids = special_ids()
    kv_heads = 2 if scale < 0.25 else 4
    heads = between(scale, (4, 12, 32), kv_heads)
    head_dim = between(scale, (16, 64, 64), 8)
    return LlamaConfig(
        vocab_size=between(scale, (1024, 16384, 32000), 64),
        hidden_size=heads * head_dim,
        intermediate_size=between(scale, (128, 2048, 5632), 32),
        num_hidden_layers=between(scale, (3, 12, 22)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=between(scale, (2048, 2048)),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=ids["<|im_start|>"],
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
        architectures=["LlamaForCausalLM"],
        dtype="float32" if scale <= 0.5 else "bfloat16",
    )


def weight_rule() -> common.Rule:
    """Weights for greedy answers that are varied and keep to tokens that exist."""
    eos = special_ids()["<|im_end|>"]

    def rule(name: str, shape: Sequence[int]) -> Init:
        if name == "lm_head.weight":
            return common.head_init(shape, (0, common.BASE_VOCAB), (eos, eos + 1))
        return common.decoder_init(name, shape)

    return rule


def write(
    folder: Path,
    *,
    seed: int = 0,
    scale: float = 0.0,
    progress: Progress | None = None,
    config: LlamaConfig | None = None,
) -> None:
    """Write the checkpoint into `folder`, which must be new or empty. A `config` says more than the scale."""
    prepare_torchvision(required=False)
    from transformers import LlamaForCausalLM

    config = config or config_for(scale)
    common.new_folder(folder)
    ids = special_ids()
    template = {"chat_template": CHAT_TEMPLATE}
    length = config.max_position_embeddings
    settings = common.tokenizer_settings("PreTrainedTokenizerFast", length, template, qwen=False)
    common.write_tokenizer(folder, ids, settings)
    with torch.device("meta"):
        tensors = LlamaForCausalLM(config).state_dict()
    dtype = common.stored_dtype(scale)
    common.write_weights(folder, tensors, weight_rule(), lambda _: dtype, seed, progress)
    common.write_generation_config(folder, ids)
    config.save_pretrained(folder)  # last: a folder without it is no checkpoint
