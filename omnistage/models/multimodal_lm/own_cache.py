"""A multimodal LM as `transformers` itself runs it, one sequence at a time, prompt and media whole: slow, and exact.

For models that run neither in a flattened batch nor in groups (`grouped.py`): caches that hold more than keys and
values, or more tokens than the prompt has, and state in the model's own modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps

from omnistage.core.clips import AudioClip, VideoClip
from omnistage.core.errors import (
    InternalError,
    InvalidRequestError,
    OmniError,
    UnsupportedModalityError,
    UnsupportedModelError,
)
from omnistage.core.messages import AudioPart, ChatMessage, ImagePart, Part, TextPart, VideoPart
from omnistage.core.types import ARInput, MediaSpan, Modality, RequestInfo
from omnistage.engines.ar.component import OwnSequence
from omnistage.models.causal_lm.own_cache import GeneratedSequence, OwnCacheLM, Prompt
from omnistage.models.causal_lm.own_model import MODEL_ERRORS, Inputs, generated
from omnistage.models.multimodal_lm.component import encoder_bytes
from omnistage.models.multimodal_lm.items import accepted_inputs, sample_media
from omnistage.models.multimodal_lm.probe import STOCK_FAILURE

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from omnistage.models.multimodal_lm.processor import MultimodalProcessor

_WINDOW_ARGUMENT = "audio_window_size"
"""Of `prepare_inputs_for_generation` where a model takes a window of its sound with every token."""


class OwnCacheMultimodalLM(OwnCacheLM):
    """Adapter around `AutoModelForMultimodalLM` and what its `generate` does."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast | None,
        processor: MultimodalProcessor | None,
        *,
        reason: str = "",
    ) -> None:
        """`processor` gives whole prompts; None on the meta device."""
        self._processor = processor
        self.unsupported: dict[Modality, str] = {}
        """Kinds of media that the processor takes and the model does not, with the reason."""
        self.takes_text_alone = True
        if _WINDOW_ARGUMENT in signature(model.prepare_inputs_for_generation).parameters:
            raise UnsupportedModelError(
                f"{type(model).__name__} takes sound while it answers, and ends with it, which is not served; choose a "
                "speech recognition model that takes the whole clip, like Whisper"
            )
        super().__init__(model, tokenizer, reason=reason)
        self.spec = replace(self.spec, whole_media=True)

    def check(self, info: RequestInfo, payload: ARInput) -> None:
        super().check(info, payload)
        for span in payload.media:
            if span.kind in self.unsupported:
                raise UnsupportedModalityError(self.unsupported[span.kind], param="messages")
        if any(len(span.positions) for span in payload.media):
            raise InternalError("this model takes whole prompts, and the processor gave media items apart")
        if not payload.media and not self.takes_text_alone:
            raise InvalidRequestError(
                "this model does not answer text without media; add an image, video or audio", param="messages"
            )

    def media_bytes(self, tokens: int) -> int:
        return encoder_bytes(self.model.config, self.dtype, tokens)

    def open_sequence(self, media: Sequence[MediaSpan] = ()) -> OwnSequence:
        inputs = {name: value for span in media for name, value in span.inputs.items()}
        return GeneratedSequence(self.model, self._on_device(inputs))

    def _on_device(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        return {
            name: value.to(self.device, self.dtype if value.is_floating_point() else None)
            for name, value in accepted_inputs(self.model, inputs).items()
        }

    def _prompts(self, vocab_size: int) -> list[Prompt]:
        """Text, where the model answers it alone, and a chat with items of each kind of media that it takes."""
        processor = self._processor
        if processor is None:
            return super()._prompts(vocab_size)
        prompts = super()._prompts(vocab_size)
        try:
            generated(self.model, *prompts[0])
        except MODEL_ERRORS:
            self.takes_text_alone, prompts = False, []
        kinds = sorted(processor.input_modalities - {Modality.TEXT})
        for kind in kinds:
            try:
                prompts.append(self._media_prompt(processor, kind))
            except UnsupportedModelError as error:
                self.unsupported[kind] = error.message
        if len(self.unsupported) == len(kinds):
            raise UnsupportedModelError(self.unsupported[kinds[0]])
        return prompts

    def _media_prompt(self, processor: MultimodalProcessor, kind: Modality) -> Prompt:
        """A chat that the model can answer, and whose answer depends on its media."""
        name = f"{type(self.model).__name__} with {kind} input"
        try:
            prompt, other = (self._prompt(processor, kind, changed=changed) for changed in (False, True))
            if not prompt[1]:
                raise UnsupportedModelError(f"{name}: the model takes nothing of what its processor gives for it")
            logits, others = (generated(self.model, *each)[1] for each in (prompt, other))
        except (UnsupportedModelError, torch.OutOfMemoryError):
            raise
        except (OmniError, *MODEL_ERRORS) as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise UnsupportedModelError(f"{name}: {STOCK_FAILURE} ({reason[:200]})") from error
        if torch.equal(logits[0], others[0]):
            if any(not torch.equal(mine, theirs) for mine, theirs in zip(logits, others, strict=True)):
                raise UnsupportedModelError(
                    f"{name}: its first token does not depend on the {kind}: it takes media while it answers, and ends "
                    "with them, which is not served"
                )
            raise UnsupportedModelError(f"{name}: transformers begins the same answer whatever the {kind} is")
        return prompt

    def _prompt(
        self, processor: MultimodalProcessor, kind: Modality, *, changed: bool, words: str = "a b", count: int = 2
    ) -> Prompt:
        count = count if processor.takes_several(kind) else 1
        parts: list[Part] = [TextPart(words)]
        for number in range(count):
            parts += [_part(processor, kind, number, changed), TextPart(f"c {number}")]
        payload = processor.chat([ChatMessage("user", tuple(parts))])
        return torch.tensor(payload.token_ids, device=self.device), self._on_device(payload.media[0].inputs)

    def _check_causal(self, ids: torch.Tensor) -> None:
        """Nothing: that a type takes media says that it generates, and its prompts are computed whole."""


def _part(processor: MultimodalProcessor, kind: Modality, number: int, changed: bool) -> Part:
    """An item to try a model with; `changed`: another of the same size."""
    value: Any = sample_media(kind, number, processor.items.audio_rate)[1]
    if kind is Modality.IMAGE:
        image: Image.Image = value
        return ImagePart(ImageOps.invert(image) if changed else image)
    if kind is Modality.AUDIO:
        samples: np.ndarray = value[::-1].copy() if changed else value
        return AudioPart(AudioClip(samples, processor.items.audio_rate))
    clip: VideoClip = value
    frames = 255 - clip.frames if changed else clip.frames
    return VideoPart(VideoClip(frames, clip.fps, clip.seconds), use_audio=False)
