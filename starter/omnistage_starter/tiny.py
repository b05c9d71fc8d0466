"""A starter with random weights in the layout of `omnistage pull starter`: think, draw and speech recognition.

`scale` 0 has about a million parameters, 1 about the shapes of the real one. The voice is the real one, from its own
package. Speech recognition is written only where the package `onnx` is installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.core.errors import MissingDependencyError
from omnistage.models import _tiny_common as common
from omnistage.models._diffusers import tiny as parts
from omnistage.models._diffusers.loading import diffusers
from omnistage.models._tiny_common import between
from omnistage.models.causal_lm import tiny as causal_lm
from omnistage.models.flux2.tiny import transformer_init
from omnistage_starter.draw import CHANNELS
from omnistage_starter.family import ARCHITECTURE
from omnistage_starter.think import DRAW_LAYER
from omnistage_starter.tiny_speech_to_text import write_speech_to_text

if TYPE_CHECKING:
    from transformers import LlamaConfig


def write(
    folder: Path,
    *,
    seed: int = 0,
    scale: float = 0.0,
    progress: Callable[[str, float], None] | None = None,
) -> None:
    """Write the checkpoint into `folder`, which must be new or empty."""
    report = progress or (lambda doing, share: None)
    common.check_scale(scale)
    common.new_folder(folder)
    config = language_config(scale)
    report("writing think", 0.0)
    causal_lm.write(folder / "think", seed=seed, scale=min(scale, 0.5), config=config)
    report("writing draw", 0.6)
    network = parts.TinyModel(transformer(scale, text=config.hidden_size), transformer_init)
    parts.write_model(folder / "draw" / "transformer", network, seed=seed, dtype=common.stored_dtype(0.0))
    parts.flow_scheduler(shift=2.0, use_dynamic_shifting=False).write(folder / "draw" / "scheduler")
    report("writing hear", 0.9)
    with contextlib.suppress(MissingDependencyError):  # then it takes no audio, like a starter pulled without npm
        write_speech_to_text(folder / "hear", seed=seed)
    config_json = {"architectures": [ARCHITECTURE], "model_type": "omnistage_starter"}
    common.write_json(folder / "config.json", config_json)  # last: a folder without it is not a checkpoint
    report("checkpoint written", 1.0)


def language_config(scale: float) -> LlamaConfig:
    """A Llama with enough layers for the draw stage; at scale 1 it has SmolLM2-135M's shapes."""
    config = causal_lm.config_for(0.0)
    kv_heads, head = between(scale, (2, 3)), between(scale, (16, 64), 8)
    config.num_key_value_heads, config.num_attention_heads = kv_heads, kv_heads * between(scale, (2, 3))
    config.head_dim, config.hidden_size = head, config.num_attention_heads * head
    config.intermediate_size = between(scale, (128, 1536), 32)
    config.num_hidden_layers = between(scale, (DRAW_LAYER + 2, max(30, DRAW_LAYER + 2)))
    config.vocab_size = between(scale, (1024, 49152), 64)
    return config


def transformer(scale: float, *, text: int) -> Any:
    """FLUX.2's transformer over patches of pixels, on the meta device."""
    head = between(scale, (32, 64), 32)
    return parts.on_meta(
        lambda: diffusers().Flux2Transformer2DModel(
            patch_size=1,
            in_channels=CHANNELS,
            num_layers=1,
            num_single_layers=between(scale, (1, 8)),
            attention_head_dim=head,
            num_attention_heads=between(scale, (2, 4)),
            joint_attention_dim=text,
            guidance_embeds=False,
            axes_dims_rope=(head // 4,) * 4,
        )
    )
