"""Text to speech: VITS, SpeechT5, Bark, Dia, Higgs Audio, Pocket TTS, Phonon, VibeVoice, SeamlessM4T, MusicGen."""

from __future__ import annotations

from pathlib import Path

from omnistage.core.family import Family
from omnistage.models.lazy import lazy, lazy_factory

FAMILY = Family(
    name="text_to_speech",
    architectures=(
        "VitsModel",
        "SpeechT5ForTextToSpeech",
        "BarkModel",
        "MusicgenForConditionalGeneration",
        "MusicgenMelodyForConditionalGeneration",
        "DiaForConditionalGeneration",
        "HiggsAudioV2ForConditionalGeneration",
        "PocketTTSForConditionalGeneration",
        "GradiumPhononTTSForConditionalGeneration",
        "VibeVoiceForConditionalGeneration",
        "SeamlessM4TForTextToSpeech",
        "SeamlessM4Tv2ForTextToSpeech",
    ),
    pipeline=Path(__file__).with_name("pipeline.yaml"),
    components={"text_to_speech.speak": lazy_factory("text_to_speech.load", "load_synthesiser")},
    bridges={},
    processor=lambda model: lazy("text_to_speech.processor", "SpeechProcessor.load")(model.folder),
    tiny=lazy("text_to_speech.tiny", "write"),
    variants=("vits", "speecht5"),
)
