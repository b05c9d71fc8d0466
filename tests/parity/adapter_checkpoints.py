"""LoRA checkpoints with random weights for tests, written by PEFT over a small model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from omnistage.hf import transformers  # noqa: F401  (before peft, which imports it, too)

# No adapter may be called like a module: PEFT would leave that module out of the others' files.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "use_rslora": True},
    "patterns": {
        "r": 2,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "k_proj", "o_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 6, "k_proj": 3},
        "alpha_pattern": {"o_proj": 1, r"layers.\d+.self_attn.k_proj": 9},
    },
    "feed": {"r": 5, "lora_alpha": 10, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "outputs": {"r": 3, "lora_alpha": 3, "target_modules": ["o_proj", "down_proj"], "layers_to_transform": [0, 2]},
}


def with_adapters(model: Any, configs: Mapping[str, Mapping[str, Any]] = CONFIGS, folder: Path | None = None) -> Any:
    """The model with these adapters, weights that change its answers; each is saved into `folder` under its name."""
    import peft

    wrapped: Any = None
    for seed, (name, options) in enumerate(configs.items()):
        config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
        if wrapped is None:
            wrapped = peft.get_peft_model(model, config, adapter_name=name)
        else:
            wrapped.add_adapter(name, config)
        generator = torch.Generator().manual_seed(seed)
        for key, parameter in wrapped.named_parameters():
            if f".lora_A.{name}." in key or f".lora_B.{name}." in key:
                parameter.data.normal_(0, 0.06, generator=generator)
    if folder is not None:
        for name in configs:
            wrapped.save_pretrained(folder, selected_adapters=[name])
    wrapped.eval()
    return wrapped
