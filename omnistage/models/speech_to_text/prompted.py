"""Encoder-decoders whose decoder begins with a prompt that names languages, as their processors write it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from omnistage.core.errors import UnclearSpeechError
from omnistage.core.transcripts import Transcript, TranscriptionOptions
from omnistage.engines.codec.module import Job
from omnistage.models.speech_to_text.losses import Outcome, has_ended, unfinished
from omnistage.models.speech_to_text.processor import SAMPLE_RATE
from omnistage.models.speech_to_text.recognizer import SequenceRecognizer, clip_of

_ENGLISH = "en"


class MoonshineStreamingRecognizer(SequenceRecognizer):
    """Its processor pads clips to whole frames."""

    def inputs(self, clips: Sequence[np.ndarray], options: TranscriptionOptions) -> dict[str, Any]:
        del options
        return dict(self.processor(list(clips), sampling_rate=SAMPLE_RATE))


class CanaryRecognizer(SequenceRecognizer):
    """Transcribes one language, or translates it into English."""

    def inputs(self, clips: Sequence[np.ndarray], options: TranscriptionOptions) -> dict[str, Any]:
        language = options.language or _ENGLISH
        target = _ENGLISH if options.translate else language
        return dict(
            self.processor.apply_transcription_request(
                audio=list(clips), source_language=language, target_language=target
            )
        )

    def language(self, options: TranscriptionOptions) -> str:
        return _ENGLISH if options.translate else options.language or _ENGLISH


class CohereRecognizer(SequenceRecognizer):
    """Long clips are cut where it is quiet; their parts are a batch."""

    def group(self, job: Job) -> Hashable:
        clip = clip_of(job)
        extractor = self.processor.feature_extractor
        whole = extractor.max_audio_clip_s - extractor.overlap_chunk_second
        cut = len(clip.samples) > whole * SAMPLE_RATE
        # Where clips are cut depends on the audio, and parts are padded to the longest.
        return super().group(job), job.info.request_id if cut else None

    def inputs(self, clips: Sequence[np.ndarray], options: TranscriptionOptions) -> dict[str, Any]:
        language = options.language or _ENGLISH
        return dict(self.processor(audio=list(clips), language=language, sampling_rate=SAMPLE_RATE))

    def transcribe(self, clips: Sequence[np.ndarray], options: TranscriptionOptions, **hooks: Any) -> list[Outcome]:
        inputs = self.to_device(self.inputs(clips, options))
        parts = inputs.pop("audio_chunk_index")
        rows = self.model.generate(**inputs, **hooks)
        language = options.language or _ENGLISH
        texts = self.processor.decode(rows, skip_special_tokens=True, audio_chunk_index=parts, language=language)
        tokens: list[list[int]] = [[] for _ in clips]
        errors: dict[int, UnclearSpeechError] = {}
        for (clip, _), row in zip(parts, rows.tolist(), strict=True):
            tokens[clip] += row
            if not has_ended(row, self.model.generation_config):
                errors[clip] = unfinished(len(row))
        transcripts = [
            Transcript(token_ids=tuple(ids), whole=text, seconds=len(clip) / SAMPLE_RATE, language=language)
            for clip, ids, text in zip(clips, tokens, texts, strict=True)
        ]
        return [errors.get(place, transcript) for place, transcript in enumerate(transcripts)]


class SeamlessRecognizer(SequenceRecognizer):
    """Writes the language that is asked for, whatever is spoken."""

    def inputs(self, clips: Sequence[np.ndarray], options: TranscriptionOptions) -> dict[str, Any]:
        inputs = dict(self.processor(audio=list(clips), sampling_rate=SAMPLE_RATE, return_tensors="pt"))
        return {**inputs, "tgt_lang": self.language(options)}

    def language(self, options: TranscriptionOptions) -> str:
        return "eng" if options.translate else options.language or "eng"
