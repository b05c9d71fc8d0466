"""Stock `transformers` on the same chats: what our pipeline must equal. Used by `verify`, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch

from omnistage.core.messages import ChatMessage
from omnistage.core.types import Code
from omnistage.hf import transformers
from omnistage.models._qwen_omni.reference import OmniReference
from omnistage.models._qwen_omni.verify import ReferenceOutput

Noise = Callable[[int], torch.Tensor]
"""Initial noise `[1, frames, mel]` of token2wav by its number of mel frames."""


class Reference(OmniReference):
    """`Qwen2_5OmniForConditionalGeneration.generate`, greedy, one chat at a time."""

    silent: ClassVar[list[list[Code]]] = [[]]

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(folder, "Qwen2_5OmniProcessor")
        self.model = transformers.Qwen2_5OmniForConditionalGeneration.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        ).eval()
        self.model.talker.register_forward_pre_hook(_keep_mask, with_kwargs=True)

    @torch.inference_mode()
    def run(
        self,
        messages: Sequence[ChatMessage],
        *,
        max_tokens: int,
        max_codes: int = 0,
        voice: str | None = None,
        noise: Noise | None = None,
    ) -> ReferenceOutput:
        """Greedy answer; with `max_codes` also speech, from the given initial noise."""
        features, with_audio = self.inputs(messages)
        length = features["input_ids"].shape[1]
        # Without the prefix the pixels would also go to the talker, which refuses them.
        inputs = {f"thinker_{k}" if k.startswith("pixel_values") else k: v for k, v in features.items()}
        options: dict[str, object] = {
            "use_audio_in_video": with_audio,
            "thinker_max_new_tokens": max_tokens,
            "thinker_do_sample": False,
        }
        if not max_codes:
            out = self.model.generate(**inputs, **options, generation_mode="text")
            return ReferenceOutput(out[0, length:].tolist())
        options |= {"talker_max_new_tokens": max_codes, "talker_do_sample": False}
        if voice:
            options["speaker"] = voice

        def generate() -> tuple[torch.Tensor, torch.Tensor]:
            with fixed_noise(noise):
                return self.model.generate(**inputs, **options)  # type: ignore[no-any-return]

        generate_text = partial(self.run, messages, max_tokens=max_tokens)
        return self.run_spoken(self.model.token2wav, lambda codes: codes.tolist(), generate, generate_text, length)


def _keep_mask(
    _module: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the talker the all-ones mask back that newer `generate` drops for a prompt without padding.

    The talker adds its codec embeddings and computes its positions only where it sees a mask; without one it speaks
    other codes than the same chat gets in a padded batch.
    """
    if kwargs.get("attention_mask") is None:
        rows = kwargs["input_ids"] if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
        past = kwargs.get("past_key_values")
        length = rows.shape[1] + (past.get_seq_length() if past is not None else 0)
        kwargs["attention_mask"] = torch.ones(rows.shape[0], length, dtype=torch.long, device=rows.device)
    return args, kwargs


@contextmanager
def fixed_noise(noise: Noise | None) -> Iterator[None]:
    """Let the reference's `torch.randn` give our noise: it takes none as an argument."""
    if noise is None:
        yield
        return

    stock = torch.randn

    def randn(shape: Sequence[int], **options: Any) -> torch.Tensor:
        if options.get("generator") is not None:  # `noise` itself samples with one
            return stock(shape, **options)
        values = noise(int(shape[1])).to(device=options["device"], dtype=options["dtype"])
        if list(values.shape) != list(shape):
            raise ValueError(f"noise of shape {list(values.shape)} for {list(shape)}")
        return values

    with mock.patch("torch.randn", randn):
        yield
