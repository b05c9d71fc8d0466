"""Stock `transformers` on the same chats: what our pipeline must equal. Used by `verify`, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from omnistage.core.messages import ChatMessage
from omnistage.hf import transformers
from omnistage.models._qwen_omni.processor import load_processor
from omnistage.models._qwen_omni.reference import stock_inputs
from omnistage.models._qwen_omni.verify import ReferenceOutput

if TYPE_CHECKING:
    from transformers import BatchFeature


class Reference:
    """`Qwen3OmniMoeForConditionalGeneration.generate`, greedy, one chat at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", experts_implementation="eager", local_files_only=True
        ).eval()
        self.processor = load_processor("Qwen3OmniMoeProcessor", folder)
        if self.model.has_talker:
            # Its positions need it where a chat has pictures and sound, and its config has no such section.
            self.model.talker.config.audio_config = self.model.config.thinker_config.audio_config

    def inputs(self, messages: Sequence[ChatMessage]) -> tuple[BatchFeature, bool]:
        """The stock processor's tensors for a chat, and whether videos bring their sound."""
        return stock_inputs(self.processor, messages)

    @torch.inference_mode()
    def run(
        self, messages: Sequence[ChatMessage], *, max_tokens: int, max_codes: int = 0, voice: str = "ethan"
    ) -> ReferenceOutput:
        """Greedy answer; with `max_codes` also speech of at most so many frames."""
        features, with_audio = self.inputs(messages)
        length = features["input_ids"].shape[1]
        options: dict[str, Any] = {
            "use_audio_in_video": with_audio,
            "thinker_max_new_tokens": max_tokens,
            "thinker_do_sample": False,
            "thinker_eos_token_id": self.model.config.im_end_token_id,
        }
        if not max_codes:
            out = self.model.generate(**features, **options, return_audio=False)
            return ReferenceOutput(out[0, length:].tolist())
        frames: list[list[tuple[int, ...]]] = []

        def note_codes(_module: object, args: tuple[Any, ...], _kwargs: object) -> None:
            frames.append([tuple(frame) for frame in args[0][0].T.tolist()])

        handle = self.model.code2wav.register_forward_pre_hook(note_codes, with_kwargs=True)
        try:
            # The last token that it samples begins no frame.
            sequences, wave = self.model.generate(
                **features, **options, speaker=voice, talker_max_new_tokens=max_codes + 1, talker_do_sample=False
            )
        except (RuntimeError, ValueError):
            # It fails on a reply of a single token, for which the talker has no row, and on speech without a frame.
            answer = self.run(messages, max_tokens=max_tokens)
            if len(answer.token_ids) != 1 and frames:
                raise
            return answer
        finally:
            handle.remove()
        return ReferenceOutput(sequences[0, length:].tolist(), frames[0], wave.reshape(-1).float().numpy())
