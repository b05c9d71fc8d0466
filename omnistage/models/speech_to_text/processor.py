"""Clips and options for models that transcribe. Thread-safe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.core.checkpoint import read_json
from omnistage.core.errors import CheckpointError, InvalidRequestError, MediaError, UnsupportedModalityError
from omnistage.core.messages import AudioPart, ChatMessage
from omnistage.core.transcripts import TranscriptionOptions
from omnistage.core.types import Modality, OmniTokensPrompt, SpeechInput
from omnistage.hf import transformers
from omnistage.models.loading import read_auto_config, read_generation_config

if TYPE_CHECKING:
    from omnistage.core.clips import AudioClip

SAMPLE_RATE = 16_000
_MAX_SECONDS, _MAX_WHISPER_SECONDS = 120.0, 7200.0
"""Of a clip: models that read it as a whole take memory with the square of its length."""
_MAX_CUT_SECONDS = 900.0
"""Of a clip that is cut into parts, which are a batch."""
_MIN_SECONDS, _MIN_WHISPER_SECONDS = 0.1, 0.02
"""Whisper pads a clip; the convolutions of others need some samples."""
_SHORT_CODES = {
    **{"arb": "ar", "ben": "bn", "cat": "ca", "ces": "cs", "cmn": "zh", "cym": "cy", "dan": "da", "deu": "de"},
    **{"eng": "en", "est": "et", "fin": "fi", "fra": "fr", "hin": "hi", "ind": "id", "ita": "it", "jpn": "ja"},
    **{"kor": "ko", "mlt": "mt", "nld": "nl", "pes": "fa", "pol": "pl", "por": "pt", "ron": "ro", "rus": "ru"},
    **{"slk": "sk", "spa": "es", "swe": "sv", "swh": "sw", "tel": "te", "tgl": "tl", "tha": "th", "tur": "tr"},
    **{"ukr": "uk", "urd": "ur", "vie": "vi", "ell": "el", "heb": "he", "hun": "hu", "bul": "bg", "hrv": "hr"},
}
"""Of SeamlessM4T's languages, as OpenAI's clients write them."""
_USE = "this model transcribes audio; send one clip to /v1/audio/transcriptions"


class RecognizerProcessor:
    """Options that a checkpoint does not have are refused by name."""

    input_modalities = frozenset({Modality.AUDIO})
    audio_sample_rate = SAMPLE_RATE

    def __init__(
        self,
        *,
        whisper: bool,
        languages: Mapping[str, str],
        multilingual: bool,
        aligned: bool = False,
        translates: bool = False,
        max_seconds: float = _MAX_SECONDS,
    ) -> None:
        self._whisper = whisper
        self._languages = languages
        self._multilingual = multilingual
        self._aligned = aligned
        self._translates = translates
        self._max_seconds = max_seconds

    @classmethod
    def load(cls, folder: Path) -> RecognizerProcessor:
        config = read_auto_config(folder)
        check_rate(folder)
        settings = read_generation_config(folder)
        if config.model_type != "whisper":
            languages = _languages(config.model_type, settings)
            translates = config.model_type in ("canary", "seamless_m4t", "seamless_m4t_v2")
            longest = _MAX_CUT_SECONDS if config.model_type == "cohere_asr" else _MAX_SECONDS
            return cls(
                whisper=False,
                languages=languages,
                multilingual=bool(languages),
                translates=translates,
                max_seconds=longest,
            )
        tokens = getattr(settings, "lang_to_id", None) or {}
        names = transformers.models.whisper.tokenization_whisper.LANGUAGES
        codes = [str(token).strip("<|>") for token in tokens]
        languages = {code: code for code in codes} | {names[code]: code for code in codes if code in names}
        multilingual = bool(getattr(settings, "is_multilingual", tokens))
        aligned = bool(getattr(settings, "alignment_heads", None))
        return cls(
            whisper=True,
            languages=languages,
            multilingual=multilingual,
            aligned=aligned,
            translates=multilingual,
            max_seconds=_MAX_WHISPER_SECONDS,
        )

    @property
    def has_timestamps(self) -> bool:
        return self._whisper

    def clip_seconds(self) -> tuple[float, float]:
        return (_MIN_WHISPER_SECONDS if self._whisper else _MIN_SECONDS), self._max_seconds

    def recognize(self, clip: AudioClip, options: TranscriptionOptions) -> SpeechInput:
        shortest = self.clip_seconds()[0]
        if clip.seconds < shortest:
            raise MediaError(
                f"has {clip.seconds:.4f} s, and at least {shortest} s are needed; send more", param="audio"
            )
        language = options.language
        if language is not None:
            language = self._language(language)
        if options.translate and not self._translates:
            raise InvalidRequestError("this model does not translate; use /v1/audio/transcriptions", param="model")
        if options.timestamps and not self._whisper:
            raise InvalidRequestError(
                "timestamps are not supported by this model; use json or text", param="response_format"
            )
        if options.words and not self._aligned:
            raise InvalidRequestError(
                "times of words are not supported by this model: its generation_config.json names no alignment_heads",
                param="timestamp_granularities",
            )
        if options.prompt and not self._whisper:
            raise InvalidRequestError("`prompt` is not supported by this model; leave it out", param="prompt")
        return SpeechInput(clip.samples, replace(options, language=language))

    def _language(self, name: str) -> str:
        if not self._multilingual:
            raise InvalidRequestError(
                "this model has one language, which cannot be chosen; leave `language` out", param="language"
            )
        code = self._languages.get(name.lower())
        if code is None:
            languages = ", ".join(sorted(set(self._languages.values())))
            raise InvalidRequestError(
                f"{name} is not a language of this model; languages: {languages}", param="language"
            )
        return code

    def chat(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> SpeechInput:
        parts = [part for message in messages for part in message.parts]
        if tools or len(parts) != 1 or not isinstance(parts[0], AudioPart):
            raise UnsupportedModalityError(_USE, param="messages")
        return self.recognize(parts[0].clip, TranscriptionOptions())

    def text(self, prompt: str) -> SpeechInput:
        del prompt
        raise UnsupportedModalityError(_USE, param="prompt")

    def tokens(self, prompt: OmniTokensPrompt) -> SpeechInput:
        del prompt
        raise UnsupportedModalityError(_USE, param="prompt")

    def voices(self) -> Sequence[str]:
        return ()


def _languages(model_type: str, settings: Any) -> Mapping[str, str]:
    """Codes by all the names that a request may use for them."""
    names: Mapping[str, str] = {}
    if model_type == "canary":
        names = transformers.models.canary.processing_canary.LANGUAGE_CODE_TO_NAME
    elif model_type == "cohere_asr":
        languages = transformers.models.whisper.tokenization_whisper.LANGUAGES
        codes = sorted(transformers.models.cohere_asr.processing_cohere_asr.LANGUAGES)
        names = {code: languages.get(code, code) for code in codes}
    elif model_type in ("seamless_m4t", "seamless_m4t_v2"):
        codes = sorted(getattr(settings, "text_decoder_lang_to_code_id", None) or {})
        short = {_SHORT_CODES[code]: code for code in codes if code in _SHORT_CODES}
        return {code: code for code in codes} | short
    return {code: code for code in names} | {name.lower(): code for code, name in names.items()}


def check_rate(folder: Path) -> None:
    """Raise for a checkpoint without a feature extractor, or with one for another rate."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        path = folder / name
        settings = read_json(path) if path.is_file() else {}
        inner = settings.get("feature_extractor")
        rate = inner.get("sampling_rate") if isinstance(inner, dict) else settings.get("sampling_rate")
        if rate is not None and rate != SAMPLE_RATE:
            raise CheckpointError(f"{name} expects {rate} Hz; only {SAMPLE_RATE} Hz is supported")
        if settings:
            return
    raise CheckpointError(f"{folder} has neither preprocessor_config.json nor processor_config.json; fetch it again")
