"""Chats with text, images, audio and video into a thinker's input, as any multimodal LM's.

What is more here: a video and its sound are one item of the processor's and two of the engine's, which take turns in
the prompt; positions are computed from seconds; how a clip is encoded may depend on those beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from omnistage.compat import prepare_torchvision
from omnistage.core.errors import CheckpointError, InvalidRequestError, LimitExceededError, MediaError
from omnistage.core.messages import PLAIN_TEMPLATE, ChatMessage, Part, TemplateOptions, VideoPart
from omnistage.core.types import ARInput, MediaSpan, Modality, OmniTokensPrompt
from omnistage.hf import transformers
from omnistage.media.budget import current_hold
from omnistage.media.hashing import content_key
from omnistage.models._qwen_omni.video_options import video_default, video_options
from omnistage.models.chat_template import ToolSpec
from omnistage.models.loading import positive
from omnistage.models.multimodal_lm.items import ItemProcessor, Media, MediaItem
from omnistage.models.multimodal_lm.processor import MultimodalProcessor
from omnistage.models.prompts import GuardedText, tokens_input

if TYPE_CHECKING:
    from PIL import Image
    from transformers import PreTrainedConfig, ProcessorMixin

    from omnistage.core.clips import VideoClip
    from omnistage.models.prompts import PromptTokenizer

AUDIO_RATE = 16_000
_AUDIO_INPUTS = ("input_features", "feature_attention_mask")
_INPUTS = {
    Modality.IMAGE: ("pixel_values", "image_grid_thw"),
    Modality.VIDEO: ("pixel_values_videos", "video_grid_thw"),
    Modality.AUDIO: _AUDIO_INPUTS,
}
"""Of the model's forward, by kind: contents, and what says how they lie."""
_CONTEXT = ("image_grid_thw", "video_grid_thw", "video_second_per_grid")
_MIN_SECONDS = 0.03
"""Less gives the audio encoder no output row, and positions cannot be computed beside pictures."""


@dataclass(frozen=True, slots=True)
class _Chat:
    """The media of a chat by kind."""

    images: Sequence[Image.Image]
    videos: Sequence[VideoClip]
    audios: Sequence[np.ndarray]
    """With the sound of videos."""

    @classmethod
    def of(cls, media: Sequence[Media]) -> _Chat:
        images, videos = ([value for kind, value in media if kind is each] for each in (Modality.IMAGE, Modality.VIDEO))
        return cls(images, videos, [samples for one in media if (samples := _sound(one)) is not None])


class OmniItems(ItemProcessor):
    """Items of the Qwen-Omni processors; a video may have its sound with it."""

    longest = 0
    """Samples of the longest clip of the chat."""

    def __init__(self, processor: ProcessorMixin, prompts: PromptTokenizer) -> None:
        super().__init__(processor, prompts)
        self._processor.return_mm_token_type_ids = False

    def arguments(self, media: Sequence[Media]) -> dict[str, Any]:
        options = super().arguments(media)
        sounds = _Chat.of(media).audios
        if media[0][0] is Modality.VIDEO:
            options |= video_options(self._processor, media[0][1].fps, [0 for _ in sounds], bool(sounds))
        if sounds:
            options |= {"audio": sounds, "audio_kwargs": {"sampling_rate": AUDIO_RATE}}
        return options

    def items_of(self, kind: Modality, placeholder: tuple[str, int], values: Sequence[Any]) -> list[MediaItem]:
        """Pictures or clips in one call of the processor, which takes longer than what it does for a small one.

        `placeholder`: as text, and as a token.
        """
        text, outputs = self.call("\n".join([placeholder[0]] * len(values)), [(kind, value) for value in values])
        contents, layout = _INPUTS[kind]
        layouts = outputs[layout].split(1)
        rows = [int(each.prod()) if kind is Modality.IMAGE else 1 for each in layouts]
        items = []
        for expanded, part, each in zip(text.split("\n"), outputs[contents].split(rows), layouts, strict=True):
            ids = (placeholder[1],) * expanded.count(placeholder[0])
            if not ids:
                raise _too_short()
            items.append(
                MediaItem(kind, expanded, ids, {"input_ids": torch.tensor([ids]), contents: part, layout: each})
            )
        return items

    def padded_samples(self, longest: int) -> int:
        """To which each clip is padded where the longest of the chat has so many."""
        del longest
        return int(self.audio_processor.n_samples)


