"""Which recognizer runs a checkpoint."""

from __future__ import annotations

from omnistage.core.errors import UnsupportedModelError
from omnistage.core.family import LoadContext
from omnistage.engines.codec.module import ModuleComponent
from omnistage.hf import transformers
from omnistage.models.loading import Checkpoint, load_model, read_auto_config, read_generation_config
from omnistage.models.speech_to_text import SEAMLESS, SEQ2SEQ
from omnistage.models.speech_to_text.prompted import (
    CanaryRecognizer,
    CohereRecognizer,
    MoonshineStreamingRecognizer,
    SeamlessRecognizer,
)
from omnistage.models.speech_to_text.recognizer import (
    CTCRecognizer,
    SequenceRecognizer,
    TransducerRecognizer,
    WhisperRecognizer,
)

_PROMPTED: dict[str, type[SequenceRecognizer]] = {
    "canary": CanaryRecognizer,
    "cohere_asr": CohereRecognizer,
    "moonshine_streaming": MoonshineStreamingRecognizer,
    "seamless_m4t": SeamlessRecognizer,
    "seamless_m4t_v2": SeamlessRecognizer,
}


def load_recognizer(context: LoadContext) -> ModuleComponent:
    folder = context.model.folder
    config = read_auto_config(folder)
    names = [SEAMLESS.get(name, name) for name in config.architectures or []]
    cls = next((model_class for name in names if (model_class := getattr(transformers, name, None)) is not None), None)
    if cls is None:
        raise UnsupportedModelError(f"transformers {transformers.__version__} has none of {', '.join(names)}")
    processor = transformers.AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model = load_model(cls, config, Checkpoint(folder).tensors(), context.device, context.dtype, attention=None)
    if (settings := read_generation_config(folder)) is not None:
        model.generation_config = settings
    if config.model_type == "whisper":
        return WhisperRecognizer(model, processor, context.device)
    if (kind := _PROMPTED.get(config.model_type)) is not None:
        return kind(model, processor, context.device)
    if type(model).__name__ in SEQ2SEQ:
        return SequenceRecognizer(model, processor, context.device)
    generates = callable(getattr(model, "generate", None))
    return (TransducerRecognizer if generates else CTCRecognizer)(model, processor, context.device)
