"""Chats with text, images, audio and video into a thinker's input, by `transformers`' own processor."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from omnistage.compat import prepare_torchvision
from omnistage.core.cancellation import locked
from omnistage.core.errors import CheckpointError, InvalidRequestError, LimitExceededError, MediaError
from omnistage.core.messages import (
    PLAIN_TEMPLATE,
    AudioPart,
    ChatMessage,
    ImagePart,
    TemplateOptions,
    TextPart,
    VideoPart,
)
from omnistage.core.types import ARInput, MediaSpan, Modality, OmniTokensPrompt
from omnistage.hf import transformers
from omnistage.media.budget import current_hold
from omnistage.media.hashing import content_key
from omnistage.models._qwen_omni.expansion import expand, video_default, video_options
from omnistage.models.chat_template import ChatProcessor, ChatTemplate, ToolSpec, Turn, joined_texts, turn_of
from omnistage.models.loading import positive
from omnistage.models.prompts import GuardedText, PromptTokenizer, tokens_input

if TYPE_CHECKING:
    from PIL import Image
    from transformers import BatchFeature, PreTrainedConfig, ProcessorMixin

AUDIO_RATE = 16_000
_AUDIO_INPUTS = ("input_features", "feature_attention_mask")
_MIN_SECONDS = 0.03
"""Less gives the audio encoder no output row, and positions cannot be computed beside pictures."""


@dataclass(slots=True)
class _Media:
    """A chat's media in the order in which the template names them."""

    images: list[Image.Image] = field(default_factory=list)
    audios: list[np.ndarray] = field(default_factory=list)
    tracks: list[int | None] = field(default_factory=list)
    """For each of the audios, the video whose sound it is; None: it stands alone."""
    videos: list[np.ndarray] = field(default_factory=list)
    fps: list[float] = field(default_factory=list)
    with_audio: set[bool] = field(default_factory=set)

    @property
    def use_audio_in_video(self) -> bool:
        return self.with_audio == {True}