class QwenOmniProcessor(MultimodalProcessor):
    """Thread-safe: `transformers`' processor is used by one thread at a time."""

    item_processor = OmniItems
    items: OmniItems

    def __init__(
        self,
        processor: ProcessorMixin,
        thinker: PreTrainedConfig,
        voices: Sequence[str],
        *,
        placeholders: tuple[int, int, int],
    ) -> None:
        """`placeholders` are the token ids of images, audio and videos."""
        text = thinker.text_config
        kinds = (Modality.IMAGE, Modality.AUDIO, Modality.VIDEO)
        self._placeholder_ids = dict(zip(kinds, placeholders, strict=True))
        self._voices = tuple(voices)
        sizes = [positive(text, name) for name in ("vocab_size", "hidden_size", "max_position_embeddings")]
        super().__init__(processor, *sizes)
        self.max_tokens = sizes[-1]

    def _learn_media(self) -> None:
        # With what is around it, since the processor puts a video's sound inside of that.
        processor: Any = self._processor
        video = processor.vision_bos_token + processor.video_token + processor.vision_eos_token
        tokens = processor.image_token, processor.audio_token, video
        self._placeholders = dict(zip(self._placeholder_ids, tokens, strict=True))

    @property
    def max_samples(self) -> int:
        """Samples of the longest clip. The extractor would cut a longer one in silence."""
        return int(self.items.audio_processor.n_samples)

    def audio_inputs(self, mel: torch.Tensor, mask: torch.Tensor, longest: int) -> Mapping[str, torch.Tensor]:
        """What the audio encoder gets for a clip, beside others of up to `longest` mel frames."""
        del longest
        return dict(zip(_AUDIO_INPUTS, (mel, mask), strict=True))

    # --------------------------------------------------------------------------------------------- inputs

    def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        *,
        thinking: bool | None = None,
        template: TemplateOptions = PLAIN_TEMPLATE,
    ) -> ARInput:
        videos = [part for message in messages for part in message.parts if isinstance(part, VideoPart)]
        if len({part.use_audio for part in videos}) > 1:
            raise InvalidRequestError(
                "use_audio_in_video needs an audio track in every video of the chat, or in none", param="messages"
            )
        return super().chat(messages, tools, thinking=thinking, template=template)

    def tokens(self, prompt: OmniTokensPrompt) -> ARInput:
        placeholders = set(self._placeholder_ids.values())
        return tokens_input(prompt, self._vocab_size, self._embed_size, placeholders=placeholders)

    def voices(self) -> Sequence[str]:
        return self._voices

    def clip_seconds(self) -> tuple[float, float]:
        return _MIN_SECONDS, self.max_samples / AUDIO_RATE

    # ---------------------------------------------------------------------------------------------- media

    def _template_part(self, part: Part, media: list[Media], guarded: GuardedText) -> dict[str, str]:
        if not isinstance(part, VideoPart):
            return super()._template_part(part, media, guarded)
        sound = part.clip.audio if part.use_audio else None
        if sound is not None and sound.sample_rate != AUDIO_RATE:
            raise InvalidRequestError(
                f"audio must be resampled to {AUDIO_RATE} Hz, got {sound.sample_rate}", param="messages"
            )
        media.append((Modality.VIDEO, replace(part.clip, audio=sound)))
        return {"type": "video", "video": ""}

    def _check_size(self, rendered: str, media: Sequence[Media]) -> None:
        self._prompts.check_length(rendered)
        chat, processor = _Chat.of(media), self._processor
        try:
            count = sum(self._image_tokens(chat.images)) + sum(self._video_tokens(chat.videos))
        except ValueError as error:
            raise MediaError(f"the processor cannot take these media: {error}", param="messages") from error
        if count > self._prompts.limits.max_tokens:
            raise self._prompts.limits.too_long(f"{count} tokens of media")
        self._reserve(count, chat)
        if any(len(samples) > self.max_samples for samples in chat.audios):
            longest = f"{self.max_samples / AUDIO_RATE:.0f} s"
            raise LimitExceededError(
                f"a clip may last at most {longest} with this model; split it into several", param="messages"
            )
        # Spectra take more; a clip beside a longer one is padded.
        if max(map(len, chat.audios), default=AUDIO_RATE) <= processor.feature_extractor.n_fft // 2:
            raise _too_short()

    def _reserve(self, tokens: int, chat: _Chat) -> None:
        """Memory for the features, and as much again while they are computed, with a copy of all pixels."""
        images, audio = self._processor.image_processor, self._processor.feature_extractor
        patch = 3 * images.temporal_patch_size * images.patch_size**2
        padded = self.items.padded_samples(max(map(len, chat.audios), default=0))
        mels = len(chat.audios) * audio.feature_size * -(-padded // audio.hop_length)
        pixels = sum(image.width * image.height for image in chat.images) * 3
        pixels += sum(clip.frames.nbytes for clip in chat.videos)
        try:
            current_hold().reserve(int(2 * 4 * (tokens * images.merge_size**2 * patch + mels)) + pixels)
        except LimitExceededError as error:
            error.param = "messages"
            raise

    def _image_tokens(self, images: Sequence[Image.Image]) -> list[int]:
        """Rows that each image fills in the prompt."""
        processor = self._processor.image_processor
        merge = processor.merge_size**2
        return [processor.get_number_of_image_patches(i.height, i.width, {}) // merge for i in images]

    def _video_tokens(self, clips: Sequence[VideoClip]) -> list[int]:
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
        shapes = [(n + -n % step, height, width) for n, height, width, _ in (clip.frames.shape for clip in clips)]
        return [videos.get_num_of_video_patches(*shape, options) // merge for shape in shapes]

    def _items(self, rendered: str, media: Sequence[Media]) -> tuple[list[MediaItem], list[str]]:
        self.items.longest = max(map(len, _Chat.of(media).audios), default=0)
        return super()._items(rendered, media)

    def _items_apart(self, media: Sequence[Media]) -> list[MediaItem]:
        items: dict[int, MediaItem] = {}
        for kind in (Modality.IMAGE, Modality.AUDIO):
            places = [place for place, one in enumerate(media) if one[0] is kind]
            if places:
                placeholder = self._placeholders[kind], self._placeholder_ids[kind]
                values = [media[place][1] for place in places]
                items |= zip(places, self.items.items_of(kind, placeholder, values), strict=True)
        video = self._placeholders[Modality.VIDEO]
        return [items.get(place) or self.items.item(video, [one]) for place, one in enumerate(media)]

    def _spliced(self, items: Sequence[MediaItem], pieces: Sequence[str], guarded: GuardedText) -> ARInput:
        payload = super()._spliced(items, pieces, guarded)
        context = {name: payload.context[name] for name in _CONTEXT if name in payload.context}
        masks = [item.inputs["feature_attention_mask"] for item in items if "feature_attention_mask" in item.inputs]
        if masks:
            context["audio_seqlens"] = torch.cat([mask.sum(-1) for mask in masks])
        interleaved = any({*_INPUTS[Modality.AUDIO], *_INPUTS[Modality.VIDEO]} <= item.inputs.keys() for item in items)
        context["use_audio_in_video"] = torch.tensor(interleaved)
        return replace(payload, context=context)

    def _item_spans(self, item: MediaItem, start: int, items: Sequence[MediaItem]) -> list[MediaSpan]:
        """Of the placeholders alone: what the talker gets of the tokens around them is that of text."""
        tokens, spans = torch.tensor(item.token_ids), []
        for kind, (contents, layout) in _INPUTS.items():
            if contents not in item.inputs:
                continue
            where = torch.nonzero(tokens == self._placeholder_ids[kind]).flatten() + start
            inputs: Mapping[str, torch.Tensor] = {name: item.inputs[name] for name in (contents, layout)}
            extra = [str(inputs[layout].tolist())]
            if kind is Modality.VIDEO:
                extra.append(str(item.inputs["video_second_per_grid"].tolist()))
            if kind is Modality.AUDIO:
                inputs = self._clip_inputs(item, items)
                extra = [str(value.tolist()) for name, value in inputs.items() if name not in _AUDIO_INPUTS]
                if not len(where):
                    raise _too_short()
            spans.append(MediaSpan(kind, content_key(kind.value, inputs[contents].numpy(), *extra), where, inputs))
        return spans

    def _clip_inputs(self, item: MediaItem, items: Sequence[MediaItem]) -> Mapping[str, torch.Tensor]:
        """Only the valid frames: padding carries nothing."""
        mel, mask = (item.inputs[name] for name in _AUDIO_INPUTS)
        frames = int(mask.sum())
        lengths = [each.inputs["feature_attention_mask"].sum() for each in items if "input_features" in each.inputs]
        return self.audio_inputs(mel[..., :frames].contiguous(), mask[:, :frames], int(max(lengths)))


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


def _sound(media: Media) -> np.ndarray | None:
    """The samples of a clip, or of a video that brings its sound."""
    kind, value = media
    if kind is Modality.AUDIO:
        samples: np.ndarray = value
        return samples
    sound = value.audio if kind is Modality.VIDEO else None
    return None if sound is None else sound.samples
