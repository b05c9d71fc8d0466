"""CSM on our pipeline against stock `transformers`, for `omnistage verify` and the parity tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from omnistage.core.clips import AudioClip
from omnistage.core.params import CodecParams, SamplingParams, StageParams
from omnistage.core.types import Code
from omnistage.core.verification import ModelRunner, Progress, VerifyRow, check_cases, count_differences
from omnistage.hf import transformers
from omnistage.models._speech_verify import SILENCE, random_words, recording, wave_row
from omnistage.models.causal_lm.processor import load_tokenizer
from omnistage.models.csm.bridges import frames2codec
from omnistage.models.csm.processor import VOICES


@dataclass(frozen=True, slots=True)
class Case:
    """A text to speak after what was said so far: role, text and clip at the codec's rate."""

    name: str
    history: tuple[tuple[str, str, AudioClip], ...]
    text: str
    frames: int

    def as_sent(self) -> list[dict[str, object]]:
        """The messages as a user sends them."""
        messages: list[dict[str, object]] = [
            {"role": role, "content": [{"type": "text", "text": text}, {"type": "audio", "audio": clip}]}
            for role, text, clip in self.history
        ]
        return [*messages, {"role": "assistant", "content": self.text}]


@dataclass(frozen=True, slots=True)
class Speech:
    """Frames without that at the end, and their samples."""

    frames: Sequence[Code]
    samples: np.ndarray


def run(runner: ModelRunner, *, cases: int = 8, seed: int = 0, progress: Progress | None = None) -> list[VerifyRow]:
    """Compare texts, every other with a conversation before it; float32 on the CPU."""
    check_cases(cases)
    report = progress or (lambda _what, _done: None)
    selected = make_cases(cases, seed)
    report("our pipeline", 0.0)
    ours = run_ours(runner, selected)
    report("loading transformers", 0.3)
    reference, rows = Reference(runner.folder), list[VerifyRow]()
    for index, (case, mine) in enumerate(zip(selected, ours, strict=True)):
        report(f"transformers: {case.name}", 0.3 + 0.7 * index / cases)
        theirs = reference.run(case)
        rows.append(VerifyRow.judge(case.name, "codes", count_differences(mine.frames, theirs.frames), 0.0))
        rows.append(wave_row(case.name, mine.samples, theirs.samples))
    report("done", 1.0)
    return rows


def make_cases(count: int, seed: int) -> list[Case]:
    cases = []
    for index in range(count):
        rng = np.random.default_rng((seed, index))
        roles = ("user", "assistant", "user")[: index % 4] if index % 2 else ()
        turns = tuple((role, random_words(rng), _clip(rng)) for role in roles)
        name = f"{index}:{'conversation' if turns else 'text'}"
        cases.append(Case(name, turns, random_words(rng), int(rng.integers(3, 25))))
    return cases


def run_ours(runner: ModelRunner, cases: Sequence[Case]) -> list[Speech]:
    """Greedy speech of all cases in one batch, streamed."""
    frames: dict[str, list[Code]] = {}
    params: list[Mapping[str, StageParams]] = [
        {"backbone": SamplingParams(temperature=0.0, max_tokens=case.frames), "codec": CodecParams()} for case in cases
    ]
    outputs = runner.chat(
        [case.as_sent() for case in cases], params, bridges={"codec": recording(frames2codec, frames)}
    )
    return [Speech(frames.get(out.request_id, []), SILENCE if out.samples is None else out.samples) for out in outputs]


class Reference:
    """Stock `generate`, one case at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.CsmForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
        ).eval()
        if self.model.config.tie_codebooks_embeddings:  # some versions of transformers leave one of them at random
            embeddings = self.model.backbone_model.embed_tokens.embed_audio_tokens
            embeddings.weight = self.model.depth_decoder.model.embed_tokens.weight
        self._tokenizer = load_tokenizer(folder)

    @torch.inference_mode()
    def run(self, case: Case) -> Speech:
        config, tokenizer = self.model.config, self._tokenizer
        begin, end = tokenizer.bos_token, tokenizer.eos_token
        audio, audio_end = (
            tokenizer.convert_ids_to_tokens(token) for token in (config.audio_token_id, config.audio_eos_token_id)
        )
        prompt, clips, options = "", [torch.from_numpy(clip.samples) for _, _, clip in case.history], {}
        for (role, text, _), clip in zip(case.history, clips, strict=True):
            length = int(self.model.codec_model.get_encoded_length(torch.tensor(len(clip))))
            speaker = VOICES[1 if role == "user" else 0]
            prompt += f"{begin}[{speaker}]{text}{end}{audio * length}{audio_end}"
        prompt += f"{begin}[{VOICES[0]}]{case.text}{end}"
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        if clips:
            options["input_values"] = torch.cat(clips)[None, None]
            options["input_values_cutoffs"] = torch.tensor([[len(clip) for clip in clips]]).cumsum(-1)
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            depth_decoder_do_sample=False,
            max_new_tokens=case.frames,
            output_audio=True,
            return_dict_in_generate=True,
            **options,
        )
        frames = [tuple(frame) for frame in out.sequences[0].tolist()]
        if frames and set(frames[-1]) == {config.codebook_eos_token_id}:
            frames.pop()
        return Speech(frames, out.audio[0].float().numpy())


def _clip(rng: np.random.Generator) -> AudioClip:
    return AudioClip((0.1 * rng.standard_normal(int(rng.integers(3000, 40_000)))).astype(np.float32), 24_000)
