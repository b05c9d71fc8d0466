"""Clips of all requests through transformers' own `generate`, in slices between which other requests have theirs."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from omnistage.core.errors import InternalError, InvalidRequestError, UnclearSpeechError
from omnistage.core.params import CodecParams
from omnistage.core.transcripts import Transcript, TranscriptionOptions, TranscriptSegment, TranscriptWord
from omnistage.core.types import RequestInfo, SpeechInput
from omnistage.engines.codec.module import UNFINISHED, Job, JobResult, ModuleComponent, ModulePayload, Partial
from omnistage.hf import transformers
from omnistage.models.paused import PausedCall
from omnistage.models.speech_to_text.features import EarlyFeatures
from omnistage.models.speech_to_text.losses import Outcome, WindowLoss, has_ended, unfinished, window_frames
from omnistage.models.speech_to_text.processor import SAMPLE_RATE
from omnistage.models.speech_to_text.words import split_words

_SLICE_TOKENS = 8
"""Generated in a row before others have their turn."""
_INCOMPLETE = "\ufffd"
_START_TOKENS = 4
"""Before Whisper's text: its start, the language, the task, and whether there are timestamps."""


def clip_of(job: Job) -> SpeechInput:
    if not isinstance(job.payload, SpeechInput):
        raise InternalError(f"a recognizer takes a SpeechInput, not a {type(job.payload).__name__}")
    return job.payload


@dataclass(slots=True)
class _Batch:
    """Clips that are transcribed together."""

    request_ids: tuple[str, ...]
    call: PausedCall[list[Outcome]]
    active: set[str]
    """Those of them whose requests have not ended."""
    alone: bool
    live: _LiveText = field(default_factory=lambda: _LiveText())
    """Of a clip that streams, which is always alone."""


@dataclass(slots=True)
class _LiveText:
    token_ids: tuple[int, ...] = ()
    """Generated since the last slice."""
    text: str = ""
    """All that is complete."""
    emitted: str = ""


