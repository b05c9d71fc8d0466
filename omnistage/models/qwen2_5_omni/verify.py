"""Our pipeline against stock `transformers` on the same chats, for `omnistage verify` and the parity tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from omnistage.core.clips import AudioClip, VideoClip
from omnistage.core.errors import CheckpointError
from omnistage.core.family import BridgeResult
from omnistage.core.messages import AudioPart, ChatMessage, ImagePart, Part, TextPart, VideoPart
from omnistage.core.params import CodecParams, SamplingParams
from omnistage.core.types import RequestInfo, StageChunk, TokenChunk
from omnistage.core.verification import ModelRunner, Progress, VerifyRow, check_cases, count_differences
from omnistage.engines.codec.stage import CodecStage
from omnistage.models.qwen2_5_omni.bridges import talker2token2wav
from omnistage.models.qwen2_5_omni.reference import Reference, ReferenceOutput
from omnistage.models.qwen2_5_omni.token2wav import Token2Wav

KINDS = ("text", "image", "images", "audio", "video", "audio_in_video", "multi_turn", "mixed")
WAVE_TOLERANCE = 1e-3
_SEED = 1234
_WORDS = ("please", "tell", "me", "what", "you", "hear", "and", "see", "in", "this", "one", "😀", "第三", "Straße")


@dataclass(frozen=True, slots=True)
class Case:
    """One chat and how much of an answer to ask for."""

    name: str
    messages: tuple[ChatMessage, ...]
    max_tokens: int
    max_codes: int

    def as_sent(self) -> list[dict[str, object]]:
        """The messages as a user sends them."""
        return [{"role": m.role, "content": [_content(part) for part in m.parts]} for m in self.messages]


@dataclass(frozen=True, slots=True)
class Answer:
    """What our pipeline gave for a case."""

    token_ids: list[int]
    codes: list[int]
    waveform: np.ndarray


def make_cases(count: int, seed: int) -> list[Case]:
    """`count` random chats that go through all kinds in turn."""
    cases = []
    for index in range(count):
        rng = np.random.default_rng((seed, index))
        kind = KINDS[index % len(KINDS)]
        lengths = int(rng.integers(4, 12)), int(rng.integers(13, 40))
        cases.append(Case(f"{index}:{kind}", tuple(_chat(kind, rng)), *lengths))
    return cases


def run(runner: ModelRunner, *, cases: int = 8, seed: int = 0, progress: Progress | None = None) -> list[VerifyRow]:
    """Run all cases through our pipeline in one batch and through `transformers` one by one; float32 on the CPU."""
    check_cases(cases)
    report = progress or (lambda _what, _done: None)
    chats = make_cases(cases, seed)
    report("our pipeline", 0.0)
    answers, noise = run_ours(runner, chats)
    report("loading transformers", 0.2)
    reference = Reference(runner.folder)
    rows: list[VerifyRow] = []
    for index, (case, answer) in enumerate(zip(chats, answers, strict=True)):
        report(f"transformers: {case.name}", 0.2 + 0.8 * index / len(chats))
        rows.extend(compare(case.name, answer, run_reference(reference, case, noise)))
    report("done", 1.0)
    return rows


def run_reference(reference: Reference, case: Case, noise: Callable[[int], torch.Tensor]) -> ReferenceOutput:
    return reference.run(case.messages, max_tokens=case.max_tokens, max_codes=case.max_codes, noise=noise)


def run_ours(runner: ModelRunner, cases: Sequence[Case]) -> tuple[list[Answer], Callable[[int], torch.Tensor]]:
    """Greedy answers of all cases in one batch, and the initial noise of their speech."""
    codes: dict[str, list[int]] = {}

    def note_codes(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
        if isinstance(chunk.payload, TokenChunk):
            ids = chunk.payload.token_ids
            codes.setdefault(request.request_id, []).extend(ids[:-1] if chunk.payload.ended_by is not None else ids)
        return talker2token2wav(request, state, chunk)

    params = [
        {
            "thinker": SamplingParams(temperature=0.0, max_tokens=case.max_tokens),
            "talker": SamplingParams(temperature=0.0, max_tokens=case.max_codes, repetition_penalty=1.05),
            "token2wav": CodecParams(streaming=False, seed=_SEED),
        }
        for case in cases
    ]
    outputs = runner.chat([case.as_sent() for case in cases], params, bridges={"token2wav": note_codes})
    silence = np.zeros(0, dtype=np.float32)
    answers = [
        Answer(out.token_ids, codes.get(out.request_id, []), silence if out.samples is None else out.samples)
        for out in outputs
    ]
    return answers, _noise_of(runner.stages["token2wav"])


def _noise_of(stage: object) -> Callable[[int], torch.Tensor]:
    if not isinstance(stage, CodecStage) or not isinstance(stage.component, Token2Wav):
        raise CheckpointError("this pipeline has no token2wav stage to compare")
    component = stage.component
    return lambda frames: component.noise_for(_SEED, frames)


def compare(name: str, ours: Answer, theirs: ReferenceOutput) -> list[VerifyRow]:
    """Tokens and codes must be identical, the waveform within `WAVE_TOLERANCE`."""
    wave = theirs.waveform if theirs.waveform is not None else np.zeros(0, dtype=np.float32)
    difference = float("inf")
    if len(ours.waveform) == len(wave):
        difference = float(np.abs(ours.waveform - wave).max(initial=0.0))
    return [
        VerifyRow.judge(name, "thinker tokens", count_differences(ours.token_ids, theirs.token_ids), 0.0),
        VerifyRow.judge(name, "talker codes", count_differences(ours.codes, theirs.codes), 0.0),
        VerifyRow.judge(name, "waveform", difference, WAVE_TOLERANCE),
    ]


# ---------------------------------------------------------------------------------------------------- chats


def _chat(kind: str, rng: np.random.Generator) -> list[ChatMessage]:
    words = TextPart(" ".join(rng.choice(_WORDS, size=int(rng.integers(1, 9)))))
    media: dict[str, list[Part]] = {
        "text": [],
        "image": [_image(rng)],
        "images": [_image(rng), _image(rng)],
        "audio": [_audio(rng)],
        "video": [_video(rng, sound=False)],
        "audio_in_video": [_video(rng, sound=True)],
        "multi_turn": [_image(rng)],
        "mixed": [_audio(rng), _image(rng)],
    }
    last = ChatMessage("user", (*media[kind], words))
    if kind not in ("multi_turn", "mixed"):
        return [last]
    return [
        ChatMessage("system", (TextPart("Answer briefly."),)),
        ChatMessage("user", (_audio(rng), words)),
        ChatMessage("assistant", (words,)),
        last,
    ]


def _image(rng: np.random.Generator) -> ImagePart:
    height, width = (int(n) for n in rng.integers(30, 160, size=2))
    return ImagePart(Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)))


def _clip(rng: np.random.Generator, seconds: float) -> AudioClip:
    return AudioClip((0.1 * rng.standard_normal(int(16_000 * seconds))).astype(np.float32), 16_000)


def _audio(rng: np.random.Generator) -> AudioPart:
    return AudioPart(_clip(rng, float(rng.uniform(0.3, 4.0))))


def _video(rng: np.random.Generator, *, sound: bool) -> VideoPart:
    count = 2 * int(rng.integers(2, 5))
    frames = rng.integers(0, 256, (count, 56, 84, 3), dtype=np.uint8)
    audio = _clip(rng, count / 2) if sound else None
    return VideoPart(VideoClip(frames, 2.0, count / 2, audio), use_audio=sound)


def _content(part: Part) -> dict[str, object]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, ImagePart):
        return {"type": "image", "image": part.image}
    kind = "audio" if isinstance(part, AudioPart) else "video"
    return {"type": kind, kind: part.clip}
