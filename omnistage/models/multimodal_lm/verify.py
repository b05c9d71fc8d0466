"""Compare a multimodal LM's greedy answers with `transformers`' own `generate`, for chats with and without media.

All cases run in one batch of our pipeline and one by one in the reference, in float32 on both sides.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omnistage.core.clips import AudioClip
from omnistage.core.messages import AudioPart, ChatMessage, ImagePart, Part, TextPart, VideoPart
from omnistage.core.params import SamplingParams
from omnistage.core.types import Modality
from omnistage.core.verification import ModelRunner, Progress, VerifyRow, check_cases, count_differences
from omnistage.models.loading import read_auto_config
from omnistage.models.multimodal_lm.items import accepted_inputs, sample_media
from omnistage.models.multimodal_lm.processor import MultimodalProcessor, auto_model

_NEW_TOKENS = 16
_WORDS = ("please", "tell", "me", "what", "you", "see", "hear", "in", "this", "😀", "第三", "Straße")


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    token_ids: list[int]
    logprobs: list[float]


def run(runner: ModelRunner, *, cases: int = 6, seed: int = 0, progress: Progress | None = None) -> list[VerifyRow]:
    """One row for each of `cases` chats: the tokens that differ."""
    check_cases(cases)
    report = progress or (lambda _what, _done: None)
    processor = MultimodalProcessor.load(runner.folder)
    chats = make_chats(processor, cases, seed)
    report("our pipeline", 0.0)
    params = SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS)
    messages_sent = [[as_sent(message) for message in chat] for chat in chats]
    ours = runner.chat(messages_sent, [{runner.stage_names[0]: params}] * len(chats))
    report("transformers", 0.5)
    theirs = reference_answers(runner.folder, processor, chats, _NEW_TOKENS)
    rows = []
    for number, (chat, mine, reference) in enumerate(zip(chats, ours, theirs, strict=True)):
        case = f"{number}: {', '.join(type(p).__name__.removesuffix('Part').lower() for p in chat[-1].parts)}"
        rows.append(VerifyRow.judge(case, "tokens", count_differences(mine.token_ids, reference.token_ids), 0.0))
    report("done", 1.0)
    return rows


def make_chats(
    processor: MultimodalProcessor,
    count: int,
    seed: int,
    without: Collection[Modality] = (),
    *,
    text_alone: bool = True,
) -> list[list[ChatMessage]]:
    """Chats with no media, one item and two of each kind that the model takes, in turn; none of the kinds `without`."""
    kinds = sorted(processor.input_modalities - {Modality.TEXT, *without})
    several = [kind for kind in kinds if processor.takes_several(kind)]
    plans: list[tuple[Modality, ...]] = [
        *([()] if text_alone else []),
        *((kind,) for kind in kinds),
        *((kind, kind) for kind in several),
    ]
    if len(kinds) > 1:
        plans.append(tuple(kinds))
    chats = []
    for index in range(count):
        rng = np.random.default_rng((seed, index))
        parts: list[Part] = [_words(rng)]
        for number, kind in enumerate(plans[index % len(plans)]):
            parts += [media_part(processor, kind, seed + 7 * index + number), _words(rng)]
        chats.append([ChatMessage("user", tuple(parts))])
    return chats


def _words(rng: np.random.Generator) -> TextPart:
    return TextPart(" ".join(rng.choice(_WORDS, size=int(rng.integers(2, 9)))))


def media_part(processor: MultimodalProcessor, kind: Modality, number: int) -> Part:
    """A small item of this kind; another for each number."""
    rate = processor.items.audio_rate
    value = sample_media(kind, number, rate)[1]
    if kind is Modality.IMAGE:
        return ImagePart(value)
    return AudioPart(AudioClip(value, rate)) if kind is Modality.AUDIO else VideoPart(value, use_audio=False)


def as_sent(message: ChatMessage) -> dict[str, Any]:
    """A message as a user sends it."""
    content: list[dict[str, Any]] = []
    for part in message.parts:
        if isinstance(part, TextPart):
            content.append({"type": "text", "text": part.text})
        elif isinstance(part, ImagePart):
            content.append({"type": "image", "image": part.image})
        else:
            kind = "audio" if isinstance(part, AudioPart) else "video"
            content.append({"type": kind, kind: part.clip})
    return {"role": message.role, "content": content}


@torch.inference_mode()
def reference_answers(
    folder: Path, processor: MultimodalProcessor, chats: Sequence[Sequence[ChatMessage]], new_tokens: int
) -> list[ReferenceAnswer]:
    """Greedy answers of transformers: the whole chat through its processor, then `generate`."""
    model = (
        auto_model(str(read_auto_config(folder).model_type))
        .from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
        .eval()
    )
    answers = []
    for chat in chats:
        rendered, media, _guarded = processor.rendered(chat)
        # Some processors take no text without media; it is then tokenised as any text.
        if media:
            inputs = processor.items.call(rendered, media)[1]
        else:
            inputs = {"input_ids": torch.tensor([processor.chat(chat).token_ids])}
        accepted = accepted_inputs(model, inputs)
        tensors = {name: value for name, value in accepted.items() if isinstance(value, torch.Tensor)}
        floats = {name: value.float() for name, value in tensors.items() if value.is_floating_point()}
        out = model.generate(
            **{**accepted, **floats},  # some processors give bfloat16
            do_sample=False,
            max_new_tokens=new_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = out.sequences[0, -len(out.logits) :]
        logprobs = torch.stack(out.logits)[:, 0].double().log_softmax(-1)
        answers.append(ReferenceAnswer(tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist()))
    return answers
