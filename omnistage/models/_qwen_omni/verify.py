"""The chats of `omnistage verify`, and how an answer is compared with the reference's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from omnistage.core.clips import AudioClip, VideoClip
from omnistage.core.messages import AudioPart, ChatMessage, ImagePart, Part, TextPart, VideoPart
from omnistage.core.params import CodecParams, SamplingParams, StageParams
from omnistage.core.types import Code
from omnistage.core.verification import ModelRunner, Progress, VerifyRow, check_cases, count_differences
from omnistage.models._qwen_omni.bridges import talker2codec
from omnistage.models._speech_verify import SILENCE, random_words, recording, wave_row

KINDS = ("text", "image", "images", "audio", "video", "audio_in_video", "multi_turn", "mixed")


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
    codes: Sequence[Code]
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


@dataclass(slots=True)
class ReferenceOutput:
    """`token_ids` and `codes` as generated, the codes without their end token."""

    token_ids: list[int]
    codes: Sequence[Code] = field(default_factory=list)
    waveform: np.ndarray | None = None


def run_cases(
    count: int,
    seed: int,
    progress: Progress | None,
    run_ours: Callable[[Sequence[Case]], list[Answer]],
    load_reference: Callable[[], Callable[[Case], ReferenceOutput]],
) -> list[VerifyRow]:
    """All cases through our pipeline in one batch and through `transformers` one by one; float32 on the CPU."""
    check_cases(count)
    report = progress or (lambda _what, _done: None)
    chats = make_cases(count, seed)
    report("our pipeline", 0.0)
    answers = run_ours(chats)
    report("loading transformers", 0.2)
    reference = load_reference()
    rows: list[VerifyRow] = []
    for index, (case, answer) in enumerate(zip(chats, answers, strict=True)):
        report(f"transformers: {case.name}", 0.2 + 0.8 * index / len(chats))
        rows.extend(compare(case.name, answer, reference(case)))
    report("done", 1.0)
    return rows


def greedy(case: Case, codec: str | None, seed: int | None = None) -> dict[str, StageParams]:
    """Parameters of all stages; `codec` is the one that makes sound of codes, None: there is none."""
    thinker = SamplingParams(temperature=0.0, max_tokens=case.max_tokens)
    if codec is None:
        return {"thinker": thinker}
    talker = SamplingParams(temperature=0.0, max_tokens=case.max_codes, repetition_penalty=1.05)
    return {"thinker": thinker, "talker": talker, codec: CodecParams(streaming=False, seed=seed)}


def run_pipeline(
    runner: ModelRunner, cases: Sequence[Case], codec: str | None, seed: int | None = None
) -> list[Answer]:
    """Greedy answers of all cases in one batch, with the codes that reach the stage `codec`."""
    codes: dict[str, list[Code]] = {}
    chats, own = [case.as_sent() for case in cases], [greedy(case, codec, seed) for case in cases]
    outputs = runner.chat(chats, own, bridges={} if codec is None else {codec: recording(talker2codec, codes)})
    return [
        Answer(out.token_ids, codes.get(out.request_id, []), SILENCE if out.samples is None else out.samples)
        for out in outputs
    ]


def compare(name: str, ours: Answer, theirs: ReferenceOutput) -> list[VerifyRow]:
    """Tokens and codes must be identical, the waveform within `WAVE_TOLERANCE`."""
    return [
        VerifyRow.judge(name, "thinker tokens", count_differences(ours.token_ids, theirs.token_ids), 0.0),
        VerifyRow.judge(name, "talker codes", count_differences(ours.codes, theirs.codes), 0.0),
        wave_row(name, ours.waveform, SILENCE if theirs.waveform is None else theirs.waveform),
    ]


# ---------------------------------------------------------------------------------------------------- chats


def _chat(kind: str, rng: np.random.Generator) -> list[ChatMessage]:
    words = TextPart(random_words(rng))
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