class Recognizer(ModuleComponent):
    """A model behind its `generate`. A batch holds clips that can share one; streamed clips are alone in theirs."""

    input_type = SpeechInput
    uses_torch = True
    max_batch = 16
    max_calls = 4
    """Batches under way at once; clips that come meanwhile begin together."""

    def __init__(self, model: Any, processor: Any, device: torch.device) -> None:
        self.model = model
        self.processor = processor
        self.device = device
        self._batches: dict[str, _Batch] = {}
        """By request; several have the same one."""
        self._waiting_alone: set[str] = set()

    @abstractmethod
    def transcribe(self, clips: Sequence[np.ndarray], options: TranscriptionOptions, **hooks: Any) -> list[Outcome]:
        """All of it, with `hooks` for the model's `generate`."""

    def group(self, job: Job) -> Hashable:
        clip = clip_of(job)
        alone = job.info.request_id if clip.options.stream else None
        return clip.options, self.shape(clip.samples), alone

    def shape(self, samples: np.ndarray) -> Hashable:
        """Clips share a batch only where this is equal: by default those of one length."""
        return len(samples)

    def run(self, jobs: Sequence[Job]) -> list[JobResult]:
        new = [job for job in jobs if job.info.request_id not in self._batches]
        if new and self._may_begin(new):
            self._begin(new)
        ids = [job.info.request_id for job in jobs]
        batches = {id(batch): batch for name in ids if (batch := self._batches.get(name)) is not None}
        for batch in batches.values():
            try:
                batch.call.advance()
            except BaseException:  # each of its clips may begin anew, alone
                for name in batch.request_ids:
                    self._batches.pop(name, None)
                raise
        return [self._result(name) for name in ids]

    def _may_begin(self, jobs: Sequence[Job]) -> bool:
        """For times of words `generate` changes how the whole model attends: such a batch is alone.

        While one waits for that, no other begins.
        """
        running = {id(batch): batch for batch in self._batches.values()}
        ids = {job.info.request_id for job in jobs}
        if clip_of(jobs[0]).options.words:
            self._waiting_alone |= ids if running else set()
            return not running
        if any(batch.alone for batch in running.values()) or self._waiting_alone:
            return False
        return len(running) < self.max_calls

    def _begin(self, jobs: Sequence[Job]) -> None:
        clips, options = [clip_of(job) for job in jobs], clip_of(jobs[0]).options
        live = _LiveText()

        def call(paused: PausedCall[list[Outcome]]) -> list[Outcome]:
            watch = _Watch(paused, self._live_callback(live) if options.stream else None)
            hooks = {"stopping_criteria": transformers.StoppingCriteriaList([watch])}
            with torch.inference_mode():
                return self.transcribe([clip.samples for clip in clips], options, **hooks)

        ids = tuple(job.info.request_id for job in jobs)
        batch = _Batch(ids, PausedCall(call, "recognize"), set(ids), options.words, live)
        self._batches |= dict.fromkeys(ids, batch)
        self._waiting_alone.difference_update(ids)

    def _live_callback(self, live: _LiveText) -> Callable[[list[int]], None]:
        """Takes the tokens of a sequence as it grows, and keeps what is complete of the text."""
        before: list[int] = []
        window: list[int] = []
        complete: list[int] = []

        def show(row: list[int]) -> None:
            if not before or len(row) <= len(before) or row[: len(before)] != before:
                complete.extend(self.text_tokens(window, ended=True))
                before[:], window[:] = row[:-1], []  # the first token behind a prompt: another window has begun
            window.extend(row[len(before) :])
            live.token_ids += tuple(row[len(before) :])
            before[:] = row
            text = self.decode([*complete, *self.text_tokens(window, ended=False)])
            live.text = text if not text.endswith(_INCOMPLETE) else live.text

        return show

    def text_tokens(self, window: Sequence[int], *, ended: bool) -> Sequence[int]:
        """Of the tokens of a window, those that will be part of the text; all of them where the clip is one window."""
        del ended
        return window

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.processor.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def _result(self, request_id: str) -> JobResult:
        batch = self._batches.get(request_id)
        if batch is None:
            return UNFINISHED
        live = batch.live
        if not batch.call.done:
            delta, ids = live.text.removeprefix(live.emitted), live.token_ids
            if not delta or not live.text.startswith(live.emitted):
                return UNFINISHED
            live.emitted, live.token_ids = live.text, ()
            return Partial(Transcript(delta, ids))
        del self._batches[request_id]
        whole = batch.call.result[batch.request_ids.index(request_id)]
        if isinstance(whole, UnclearSpeechError):
            return whole
        rest = (whole.whole or "").strip()
        sent_text = live.emitted.lstrip()
        new = rest.removeprefix(sent_text) if rest.startswith(sent_text) else ""
        tokens = live.token_ids if live.emitted else whole.token_ids
        return replace(whole, text=new, token_ids=tokens, whole=rest)

    def forget(self, request_id: str) -> None:
        self._waiting_alone.discard(request_id)
        batch = self._batches.pop(request_id, None)
        if batch is None:
            return
        batch.active.discard(request_id)
        if not batch.active:
            batch.call.cancel()

    def close(self) -> None:
        for request_id in tuple(self._batches):
            self.forget(request_id)


class _Watch:
    """A stopping criterion, called by `generate` after each token: pauses it now and then, and stops nothing."""

    def __init__(self, paused: PausedCall[Any], show: Callable[[list[int]], None] | None) -> None:
        self._paused = paused
        self._show = show
        self._count = 0
        self._none = torch.zeros(0, dtype=torch.bool)

    def __call__(self, input_ids: torch.Tensor, scores: object, **options: object) -> torch.Tensor:
        del scores, options
        if self._show is not None:
            self._show(input_ids[0].tolist())
        self._count += 1
        if self._count % _SLICE_TOKENS == 0:
            self._paused.pause()
        if len(self._none) != len(input_ids):
            self._none = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return self._none


# ------------------------------------------------------------------------------------------------- the kinds


