"""What the stock processors make of our chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from omnistage.core.messages import AudioPart, ChatMessage, ImagePart, TextPart, VideoPart
from omnistage.models._qwen_omni.expansion import video_options

if TYPE_CHECKING:
    from PIL import Image
    from transformers import BatchFeature, ProcessorMixin


def stock_inputs(processor: ProcessorMixin, messages: Sequence[ChatMessage]) -> tuple[BatchFeature, bool]:
    """The stock processor's tensors for a chat, and whether videos bring their sound."""
    turns: list[dict[str, object]] = []
    images: list[Image.Image] = []
    audios: list[np.ndarray] = []
    tracks: list[int | None] = []
    videos: list[np.ndarray] = []
    fps, with_audio = 2.0, False
    for message in messages:
        content: list[dict[str, str]] = []
        for part in message.parts:
            if isinstance(part, TextPart):
                content.append({"type": "text", "text": part.text})
            elif isinstance(part, ImagePart):
                images.append(part.image)
                content.append({"type": "image", "image": ""})
            elif isinstance(part, AudioPart):
                audios.append(part.clip.samples)
                tracks.append(None)
                content.append({"type": "audio", "audio": ""})
            elif isinstance(part, VideoPart):
                videos.append(part.clip.frames)
                fps = part.clip.fps
                if part.use_audio and part.clip.audio is not None:
                    with_audio = True
                    audios.append(part.clip.audio.samples)
                    tracks.append(len(videos) - 1)
                content.append({"type": "video", "video": ""})
        turns.append({"role": message.role, "content": content})
    text = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    media: dict[str, object] = {"images": images, "audio": audios, "videos": videos}
    options = {name: items for name, items in media.items() if items}
    if videos:
        options |= video_options(processor, fps, tracks, with_audio)
    return processor(text=text, return_tensors="pt", **options), with_audio
