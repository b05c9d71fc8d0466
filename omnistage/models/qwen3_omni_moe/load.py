"""Qwen3-Omni's stages from a checkpoint folder, each with just its own weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from omnistage.config import CodecBudget, CodecStageConfig
from omnistage.core.errors import CheckpointError
from omnistage.core.family import LoadContext
from omnistage.hf import transformers
from omnistage.models._qwen_omni.components import embedding_rows
from omnistage.models._qwen_omni.config import read_sections
from omnistage.models.causal_lm.processor import load_tokenizer
from omnistage.models.experts import fused_weights
from omnistage.models.loading import load_model, read_generation_config, read_weights
from omnistage.models.qwen3_omni_moe.code2wav import Code2Wav
from omnistage.models.qwen3_omni_moe.components import Talker, Thinker

if TYPE_CHECKING:
    from transformers import Qwen3OmniMoeConfig


def read_config(folder: Path) -> Qwen3OmniMoeConfig:
    """config.json with all sections that are needed."""
    config: Qwen3OmniMoeConfig = read_sections(folder, "Qwen3OmniMoeConfig", "code2wav_config")
    if config.enable_audio_output:
        voices_of(config)
    return config


def voices_of(config: Qwen3OmniMoeConfig) -> dict[str, int]:
    """Voices by name, as the model card writes them; config.json has them in small letters."""
    speakers, limit = config.talker_config.speaker_id, int(config.talker_config.text_config.vocab_size)
    if not isinstance(speakers, dict) or not speakers:
        raise CheckpointError("config.json names no voice in talker_config.speaker_id; fetch the file again")
    for name, token in speakers.items():
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < limit:
            raise CheckpointError(f"voice {name!r} in config.json has the id {token!r}; it must be below {limit}")
    return {name.capitalize() if name.islower() else name: token for name, token in speakers.items()}


def load_thinker(context: LoadContext) -> Thinker:
    folder = context.model.folder
    whole = read_config(folder)
    config = whole.thinker_config
    cls = transformers.Qwen3OmniMoeThinkerForConditionalGeneration
    model = load_model(cls, config, fused_weights(context, "thinker."), context.device, context.dtype)
    accept = int(whole.talker_config.accept_hidden_layer) if whole.enable_audio_output else None
    if context.device.type == "meta":
        return Thinker(model, accept)
    generation = read_generation_config(folder)
    if generation is not None:
        model.generation_config = generation
    return Thinker(model, accept, load_tokenizer(folder))


def load_talker(context: LoadContext) -> Talker:
    folder = context.model.folder
    whole = read_config(folder)
    config = whole.talker_config
    # Its positions need it where a chat has pictures and sound, and its own section has none.
    config.audio_config = whole.thinker_config.audio_config
    cls = transformers.Qwen3OmniMoeTalkerForConditionalGeneration
    model = load_model(cls, config, fused_weights(context, "talker."), context.device, context.dtype)
    if context.device.type == "meta":
        return Talker(model, whole, voices_of(whole), {})
    ids = (whole.tts_bos_token_id, whole.tts_eos_token_id, whole.tts_pad_token_id)
    return Talker(model, whole, voices_of(whole), embedding_rows(folder, ids))


def load_code2wav(context: LoadContext) -> Code2Wav:
    whole = read_config(context.model.folder)
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

    tensors = read_weights(context, "code2wav.")
    budget = context.stage.budget if isinstance(context.stage, CodecStageConfig) else CodecBudget()
    dtype = torch.float16 if budget.precision == "float16" else context.dtype
    model = load_model(Qwen3OmniMoeCode2Wav, whole.code2wav_config, tensors, context.device, dtype)
    return Code2Wav(
        model,
        context.device,
        voices=tuple(voices_of(whole)),
        cuda_graphs=budget.cuda_graphs,
        kernels=budget.kernels,
        target=context.target,
    )
