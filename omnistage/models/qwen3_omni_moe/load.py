"""Qwen3-Omni's stages from a checkpoint folder, each with just its own weights."""

from __future__ import annotations

import copy
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from omnistage.config import CodecBudget, CodecStageConfig
from omnistage.core.checkpoint import read_json
from omnistage.core.errors import CheckpointError
from omnistage.core.family import LoadContext
from omnistage.hf import transformers
from omnistage.models.causal_lm.processor import load_tokenizer
from omnistage.models.loading import Checkpoint, load_model, positive, read_generation_config, read_weights
from omnistage.models.qwen3_omni_moe.code2wav import Code2Wav
from omnistage.models.qwen3_omni_moe.components import Talker, Thinker

if TYPE_CHECKING:
    from transformers import Qwen3OmniMoeConfig

_EMBEDDINGS = ("thinker.model.embed_tokens.weight", "thinker.model.language_model.embed_tokens.weight")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def read_config(folder: Path) -> Qwen3OmniMoeConfig:
    """config.json with all sections that are needed."""
    raw = read_json(folder / "config.json")
    speaks = bool(raw.get("enable_audio_output", True))
    for section in ("thinker_config", "talker_config", "code2wav_config")[: 3 if speaks else 1]:
        # `transformers` would take its defaults for a section that is not there.
        if not isinstance(raw.get(section), dict):
            raise CheckpointError(f"config.json in {folder} has no section {section}; fetch the file again")
    try:
        config = _parse_config(folder, json.dumps(raw))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"config.json in {folder} is not Qwen3-Omni's: {error}") from error
    positive(config.thinker_config.text_config, "vocab_size")
    if speaks:
        voices_of(config)
    return copy.deepcopy(config)


@lru_cache(maxsize=4)
def _parse_config(folder: Path, content: str) -> Qwen3OmniMoeConfig:
    """Each stage needs it twice, and `transformers` takes its time for it. The content may change."""
    del content
    return transformers.Qwen3OmniMoeConfig.from_pretrained(folder, local_files_only=True)


def voices_of(config: Qwen3OmniMoeConfig) -> dict[str, int]:
    """Voices by name, as the model card writes them; config.json has them in small letters."""
    speakers, limit = config.talker_config.speaker_id, int(config.talker_config.text_config.vocab_size)
    if not isinstance(speakers, dict) or not speakers:
        raise CheckpointError("config.json names no voice in talker_config.speaker_id; fetch the file again")
    for name, token in speakers.items():
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < limit:
            raise CheckpointError(f"voice {name!r} in config.json has the id {token!r}; it must be below {limit}")
    return {name.capitalize() if name.islower() else name: token for name, token in speakers.items()}


def _weights(context: LoadContext, prefix: str) -> dict[str, torch.Tensor]:
    """A stage's tensors, with all experts of a layer in one, as `transformers` has them."""
    tensors = read_weights(context, prefix)
    experts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name in list(tensors):
        if found := _EXPERT.fullmatch(name):
            experts.setdefault(found[1], {})[int(found[2]), found[3]] = tensors.pop(name)
    for name, parts in experts.items():
        tensors.update(_fused(name, parts, context))
    return tensors


def _fused(name: str, parts: dict[tuple[int, str], torch.Tensor], context: LoadContext) -> dict[str, torch.Tensor]:
    """The experts of one layer, put together where they will be: beside them there is one expert at a time."""
    count = 1 + max(number for number, _ in parts)
    fused: dict[str, torch.Tensor] = {}
    for target, names in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        try:
            shapes = {parts[number, part].shape for number in range(count) for part in names}
            if len(shapes) != 1:
                raise CheckpointError(f"the experts of {name} have different shapes; fetch the weights again")
            height, width = shapes.pop()
            whole = torch.empty(count, len(names) * height, width, dtype=context.dtype, device=context.device)
            for number in range(count):
                for half, part in enumerate(names):
                    whole[number, half * height : (half + 1) * height] = parts.pop((number, part))[...]
        except KeyError as error:
            raise CheckpointError(f"{name} has no weight of expert {error}; fetch the weights again") from error
        fused[f"{name}.{target}"] = whole
    return fused


def load_thinker(context: LoadContext) -> Thinker:
    folder = context.model.folder
    whole = read_config(folder)
    config = whole.thinker_config
    cls = transformers.Qwen3OmniMoeThinkerForConditionalGeneration
    model = load_model(cls, config, _weights(context, "thinker."), context.device, context.dtype)
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
    model = load_model(cls, config, _weights(context, "talker."), context.device, context.dtype)
    if context.device.type == "meta":
        return Talker(model, whole, voices_of(whole), {})
    ids = sorted({whole.tts_bos_token_id, whole.tts_eos_token_id, whole.tts_pad_token_id})
    rows = dict(zip(ids, Checkpoint(folder).rows(_EMBEDDINGS, ids), strict=True))
    return Talker(model, whole, voices_of(whole), rows)


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
        tf32=context.requested_dtype != "float32" and budget.precision in ("auto", "tf32"),
        kernels=budget.kernels,
        target=context.target,
    )