class QwenOmniProcessor(ChatProcessor, ABC):
    """Thread-safe: `transformers`' processor is used by one thread at a time."""

    input_modalities = frozenset({Modality.TEXT, Modality.IMAGE, Modality.AUDIO, Modality.VIDEO})

    def __init__(
        self,
        processor: ProcessorMixin,
        thinker: PreTrainedConfig,
        voices: Sequence[str],
        *,
        placeholders: tuple[int, int, int],
        position_id_per_seconds: float,
        seconds_per_chunk: float,
    ) -> None:
        """`placeholders` are the token ids of images, audio and videos; the rest is how sound and pictures are
        interleaved."""
        self._processor = processor
        self._text_config = thinker.text_config
        self._placeholders = dict(zip((Modality.IMAGE, Modality.AUDIO, Modality.VIDEO), placeholders, strict=True))
        self._interleaving = {
            "position_id_per_seconds": position_id_per_seconds,
            "seconds_per_chunk": seconds_per_chunk,
        }
        self.max_tokens = positive(self._text_config, "max_position_embeddings")
        self._prompts = PromptTokenizer(processor.tokenizer, self.max_tokens)
        self._voices = tuple(voices)
        self._lock = threading.Lock()
        self._template = ChatTemplate(self._render, processor.tokenizer, parts=True, source=processor.chat_template)
        self._message_tokens = self._template.message_tokens(self._prompts.count)

    @abstractmethod
    def audio_rows(self, frames: torch.Tensor) -> torch.Tensor:
        """Rows that clips of so many mel frames fill in the prompt, by the model's own rule."""

    @property
    def max_samples(self) -> int:
        """Samples of the longest clip. The extractor would cut a longer one in silence."""
        return int(self._processor.feature_extractor.n_samples)

    def audio_inputs(self, mel: torch.Tensor, mask: torch.Tensor, longest: int) -> Mapping[str, torch.Tensor]:
        """What the audio encoder gets for a clip, beside others of up to `longest` mel frames."""
        del longest
        return dict(zip(_AUDIO_INPUTS, (mel, mask), strict=True))

    def padded_frames(self, clips: Sequence[np.ndarray]) -> int:
        """Mel frames that each of these clips is padded to."""
        del clips
        return int(self._processor.feature_extractor.nb_max_frames)

    # --------------------------------------------------------------------------------------------- inputs

    def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        *,
        thinking: bool | None = None,
        template: TemplateOptions = PLAIN_TEMPLATE,
    ) -> ARInput:
        self._check_messages(messages, self._processor.chat_template)
        media, guarded = _Media(), self._prompts.guarded()
        turns = [turn_of(m, [_template_part(p, media, guarded) for p in joined_texts(m.parts)]) for m in messages]
        if len(media.with_audio) > 1:
            raise InvalidRequestError(
                "use_audio_in_video needs an audio track in every video of the chat, or in none", param="messages"
            )
        rendered = self._template.text(turns, tools, guarded, thinking, template)
        if not (media.images or media.audios or media.videos):
            return ARInput(self._prompts.encode(rendered, guarded))
        return self._with_media(rendered, media, guarded)

    def _render(self, turns: list[Turn], tools: list[ToolSpec] | None, **options: Any) -> str:
        fixed = {"tokenize": False, "add_generation_prompt": True}
        text = self._processor.apply_chat_template(turns, tools=tools, **{**fixed, **options})
        return str(text[0] if isinstance(text, list) else text)

    def tokens(self, prompt: OmniTokensPrompt) -> ARInput:
        config = self._text_config
        placeholders = set(self._placeholders.values())
        return tokens_input(prompt, int(config.vocab_size), int(config.hidden_size), placeholders=placeholders)

    def voices(self) -> Sequence[str]:
        return self._voices

    def clip_seconds(self) -> tuple[float, float]:
        return _MIN_SECONDS, self.max_samples / AUDIO_RATE

    # ---------------------------------------------------------------------------------------------- media

    def _with_media(self, rendered: str, media: _Media, guarded: GuardedText) -> ARInput:
        self._prompts.check_length(rendered)  # transformers' processor tokenises it too
        self._reserve(self._check_size(media), media)
        with locked(self._lock):
            features = self._features(rendered, media)
            expanded = self._expand(rendered, media, features)
        ids = self._prompts.encode(expanded, guarded)
        spans, context = self._spans(ids, media, features)
        return ARInput(ids, media=tuple(spans), context=context)

    def _check_size(self, media: _Media) -> int:
        """Tokens of the images and videos; refuses those that cannot fit, by their sizes alone."""
        try:
            count = sum(self._image_tokens(media)) + sum(self._video_tokens(media))
        except ValueError as error:
            raise _media_error(str(error)) from error
        if count > self._prompts.limits.max_tokens:
            raise self._prompts.limits.too_long(f"{count} tokens of media")
        return count

    def _reserve(self, tokens: int, media: _Media) -> None:
        """Memory for the features, and as much again while they are computed, with a copy of all pixels."""
        images, audio = self._processor.image_processor, self._processor.feature_extractor
        patch = 3 * images.temporal_patch_size * images.patch_size**2
        mels = len(media.audios) * audio.feature_size * self.padded_frames(media.audios)
        pixels = sum(image.width * image.height for image in media.images) * 3
        pixels += sum(frames.nbytes for frames in media.videos)
        try:
            current_hold().reserve(int(2 * 4 * (tokens * images.merge_size**2 * patch + mels)) + pixels)
        except LimitExceededError as error:
            error.param = "messages"
            raise

    def _image_tokens(self, media: _Media) -> list[int]:
        """Rows that each image fills in the prompt."""
        images = self._processor.image_processor
        merge = images.merge_size**2
        return [images.get_number_of_image_patches(i.height, i.width, {}) // merge for i in media.images]

    def _video_tokens(self, media: _Media) -> list[int]:
        """Rows that each video fills in the prompt."""
        videos = self._processor.video_processor
        # The processor's defaults come before the video processor's own sizes.
        size = video_default(self._processor, "size") or videos.size
        least, most = size["shortest_edge"], size["longest_edge"]
        if getattr(videos, "cap_pixels_per_frame", None):
            most = least  # long videos are made smaller then, which the count leaves out: count the smallest
        # Some releases of transformers read the one spelling, some the other, and some leave out an odd last frame.
        options = {"size": {"shortest_edge": least, "longest_edge": most}, "min_pixels": least, "max_pixels": most}
        merge, step = videos.merge_size**2, videos.temporal_patch_size
        shapes = [(n + -n % step, height, width) for n, height, width, _ in (frames.shape for frames in media.videos)]
        return [videos.get_num_of_video_patches(*shape, options) // merge for shape in shapes]

    def _features(self, rendered: str, media: _Media) -> BatchFeature:
        """Pixels, mel frames and grids of all items, as the reference computes them."""
        options: dict[str, object] = {}
        if media.audios:
            if any(len(samples) > self.max_samples for samples in media.audios):
                longest = f"{self.max_samples / AUDIO_RATE:.0f} s"
                raise LimitExceededError(
                    f"a clip may last at most {longest} with this model; split it into several",
                    param="messages",
                )
            if max(map(len, media.audios)) <= self._processor.feature_extractor.n_fft // 2:
                raise _too_short()  # spectra take more; a clip beside a longer one is padded
            options["audio"] = media.audios
        if media.images:
            options["images"] = media.images
        if media.videos:
            options["videos"] = media.videos
            options |= video_options(self._processor, media.fps[0], media.tracks, media.use_audio_in_video)
        try:
            features = self._processor(text=rendered, return_tensors="pt", **options)
        except (ValueError, StopIteration) as error:
            # A StopIteration has no message: the template named fewer or more media than were sent.
            reason = str(error) or "the chat template's placeholders and the media do not match in number"
            raise _media_error(reason) from error
        if media.audios and int(self._audio_lengths(features).min()) < 1:
            raise _too_short()
        return features

    def _expand(self, rendered: str, media: _Media, features: BatchFeature) -> str:
        """Placeholders repeated to each item's length, with each video's own frame rate."""
        seconds = [self._processor.video_processor.temporal_patch_size / fps for fps in media.fps]
        features["video_second_per_grid"] = torch.tensor(seconds)
        return expand(
            self._processor,
            rendered,
            features,
            audio_rows=self._audio_lengths(features).tolist() if media.audios else [],
            grid_seconds=seconds,
            tracks=media.tracks,
            with_sound=media.use_audio_in_video,
            interleaving=self._interleaving,
        )

    def _spans(
        self, ids: tuple[int, ...], media: _Media, features: BatchFeature
    ) -> tuple[list[MediaSpan], dict[str, torch.Tensor]]:
        tokens = torch.tensor(ids)
        context: dict[str, torch.Tensor] = {"use_audio_in_video": torch.tensor(media.use_audio_in_video)}
        spans: list[MediaSpan] = []
        merge = self._processor.image_processor.merge_size**2
        for kind, pixels, grid, token in (
            (Modality.IMAGE, "pixel_values", "image_grid_thw", self._placeholders[Modality.IMAGE]),
            (Modality.VIDEO, "pixel_values_videos", "video_grid_thw", self._placeholders[Modality.VIDEO]),
        ):
            if grid not in features:
                continue
            grids = features[grid]
            context[grid] = grids
            patches = torch.split(features[pixels], grids.prod(-1).tolist())
            lengths = (grids.prod(-1) // merge).tolist()
            where = torch.split(_positions(tokens, token, sum(lengths)), lengths)
            for index, rows in enumerate(where):
                inputs = {pixels: patches[index], grid: grids[index : index + 1]}
                extra = repr(media.fps[index]) if kind is Modality.VIDEO else ""
                key = content_key(kind.value, patches[index].numpy(), str(grids[index].tolist()), extra)
                spans.append(MediaSpan(kind, key, rows, inputs))
        if media.videos:
            context["video_second_per_grid"] = features["video_second_per_grid"]
        if media.audios:
            spans.extend(self._audio_spans(tokens, features, context))
        return spans, context

    def _audio_spans(
        self, tokens: torch.Tensor, features: BatchFeature, context: dict[str, torch.Tensor]
    ) -> list[MediaSpan]:
        masks, mels = features["feature_attention_mask"], features["input_features"]
        context["audio_seqlens"] = masks.sum(-1)
        lengths = self._audio_lengths(features)
        token = self._placeholders[Modality.AUDIO]
        where = torch.split(_positions(tokens, token, int(lengths.sum())), lengths.tolist())
        spans = []
        for index, rows in enumerate(where):
            frames = int(masks[index].sum())
            # Only the valid frames: padding to the extractor's full length carries nothing.
            mel, mask = mels[index : index + 1, :, :frames], masks[index : index + 1, :frames]
            inputs = self.audio_inputs(mel, mask, int(masks.sum(-1).max()))
            extra = [str(value.tolist()) for name, value in inputs.items() if name not in _AUDIO_INPUTS]
            key = content_key("audio", mel.contiguous().numpy(), *extra)
            spans.append(MediaSpan(Modality.AUDIO, key, rows, inputs))
        return spans

    def _audio_lengths(self, features: BatchFeature) -> torch.Tensor:
        """Rows that each clip fills in the prompt."""
        return self.audio_rows(features["feature_attention_mask"].sum(-1))


def load_processor(name: str, folder: Path) -> ProcessorMixin:
    """The processor of a folder, of `transformers`' class `name`."""
    prepare_torchvision()
    try:
        return getattr(transformers, name).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # `tokenizers` raises bare ones for a file that it cannot read
        raise CheckpointError(
            f"no usable processor in {folder}; it needs tokenizer.json, tokenizer_config.json and "
            f"preprocessor_config.json as the model came with them: {error}"
        ) from error


def _too_short() -> MediaError:
    return MediaError(f"an audio clip is shorter than {_MIN_SECONDS * 1000:g} ms; send a longer one", param="messages")


def _media_error(reason: str) -> MediaError:
    return MediaError(f"the processor cannot take these media: {reason}", param="messages")


def _template_part(part: object, media: _Media, guarded: GuardedText) -> dict[str, str]:
    """What the chat template sees of a part; media are collected on the way, in the template's order."""
    if isinstance(part, TextPart):
        return {"type": "text", "text": guarded.guard(part.text)}
    if isinstance(part, ImagePart):
        media.images.append(part.image)
        return {"type": "image", "image": ""}
    if isinstance(part, AudioPart):
        media.audios.append(_speech(part.clip.samples, part.clip.sample_rate))
        media.tracks.append(None)
        return {"type": "audio", "audio": ""}
    if isinstance(part, VideoPart):
        media.videos.append(part.clip.frames)
        media.fps.append(part.clip.fps)
        media.with_audio.add(part.use_audio)
        if part.use_audio and part.clip.audio is not None:
            media.audios.append(_speech(part.clip.audio.samples, part.clip.audio.sample_rate))
            media.tracks.append(len(media.videos) - 1)
        return {"type": "video", "video": ""}
    raise InvalidRequestError(f"this model does not take {type(part).__name__}", param="messages")


def _speech(samples: np.ndarray, rate: int) -> np.ndarray:
    if rate != AUDIO_RATE:
        raise InvalidRequestError(f"audio must be resampled to {AUDIO_RATE} Hz, got {rate}", param="messages")
    return samples


def _positions(tokens: torch.Tensor, token: int, expected: int) -> torch.Tensor:
    where = torch.nonzero(tokens == token).flatten()
    if len(where) != expected:
        raise InvalidRequestError(f"{len(where)} media placeholders in the prompt for {expected} media rows")
    return where
