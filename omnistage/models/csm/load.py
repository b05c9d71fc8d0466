"""CSM's stages from a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from omnistage.config import CodecBudget, CodecStageConfig
from omnistage.core.checkpoint import read_json
from omnistage.core.errors import CheckpointError
from omnistage.core.family import LoadContext
from omnistage.hf import transformers
from omnistage.models.csm.backbone import Backbone
from omnistage.models.csm.mimi import Mimi
from omnistage.models.csm.processor import VOICES
from omnistage.models.loading import load_model, read_weights

if TYPE_CHECKING:
    from transformers import CsmConfig, MimiModel

TIED = "backbone_model.embed_tokens.embed_audio_tokens.weight", "depth_decoder.model.embed_tokens.weight"
"""One matrix, of which a checkpoint may have either name."""
_DECODING = ("decoder", "decoder_transformer", "upsample")


def read_config(folder: Path) -> CsmConfig:
    """config.json with all of its sections."""
    raw = read_json(folder / "config.json")
    for section in ("depth_decoder_config", "codec_config"):
        # transformers would take the published model's settings for a section that is not there.
        if not isinstance(raw.get(section), dict):
            raise CheckpointError(f"config.json in {folder} has no section {section}; fetch the file again")
    try:
        return transformers.CsmConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"config.json in {folder} is not CSM's: {error}") from error


def load_backbone(context: LoadContext) -> Backbone:
    config = read_config(context.model.folder)
    weights = read_weights(context)
    for one, other in (TIED, TIED[::-1]) if config.tie_codebooks_embeddings else ():
        if one in weights:  # some versions of transformers do not tie them
            weights.setdefault(other, weights[one])
    model = load_model(transformers.CsmForConditionalGeneration, config, weights, context.device, context.dtype)
    model.codec_model = nn.Identity()  # in float32 instead: the codes of a clip are those of the nearest vectors
    codec = _codec(context, config, torch.float32)
    for name, _ in list(codec.named_children()):
        if name in _DECODING:
            setattr(codec, name, nn.Identity())
    return Backbone(model, codec)


def load_codec(context: LoadContext) -> Mimi:
    config = read_config(context.model.folder)
    budget = context.stage.budget if isinstance(context.stage, CodecStageConfig) else CodecBudget()
    return Mimi(
        _codec(context, config, context.dtype),
        context.device,
        num_codebooks=config.num_codebooks,
        voices=VOICES,
        cuda_graphs=budget.cuda_graphs,
        target=context.target,
    )


def _codec(context: LoadContext, config: CsmConfig, dtype: torch.dtype) -> MimiModel:
    if config.codec_config.model_type != "mimi":
        raise CheckpointError(f"the codec of this model is {config.codec_config.model_type}; only mimi is supported")
    weights = read_weights(context, "codec_model.")
    return load_model(transformers.MimiModel, config.codec_config, weights, context.device, dtype)
