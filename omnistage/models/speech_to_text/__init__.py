"""Speech to text: encoder-decoders (Whisper, Moonshine, ...), CTC and transducer models of transformers."""

from __future__ import annotations

from pathlib import Path

from omnistage.core.family import Family
from omnistage.models.lazy import lazy, lazy_factory

SEQ2SEQ = (
    "WhisperForConditionalGeneration",
    "MoonshineForConditionalGeneration",
    "Speech2TextForConditionalGeneration",
    "SpeechT5ForSpeechToText",
    "SpeechEncoderDecoderModel",
    "CanaryForConditionalGeneration",
    "CohereAsrForConditionalGeneration",
    "MoonshineStreamingForConditionalGeneration",
    "SeamlessM4TForSpeechToText",
    "SeamlessM4Tv2ForSpeechToText",
)
SEAMLESS = {
    "SeamlessM4TModel": "SeamlessM4TForSpeechToText",
    "SeamlessM4Tv2Model": "SeamlessM4Tv2ForSpeechToText",
}
"""Checkpoints of all tasks, and the part of them that writes speech down."""

FAMILY = Family(
    name="speech_to_text",
    architectures=(*SEQ2SEQ, *SEAMLESS, "*ForCTC"),
    pipeline=Path(__file__).with_name("pipeline.yaml"),
    components={"speech_to_text.recognize": lazy_factory("speech_to_text.load", "load_recognizer")},
    bridges={},
    processor=lambda model: lazy("speech_to_text.processor", "RecognizerProcessor.load")(model.folder),
    tiny=lazy("speech_to_text.tiny", "write"),
    variants=("whisper", "wav2vec2"),
)
