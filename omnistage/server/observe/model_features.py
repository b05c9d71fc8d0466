"""What a model takes beyond its modalities, so that clients offer nothing that it would refuse."""

from __future__ import annotations

from omnistage.core.errors import OmniError
from omnistage.core.family import SpeechRecognizer, Transcriber, VoiceCloner
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Modality
from omnistage.server.service import ServedModel


def transcribes(model: ServedModel) -> bool:
    """Whether it recognises speech by itself, without a chat model that is asked to."""
    processor = model.omni.processor
    return Modality.AUDIO in processor.input_modalities and isinstance(processor, SpeechRecognizer | Transcriber)


def clones_voices(model: ServedModel) -> bool:
    """Whether it can speak with the voice of a clip."""
    return isinstance(model.omni.processor, VoiceCloner)


def unsupported_drawing(model: ServedModel) -> list[str]:
    """Parameters of pictures and videos that its stage refuses, whatever their value."""
    stage = model.stage_for_params(DiffusionParams)
    if stage is None:
        return []
    orchestrator = model.omni.orchestrator
    defaults = orchestrator.default_params[stage]
    trials = {"negative_prompt": DiffusionParams(negative_prompt="fog")}
    if (
        isinstance(defaults, DiffusionParams) and defaults.width and defaults.height
    ):  # twice its default suits every model that takes more than one size
        trials["size"] = DiffusionParams(width=2 * defaults.width, height=2 * defaults.height)
    fields = []
    for name, params in trials.items():
        try:
            orchestrator.check_params({stage: params})
        except OmniError:
            fields.append(name)
    return fields
