"""Qwen2.5-Omni's stages from a checkpoint folder, each with just its own weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from omnistage.config import CodecBudget, CodecStageConfig
from omnistage.errors import CheckpointError
from omnistage.hf import transformers
from omnistage.models.causal_lm.processor import load_tokenizer
from omnistage.models.loading import Checkpoint, load_model
from omnistage.models.qwen2_5_omni.components import Talker, Thinker
from omnistage.models.qwen2_5_omni.token2wav import Token2Wav
from omnistage.models.qwen2_5_omni.voices import Speakers
from omnistage.pipeline.registry import LoadContext

if TYPE_CHECKING:
    from transformers import Qwen2_5OmniConfig

_EMBEDDINGS = ("thinker.model.embed_tokens.weight", "thinker.model.language_model.embed_tokens.weight")


def read_config(folder: Path) -> Qwen2_5OmniConfig:
    try:
        config = transformers.Qwen2_5OmniConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"config.json in {folder} is not Qwen2.5-Omni's: {error}") from error
    return config


def read_speakers(folder: Path) -> Speakers:
    """Voices by name: `cond`, `ref_mel` and `bos_token`. Tensors only, nothing is unpickled."""
    path = folder / "spk_dict.pt"
    if not path.is_file():
        raise CheckpointError(f"spk_dict.pt is missing in {folder}; it holds the voices")
    try:
        speakers: dict[str, dict[str, Any]] = torch.load(path, weights_only=True, map_location="cpu")
        for name, parts in speakers.items():
            for part in ("cond", "ref_mel", "bos_token"):
                if part not in parts:
                    raise CheckpointError(f"voice {name!r} in spk_dict.pt has no {part}")
    except (RuntimeError, EOFError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"spk_dict.pt in {folder} cannot be read: {error}") from error
    except Exception as error:  # torch raises the pickle module's own errors here; none of them may get further
        if type(error).__name__ not in ("UnpicklingError", "PickleError"):
            raise
        raise CheckpointError(f"spk_dict.pt in {folder} holds more than tensors; it is refused") from error
    if not speakers:
        raise CheckpointError(f"spk_dict.pt in {folder} holds no voice")
    return speakers


def load_thinker(context: LoadContext) -> Thinker:
    folder = context.model.folder
    config = read_config(folder).thinker_config
    tensors = Checkpoint(folder).tensors("thinker.")
    model = load_model(
        transformers.Qwen2_5OmniThinkerForConditionalGeneration, config, tensors, context.device, context.dtype
    )
    if end_of(config) is None and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    return Thinker(model, load_tokenizer(folder))


def end_of(config: Any) -> object:
    return config.eos_token_id if config.eos_token_id is not None else config.text_config.eos_token_id


def load_talker(context: LoadContext) -> Talker:
    folder = context.model.folder
    whole = read_config(folder)
    config = whole.talker_config
    checkpoint = Checkpoint(folder)
    weights = checkpoint.tensors("talker.")
    model = load_model(
        transformers.Qwen2_5OmniTalkerForConditionalGeneration, config, weights, context.device, context.dtype
    )
    speakers = read_speakers(folder)
    wanted = sorted(
        {int(s["bos_token"]) for s in speakers.values()} | {config.tts_text_end_token_id, config.tts_text_pad_token_id}
    )
    rows = dict(zip(wanted, checkpoint.rows(_EMBEDDINGS, wanted), strict=True))
    return Talker(model, speakers, rows, int(whole.token2wav_config.dit_config.num_embeds))


def load_token2wav(context: LoadContext) -> Token2Wav:
    folder = context.model.folder
    config = read_config(folder).token2wav_config
    weights = Checkpoint(folder).tensors("token2wav.")
    model = load_model(transformers.Qwen2_5OmniToken2WavModel, config, weights, context.device, context.dtype)
    budget = context.stage.budget if isinstance(context.stage, CodecStageConfig) else CodecBudget()
    return Token2Wav(
        model,
        read_speakers(folder),
        context.device,
        cuda_graphs=budget.cuda_graphs,
        precision=budget.precision,
        compile=budget.compile,
        early_vocoder=budget.early_vocoder,
    )
