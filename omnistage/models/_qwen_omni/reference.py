"""What stock `transformers` makes of our chats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from omnistage.core.messages import AudioPart, ChatMessage, ImagePart, TextPart, VideoPart
from omnistage.core.types import Code
from omnistage.models._qwen_omni.processor import load_processor
from omnistage.models._qwen_omni.verify import ReferenceOutput
from omnistage.models._qwen_omni.video_options import video_options

if TYPE_CHECKING:
    from PIL import Image
    from transformers import BatchFeature, ProcessorMixin


class OmniReference:
    """A stock model and its processor. Used by `verify`, tests and benchmarks."""

    model: Any
    silent: ClassVar[list[list[Code]]]
    """The codes that the vocoder has got where `generate` fails on speech without a code."""

    def __init__(self, folder: Path, processor: str) -> None:
        self.processor = load_processor(processor, folder)

    def inputs(self, messages: Sequence[ChatMessage]) -> tuple[BatchFeature, bool]:
        """The stock processor's tensors for a chat, and whether videos bring their sound."""
        return stock_inputs(self.processor, messages)

    def run_spoken(
        self,
        codec: torch.nn.Module,
        read_codes: Callable[[torch.Tensor], list[Code]],
        generate: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        generate_text: Callable[[], ReferenceOutput],
        length: int,
    ) -> ReferenceOutput:
        """What `generate` says after a prompt of that length, with the codes that reach the vocoder; `generate_text`
        gives its answer in text alone."""
        codes: list[list[Code]] = []

        def note_codes(_module: object, args: tuple[Any, ...], _kwargs: object) -> None:
            codes.append(read_codes(args[0][0]))

        handle = codec.register_forward_pre_hook(note_codes, with_kwargs=True)
        try:
            sequences, wave = generate()
        except (RuntimeError, ValueError):
            # It fails on a reply of a single token, for which the talker has no row, and on speech without a code.
            answer = generate_text()
            if len(answer.token_ids) != 1 and codes != self.silent:
                raise
            return answer
        finally:
            handle.remove()
        return ReferenceOutput(sequences[0, length:].tolist(), codes[0], wave.reshape(-1).float().numpy())


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
