"""Stock `transformers` on the same chats: what our pipeline must equal. Used by `verify`, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from omnistage.core.messages import ChatMessage
from omnistage.core.types import Code
from omnistage.hf import transformers
from omnistage.models._qwen_omni.reference import OmniReference
from omnistage.models._qwen_omni.verify import ReferenceOutput


class Reference(OmniReference):
    """`Qwen3OmniMoeForConditionalGeneration.generate`, greedy, one chat at a time."""

    silent: ClassVar[list[list[Code]]] = []

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(folder, "Qwen3OmniMoeProcessor")
        self.model = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", experts_implementation="eager", local_files_only=True
        ).eval()
        if self.model.has_talker:
            # Its positions need it where a chat has pictures and sound, and its config has no such section.
            self.model.talker.config.audio_config = self.model.config.thinker_config.audio_config

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
        # The last token that it samples begins no frame.
        options |= {"speaker": voice, "talker_max_new_tokens": max_codes + 1, "talker_do_sample": False}
        return self.run_spoken(
            self.model.code2wav,
            lambda frames: [tuple(frame) for frame in frames.T.tolist()],
            partial(self.model.generate, **features, **options),
            partial(self.run, messages, max_tokens=max_tokens),
            length,
        )