class WhisperRecognizer(Recognizer):
    """Clips of up to 30 seconds in one batch, longer ones, window by window, in another."""

    def __init__(self, model: Any, processor: Any, device: torch.device) -> None:
        super().__init__(model, processor, device)
        self._early = EarlyFeatures(self._extract)
        self._loss_of = WindowLoss(model, processor.feature_extractor, self.text_tokens, self.decode)

    def group(self, job: Job) -> Hashable:
        """Called once for each clip, as soon as it is there. Features of long ones would fill the memory meanwhile."""
        if not self.in_windows(clip_of(job).samples):
            self._early.begin(job.info.request_id, clip_of(job).samples)
        return super().group(job)

    def forget(self, request_id: str) -> None:
        self._early.forget(request_id)
        super().forget(request_id)

    def close(self) -> None:
        super().close()
        self._early.close()

    def check(self, info: RequestInfo, params: CodecParams, payload: ModulePayload) -> None:
        """Refuse a prompt that `generate` would fail on."""
        del info, params
        if not isinstance(payload, SpeechInput) or not payload.options.prompt:
            return
        try:
            count = len(self.processor.get_prompt_ids(payload.options.prompt))
        except ValueError as error:
            raise InvalidRequestError("contains the spelling of a special token; remove it", param="prompt") from error
        positions = int(self.model.config.max_target_positions)
        room = positions - _START_TOKENS - (self.model.generation_config.max_new_tokens or 0)
        limit = max(0, min(positions // 2 - 1, room))
        if count > limit:
            raise InvalidRequestError(f"has {count} tokens, over the limit of {limit}; shorten it", param="prompt")

    def shape(self, samples: np.ndarray) -> Hashable:
        return self.in_windows(samples)

    def in_windows(self, samples: np.ndarray) -> bool:
        return len(samples) > int(self.processor.feature_extractor.n_samples)

    def text_tokens(self, window: Sequence[int], *, ended: bool) -> Sequence[int]:
        """Up to its last two timestamps in a row, from which the next window begins; all where there are none.

        A window that ends with a single timestamp is complete.
        """
        ends = (self.model.generation_config.eos_token_id, self.model.generation_config.pad_token_id)
        tokens = [token for token in window if token not in ends]
        first = self.model.generation_config.no_timestamps_token_id + 1
        times = [token >= first for token in tokens]
        pairs = [place for place in range(1, len(times)) if times[place - 1] and times[place]]
        if not pairs or (ended and times[-2:] == [False, True]):
            return tokens
        return tokens[: pairs[-1]]

    def transcribe(self, clips: Sequence[np.ndarray], options: TranscriptionOptions, **hooks: Any) -> list[Outcome]:
        features, mask = self._features(clips)
        settings: dict[str, Any] = dict(hooks)
        languages = [options.language or ""] * len(clips)
        config = self.model.generation_config
        if getattr(config, "is_multilingual", False):
            if options.language is None:  # as `generate` does it; done here, it is known
                tokens = self.model.detect_language(features[..., : window_frames(self.model)])
                languages = [name.strip("<|>") for name in self.processor.tokenizer.convert_ids_to_tokens(tokens)]
            settings |= {"language": languages, "task": "translate" if options.translate else "transcribe"}
        if options.prompt:
            prompt = self.processor.get_prompt_ids(options.prompt, return_tensors="pt")
            settings["prompt_ids"] = prompt.to(self.device)
        if self.in_windows(clips[0]) or options.timestamps or options.words:
            settings["return_timestamps"] = True
        if self.in_windows(clips[0]) or options.words:
            settings["attention_mask"] = mask
        attention = self.model.config._attn_implementation
        try:
            output = self.model.generate(
                features, return_segments=True, return_token_timestamps=options.words or None, **settings
            )
        finally:
            if options.words:
                self.model.set_attn_implementation(attention)
        rows = zip(clips, features, output["sequences"], output["segments"], languages, strict=True)
        return [
            self._loss_of(samples, row, segments) or self._transcript(samples, ids, segments, language)
            for samples, row, ids, segments, language in rows
        ]

    def _extract(self, clip: np.ndarray) -> Any:
        options = {"sampling_rate": SAMPLE_RATE, "return_tensors": "pt", "return_attention_mask": True}
        if self.in_windows(clip):
            options |= {"truncation": False, "padding": "longest"}
        return self.processor.feature_extractor(clip, **options)

    def _features(self, clips: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        """Each clip by itself, then padded: a clip's last frames do not depend on the other clips."""
        early = self._early.of(clips)
        rows = [one.input_features[0] for one in early]
        longest = max(row.shape[-1] for row in rows)
        features = torch.stack([torch.nn.functional.pad(row, (0, longest - row.shape[-1])) for row in rows])
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for place, one in enumerate(early):
            mask[place, : one.attention_mask.shape[-1]] = one.attention_mask[0]
        return features.to(self.device, self.model.dtype), mask.to(self.device)

    def _transcript(self, samples: np.ndarray, ids: torch.Tensor, segments: Any, language: str) -> Transcript:
        tokens = tuple(int(token) for segment in segments for token in segment["tokens"])
        parts = tuple(
            TranscriptSegment(
                round(float(segment["start"]), 2),
                round(float(segment["end"]), 2),
                self.decode(segment["tokens"].tolist()),
                tuple(segment["tokens"].tolist()),
            )
            for segment in segments
        )
        words: list[TranscriptWord] = []
        for segment in segments:
            if "token_timestamps" in segment:
                times = [round(float(time), 2) for time in segment["token_timestamps"]]
                words += split_words(segment["tokens"].tolist(), times, self.decode, language)
        return Transcript(
            token_ids=tokens,
            whole=self.decode(ids.tolist()),
            language=language,
            segments=parts,
            words=tuple(words),
            seconds=len(samples) / SAMPLE_RATE,
        )


class SequenceRecognizer(Recognizer):
    """Any other encoder-decoder."""

    def inputs(self, clips: Sequence[np.ndarray], options: TranscriptionOptions) -> dict[str, Any]:
        """What `generate` is called with."""
        del options
        return extract(self.processor, clips)

    def language(self, options: TranscriptionOptions) -> str:
        """Of the text, where it is known."""
        del options
        return ""

    def to_device(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return place(inputs, self.device, self.model.dtype)

    def transcribe(self, clips: Sequence[np.ndarray], options: TranscriptionOptions, **hooks: Any) -> list[Outcome]:
        inputs = self.to_device(self.inputs(clips, options))
        if isinstance(self.model, transformers.GenerationMixin):
            inputs |= hooks
        output = self.model.generate(**inputs)
        rows, language = getattr(output, "sequences", output), self.language(options)
        texts = [self.processor.batch_decode(row[None], skip_special_tokens=True)[0] for row in rows]
        return [
            self.outcome(row.tolist(), Transcript(whole=text, seconds=len(clip) / SAMPLE_RATE, language=language))
            for clip, row, text in zip(clips, rows, texts, strict=True)
        ]

    def outcome(self, ids: Sequence[int], transcript: Transcript) -> Outcome:
        """The transcript with its tokens, unless the model stopped before their end."""
        if not has_ended(ids, self.model.generation_config):
            return unfinished(len(ids))
        return replace(transcript, token_ids=tuple(ids))


class TransducerRecognizer(SequenceRecognizer):
    """Its `generate` keeps what it knows of the encoder's output on the model itself: one batch at a time.

    It goes through all frames, and has no end of its own.
    """

    max_calls = 1

    def outcome(self, ids: Sequence[int], transcript: Transcript) -> Outcome:
        return replace(transcript, token_ids=tuple(ids))


class CTCRecognizer(ModuleComponent):
    """The likeliest class of each frame, collapsed by the tokenizer."""

    input_type = SpeechInput
    uses_torch = True
    max_batch = 16

    def __init__(self, model: Any, processor: Any, device: torch.device) -> None:
        self.model = model
        self.processor = processor
        self.device = device

    def group(self, job: Job) -> Hashable:
        return len(clip_of(job).samples)  # many of these models look past their mask: nothing is padded

    @torch.inference_mode()
    def run(self, jobs: Sequence[Job]) -> list[JobResult]:
        clips = [clip_of(job).samples for job in jobs]
        inputs = place(extract(self.processor, clips), self.device, self.model.dtype)
        ids = self.model(**inputs).logits.argmax(dim=-1)
        texts = self.processor.batch_decode(ids)
        seconds = len(clips[0]) / SAMPLE_RATE
        blank, rows = self.processor.tokenizer.pad_token_id, ids.tolist()
        tokens = [tuple(token for token, _ in itertools.groupby(row) if token != blank) for row in rows]
        return [
            Transcript(text.strip(), generated, whole=text.strip(), seconds=seconds)
            for text, generated in zip(texts, tokens, strict=True)
        ]


def extract(processor: Any, clips: Sequence[np.ndarray]) -> dict[str, Any]:
    """The features of clips of one length, as the checkpoint's own extractor makes them."""
    return dict(processor.feature_extractor(list(clips), sampling_rate=SAMPLE_RATE, return_tensors="pt"))


def place(inputs: dict[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The same, with its tensors where the model is, and in its precision."""

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)

    return {name: one(value) for name, value in inputs.items()}
