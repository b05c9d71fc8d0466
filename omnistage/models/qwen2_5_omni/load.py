"""Qwen2.5-Omni's stages from a checkpoint folder, each with just its own weights."""

from __future__ import annotations

from collections.abc import Mapping
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
from omnistage.models.loading import load_model, read_generation_config, read_weights
from omnistage.models.qwen2_5_omni.components import Talker, Thinker
from omnistage.models.qwen2_5_omni.token2wav import Precision, Token2Wav
from omnistage.models.qwen2_5_omni.voices import Speakers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, Qwen2_5OmniConfig


def read_config(folder: Path, *, speaks: bool | None = None) -> Qwen2_5OmniConfig:
    """config.json with all sections that are needed; `speaks` None: as the file says."""
    config: Qwen2_5OmniConfig = read_sections(folder, "Qwen2_5OmniConfig", "token2wav_config", speaks=speaks)
    return config


def read_speakers(folder: Path, config: Qwen2_5OmniConfig | None = None) -> Speakers:
    """Voices by name: `cond`, `ref_mel` and `bos_token`. Tensors only, nothing is unpickled.

    With `config` they are held against the model's sizes too.
    """
    path = folder / "spk_dict.pt"
    if not path.is_file():
        raise CheckpointError(f"spk_dict.pt is missing in {folder}; it holds the voices")
    try:
        speakers: object = torch.load(path, weights_only=True, map_location="cpu")
    except MemoryError:
        raise
    except Exception as error:  # torch's restricted reader may raise anything for a foreign file
        raise CheckpointError(
            f"spk_dict.pt in {folder} is damaged or holds more than tensors; it is refused: {str(error)[:200]}"
        ) from error
    if not isinstance(speakers, dict) or not speakers:
        raise CheckpointError(f"spk_dict.pt in {folder} holds no voice")
    for name, parts in speakers.items():
        if not isinstance(name, str) or not isinstance(parts, dict):
            raise CheckpointError(f"voice {name!r} in spk_dict.pt of {folder} is not a name with its parts")
        _check_voice(name, parts, config)
    return speakers


def _check_voice(name: str, parts: Mapping[str, object], config: Qwen2_5OmniConfig | None) -> None:
    dit = None if config is None else config.token2wav_config.dit_config
    begin = parts.get("bos_token")
    if not isinstance(begin, int) or isinstance(begin, bool) or begin < 0:
        raise CheckpointError(f"voice {name!r} in spk_dict.pt has bos_token {begin!r}; it must be a token id")
    if config is not None and begin >= (vocab_size := config.thinker_config.text_config.vocab_size):
        raise CheckpointError(f"voice {name!r} in spk_dict.pt has bos_token {begin}, but there are {vocab_size} tokens")
    _check_part(name, "cond", parts.get("cond"), (None, None if dit is None else dit.enc_emb_dim))
    _check_part(name, "ref_mel", parts.get("ref_mel"), (1, None, None if dit is None else dit.mel_dim))


def _check_part(voice: str, part: str, value: object, shape: tuple[int | None, ...]) -> None:
    where = f"{part} of voice {voice!r} in spk_dict.pt"
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not value.is_floating_point():
        raise CheckpointError(f"{where} is not a tensor of floating-point numbers")
    fits = value.ndim == len(shape) and all(
        size >= 1 and expected_size in (None, size) for size, expected_size in zip(value.shape, shape, strict=True)
    )
    if not fits:
        expected = ", ".join("n" if size is None else str(size) for size in shape)
        raise CheckpointError(f"{where} has shape {list(value.shape)}, not [{expected}]")
    if not bool(torch.isfinite(value).all()):
        raise CheckpointError(f"{where} holds numbers that are not finite")


def _speakers(context: LoadContext, config: Qwen2_5OmniConfig) -> Speakers:
    """The checkpoint's voices; for a model without data one of the right shapes."""
    if context.device.type != "meta":
        return read_speakers(context.model.folder, config)
    dit = config.token2wav_config.dit_config
    cond = torch.empty(1, dit.enc_emb_dim, device="meta")
    return {"voice": {"cond": cond, "ref_mel": torch.empty(1, 300, dit.mel_dim, device="meta"), "bos_token": 0}}


def load_thinker(context: LoadContext) -> Thinker:
    folder = context.model.folder
    config = read_config(folder).thinker_config
    generation = read_generation_config(folder)
    tensors = read_weights(context, "thinker.")
    model = load_model(
        transformers.Qwen2_5OmniThinkerForConditionalGeneration, config, tensors, context.device, context.dtype
    )
    if context.device.type == "meta":
        return Thinker(model)
    if end_of(config) is None and generation is not None:
        model.generation_config = generation
    return Thinker(model, load_tokenizer(folder))


def end_of(config: PreTrainedConfig) -> object:
    return config.eos_token_id if config.eos_token_id is not None else config.text_config.eos_token_id


def load_talker(context: LoadContext) -> Talker:
    folder = context.model.folder
    whole = read_config(folder, speaks=True)
    config = whole.talker_config
    speakers = _speakers(context, whole)
    model = load_model(
        transformers.Qwen2_5OmniTalkerForConditionalGeneration,
        config,
        read_weights(context, "talker."),
        context.device,
        context.dtype,
    )
    num_codes = int(whole.token2wav_config.dit_config.num_embeds)
    if context.device.type == "meta":
        return Talker(model, speakers, {}, num_codes)
    token_ids = {int(s["bos_token"]) for s in speakers.values()}
    token_ids |= {config.tts_text_end_token_id, config.tts_text_pad_token_id}
    return Talker(model, speakers, embedding_rows(folder, token_ids), num_codes)


def load_token2wav(context: LoadContext) -> Token2Wav:
    folder = context.model.folder
    whole = read_config(folder, speaks=True)
    config = whole.token2wav_config
    speakers = _speakers(context, whole)
    weights = read_weights(context, "token2wav.")
    model = load_model(transformers.Qwen2_5OmniToken2WavModel, config, weights, context.device, context.dtype)
    stage = context.stage if isinstance(context.stage, CodecStageConfig) else None
    budget = CodecBudget() if stage is None else stage.budget
    return Token2Wav(
        model,
        speakers,
        context.device,
        cuda_graphs=budget.cuda_graphs,
        precision=_precision(context, budget),
        kernels=budget.kernels,
        early_vocoder=budget.early_vocoder,
        params=None if stage is None else stage.params,
        target=context.target,
    )


def _precision(context: LoadContext, budget: CodecBudget) -> Precision:
    """TF32 is one switch for the process: a float32 deployment must not have it turned on by its speech stage."""
    exact = context.requested_dtype == "float32"
    if budget.precision == "auto":
        return "float16" if (context.target or context.device).type == "cuda" and not exact else "float32"
    return "float32" if budget.precision == "tf32" and exact else budget.precision
