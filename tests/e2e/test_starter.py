"""The starter as a whole, on a small random one: what goes in, what comes out, and what is refused."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omnistage_starter import tiny
from omnistage_starter.bridges import SIZE
from omnistage_starter.parts.manifest import STARTER
from omnistage_starter.parts.store import Store
from omnistage_starter.speech_to_text import SpeechToText
from omnistage_starter.text_to_speech import Voice
from omnistage_starter.tiny_speech_to_text import write_speech_to_text

from omnistage.config import OmniEngineArgs
from omnistage.config.checkpoint import find_model
from omnistage.core.clips import AudioClip
from omnistage.core.errors import (
    CheckpointError,
    InvalidRequestError,
    LimitExceededError,
    MediaError,
    OmniError,
    PromptTooLongError,
    UnsupportedModalityError,
)
from omnistage.core.params import DiffusionParams, SamplingParams
from omnistage.core.sentences import Sentences
from omnistage.core.types import FinishReason, Modality
from omnistage.core.user_cache import HOME_VARIABLE
from omnistage.engines.ar.stage import ARStage
from omnistage.engines.codec.module import ModuleStage
from omnistage.engines.diffusion.decode import DecodeStage
from omnistage.engines.diffusion.stage import DenoiseStage
from omnistage.models.prompts import PromptTokenizer
from omnistage.models.registry import REGISTRY
from omnistage.omni import Omni
from omnistage.pipeline import build, loop_threads
from omnistage.pipeline.build import EngineParts, build_parts
from omnistage.pipeline.outputs import OmniRequestOutput
from tests.e2e.harness import PipelineHarness, assert_empty, final_of, open_door, say

pytest.importorskip("onnx", reason="the tiny speech recognition networks are written with it")
pytest.importorskip("hibari", reason="the voice is that package's")

HEARD = "the cat sees a bird"
SMALL = ("think.kv_blocks=256",)
GREEDY = {"temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 8}
THINK = {"think": GREEDY}


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("starter") / "model"
    tiny.write(folder, seed=5)
    write_speech_to_text(folder / "hear", script=(*HEARD.split(), "</s>"))
    return folder


def parts_of(folder: Path) -> EngineParts:
    args = OmniEngineArgs(model=str(folder), device="cpu", dtype="float32", overrides=SMALL)
    return build_parts(args, progress=False)


@pytest.fixture(scope="module")
def loaded(starter: Path) -> EngineParts:
    return parts_of(starter)


@pytest.fixture(scope="module")
def _shared(loaded: EngineParts) -> Iterator[Omni]:
    with open_door(loaded) as omni:
        yield omni


@pytest.fixture
def omni(_shared: Omni) -> Iterator[Omni]:
    yield _shared
    assert_empty(_shared.orchestrator)


@pytest.fixture(scope="module")
def text_only(starter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As after a pull without npm."""
    folder = tmp_path_factory.mktemp("text_only") / "model"
    shutil.copytree(starter, folder, ignore=shutil.ignore_patterns("hear"))
    return folder


def sound(level: float = 0.3, seconds: float = 1.0) -> dict[str, object]:
    times = np.arange(int(seconds * 16_000)) / 16_000
    return {"type": "audio", "audio": AudioClip((level * np.sin(times * 1400)).astype(np.float32), 16_000)}


def answered(omni: Omni, messages: Any, drawing: dict[str, Any] | None = None, **options: Any) -> OmniRequestOutput:
    params = {"think": {**GREEDY, **options.pop("think", {})}, "draw": {"steps": 2, "seed": 4, **(drawing or {})}}
    out = omni.chat(messages, params, **options)
    assert isinstance(out, OmniRequestOutput)
    if out.error is not None:
        raise out.error
    return out


def apart(one: OmniRequestOutput, two: OmniRequestOutput) -> int:
    """How far the first pictures are apart, in steps of a colour; rounding in another batch makes one at most."""
    assert one.image is not None
    assert two.image is not None
    return int(np.abs(one.image.pixels.astype(int) - two.image.pixels.astype(int)).max())


# ------------------------------------------------------------------------------------------------- what comes out


def test_torch_computes_in_one_thread_and_modules_in_their_own(starter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that compute with torch slow each other down, even by turns."""
    where: dict[str, set[tuple[str, int]]] = {}
    monkeypatch.setattr(loop_threads, "usable_cores", lambda: 2)

    def here() -> tuple[str, int]:
        return threading.current_thread().name, torch.get_num_threads()

    def noted(kind: type, method: str) -> None:
        original = getattr(kind, method)

        def step(self: Any, *args: Any) -> Any:
            where.setdefault(self.name, set()).add(here())
            return original(self, *args)

        monkeypatch.setattr(kind, method, step)

    for kind in (ARStage, DenoiseStage, DecodeStage, ModuleStage):
        noted(kind, "step")
    load = build.load_component

    def loaded_there(*args: Any, **named: Any) -> object:
        where.setdefault("loading", set()).add(here())
        return load(*args, **named)

    monkeypatch.setattr(build, "load_component", loaded_there)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with open_door(parts_of(starter)) as omni:
            answered(omni, say("Draw a red fox.", sound()), modalities=["text", "audio", "image"])
    finally:
        torch.set_num_threads(before)
    assert where == {
        "loading": {(threading.current_thread().name, 1)},
        "hear": {("omnistage-hear", 1)},
        "speak": {("omnistage-speak", 1)},
        **{name: {("omnistage-cpu", 2)} for name in ("think", "draw", "paint")},
    }


def test_one_request_is_answered_in_text_speech_and_a_picture(omni: Omni) -> None:
    out = answered(omni, say("Draw a red fox."), modalities=["text", "audio", "image"])
    assert out.text
    assert out.audio is not None
    assert out.audio.sample_rate == 24_000
    assert out.image is not None
    assert out.image.pixels.shape == (SIZE, SIZE, 3)
    assert out.finish_reason is FinishReason.LENGTH
    assert out.usage.completion_tokens == 8
    assert out.usage.prompt_tokens > 20
    assert (out.usage.images, out.usage.steps) == (1, 2)


def test_only_stages_for_the_requested_modalities_run(omni: Omni) -> None:
    ran = {}
    for asked in ("text", "audio", "image"):
        out = answered(omni, say("Hello!"), modalities=[asked])
        assert out.trace is not None
        ran[asked] = [name for name, stage in out.trace.stages.items() if stage.started is not None]
    assert ran == {
        "text": ["hear", "think"],
        "audio": ["hear", "think", "speak"],
        "image": ["hear", "think", "draw", "paint"],
    }


def test_an_image_alone_needs_no_answer_of_the_language_model(omni: Omni) -> None:
    alone = answered(omni, say("Draw a red fox."), modalities=["image"])
    beside = answered(omni, say("Draw a red fox."), modalities=["text", "image"])
    assert (alone.usage.completion_tokens, beside.usage.completion_tokens) == (1, 8)
    assert alone.finish_reason is FinishReason.STOP
    assert apart(alone, beside) <= 1


def test_speech_starts_while_the_answer_is_generated(loaded: EngineParts) -> None:
    harness = PipelineHarness(loaded)
    params = {"think": {**GREEDY, "max_tokens": 250, "ignore_eos": True}}
    items = harness.submit("r", say("Tell me a story."), params, modalities=["text", "audio"])
    harness.finish()
    first_sound = next(i for i, item in enumerate(items) if item.audio is not None)
    last_word = max(i for i, item in enumerate(items) if item.token_ids)
    assert first_sound < last_word
    out = final_of(items)
    assert out.audio is not None
    assert out.audio.seconds == pytest.approx(sum(len(i.audio.samples) for i in items if i.audio) / 24_000)


def test_the_answer_is_spoken_as_the_voice_says_its_sentences(omni: Omni) -> None:
    out = answered(omni, say("Hello!"), modalities=["text", "audio"], think={"max_tokens": 40})
    assert out.audio is not None
    assert np.array_equal(out.audio.samples, spoken(out.text))


def spoken(text: str) -> np.ndarray:
    left, pieces = Sentences().push(text)
    voice = Voice(1)
    return np.concatenate([voice.synthesise(piece, seed=0) for piece in (*pieces, *left.finish())])


def test_a_text_is_read_aloud_verbatim(omni: Omni) -> None:
    text = "The quick brown fox jumps over the lazy dog. It does not say why!"
    out = answered(omni, omni.processor.read_aloud(text), modalities=["audio"])  # type: ignore[union-attr]
    assert out.audio is not None
    assert np.array_equal(out.audio.samples, spoken(text))


def test_reading_aloud_gives_audio_only(omni: Omni) -> None:
    aloud = omni.processor.read_aloud("These very words.")  # type: ignore[union-attr]
    for asked in (["text"], ["text", "audio"], ["audio", "image"], ["text", "audio", "image"]):
        with pytest.raises(InvalidRequestError, match="request audio alone") as refused:
            answered(omni, aloud, modalities=asked)
        assert refused.value.param == "modalities"


# --------------------------------------------------------------------------------------------------- what goes in


def test_a_spoken_message_equals_a_written_one(omni: Omni) -> None:
    written = answered(omni, say(HEARD))
    said = answered(omni, [{"role": "user", "content": [sound()]}])
    assert said.token_ids == written.token_ids
    assert said.usage.prompt_tokens == written.usage.prompt_tokens


def test_sound_and_text_of_a_message_stand_on_lines_of_their_own(omni: Omni) -> None:
    both = answered(omni, say("Answer briefly.", sound()))
    assert both.token_ids == answered(omni, say(f"{HEARD}\nAnswer briefly.")).token_ids


def test_an_image_is_drawn_from_a_spoken_message(omni: Omni) -> None:
    said = answered(omni, [{"role": "user", "content": [sound()]}], modalities=["image"])
    written = answered(omni, say(HEARD), modalities=["image"])
    other = answered(omni, say("Something else."), modalities=["image"])
    assert apart(said, written) <= 1
    assert apart(said, other) > 10


def test_a_bare_prompt_is_drawn_like_a_message(omni: Omni) -> None:
    params = {"draw": {"steps": 2, "seed": 4}}
    prompts: list[Any] = ["Draw a red fox.", {"prompt": "Draw a red fox."}]
    bare, mapped = omni.generate(prompts, params, modalities=["image"], progress=False)
    chatted = answered(omni, say("Draw a red fox."), modalities=["image"])
    assert apart(bare, chatted) <= 1
    assert apart(mapped, chatted) <= 1


def test_tokens_and_bare_prompts_are_continued(omni: Omni) -> None:
    prompts: list[Any] = ["Once upon a time", {"prompt_token_ids": [1, 2, 3]}]
    bare, ids = omni.generate(prompts, SamplingParams.parse(GREEDY), progress=False)
    assert bare.usage.completion_tokens == ids.usage.completion_tokens == 8
    assert ids.usage.prompt_tokens == 3


def test_silence_is_refused(omni: Omni) -> None:
    with pytest.raises(MediaError, match="no speech was detected"):
        answered(omni, [{"role": "user", "content": [sound(0.0)]}])


def test_silence_earlier_in_the_conversation_is_inaudible(omni: Omni) -> None:
    messages = [
        {"role": "user", "content": [sound(0.0)]},
        {"role": "assistant", "content": "Pardon?"},
        *say("Hello!"),
    ]
    written = [{"role": "user", "content": "(inaudible)"}, *messages[1:]]
    assert answered(omni, messages).token_ids == answered(omni, written).token_ids


def test_a_starter_without_speech_recognition_says_how_to_get_it(text_only: Path) -> None:
    with open_door(parts_of(text_only)) as omni:
        assert omni.processor.input_modalities == {Modality.TEXT}
        assert answered(omni, say("Hello!")).text
        with pytest.raises(UnsupportedModalityError, match="npm installed, run `omnistage pull starter`") as refused:
            answered(omni, [{"role": "user", "content": [sound()]}])
        assert refused.value.param == "messages"
        with pytest.raises(UnsupportedModalityError, match="npm installed, run `omnistage pull starter`"):
            omni.processor.transcribe(AudioClip(np.zeros(16_000, np.float32), 16_000))


def test_a_clip_of_an_earlier_turn_is_not_transcribed_again(starter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    words = SpeechToText.transcribe_piece

    def counted(self: SpeechToText, samples: Any) -> str:
        heard.append(len(samples))
        return words(self, samples)

    monkeypatch.setattr(SpeechToText, "transcribe_piece", counted)
    with open_door(parts_of(starter)) as omni:
        first = {"role": "user", "content": [sound(seconds=1.0)]}
        answered(omni, [first])
        later = [first, {"role": "assistant", "content": "I see."}, {"role": "user", "content": [sound(seconds=2.0)]}]
        answered(omni, later)
        answered(omni, later)
    assert heard == [16_000, 32_000]


def test_a_folder_may_name_its_voice(starter: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(starter, folder)
    (folder / "speak").mkdir()
    named = folder / "speak" / "voice.json"
    for text, wrong in (
        ("{}", "names no voice"),
        ('{"voice": "nobody"}', "there is no voice"),
        ("[]", "not an object"),
    ):
        named.write_text(text, encoding="utf-8")
        with pytest.raises(OmniError, match=wrong):
            parts_of(folder)
    named.write_text('{"voice": "heart"}', encoding="utf-8")
    with open_door(parts_of(folder)) as omni:
        assert answered(omni, say("Hello!"), modalities=["audio"]).audio is not None


# ---------------------------------------------------------------------------------------------------- many at once


def test_requests_of_every_kind_share_the_stages_and_leave_nothing_behind(loaded: EngineParts) -> None:
    harness = PipelineHarness(loaded)
    kinds = [["text"], ["audio"], ["image"], ["text", "audio"], ["text", "image"], ["text", "audio", "image"]]
    params = {"think": GREEDY, "draw": {"steps": 3, "seed": 4}}
    message = [{"role": "user", "content": [sound()]}]
    items = {f"{i}": harness.submit(f"{i}", message, params, modalities=kind) for i, kind in enumerate(kinds * 3)}
    for request_id in ("1", "8", "16"):
        harness.turns(2)
        harness.orchestrator.abort(request_id)
    harness.finish()
    outputs = {request_id: final_of(got) for request_id, got in items.items()}
    reasons = {request_id: out.finish_reason for request_id, out in outputs.items()}
    assert {i for i, reason in reasons.items() if reason is FinishReason.ABORT} == {"1", "8", "16"}
    assert all(out.error is None for out in outputs.values())
    pictures = [out for i, out in outputs.items() if "image" in kinds[int(i) % 6] and out.images]
    assert max(apart(pictures[0], other) for other in pictures) <= 1
    texts = {out.text for i, out in outputs.items() if "text" in kinds[int(i) % 6] and i not in ("1", "8", "16")}
    assert len(texts) == 1


def test_a_text_request_overtakes_long_clips(loaded: EngineParts) -> None:
    harness = PipelineHarness(loaded)
    clips = [harness.submit(f"clip{i}", [{"role": "user", "content": [long_sound(i)]}], THINK) for i in range(3)]
    harness.turns(1)
    written = harness.submit("text", say("Hello!"), {"think": {**GREEDY, "max_tokens": 1}})
    while not any(item.final for item in written):
        harness.turns(1)
    assert not any(item.final for items in clips for item in items)
    heard = loaded.stages["hear"].stats().running
    assert heard >= 2, "most of the sound is still to be heard"
    harness.finish()
    assert [final_of(items).error for items in clips] == [None, None, None]


def test_an_abort_between_the_pieces_of_a_clip_frees_its_place(loaded: EngineParts) -> None:
    harness = PipelineHarness(loaded)
    hear = loaded.stages["hear"]
    items = harness.submit("clip", [{"role": "user", "content": [long_sound(9)]}], THINK)
    harness.turns(1)
    assert hear.component._running  # type: ignore[attr-defined]
    harness.orchestrator.abort("clip")
    steps = hear.stats().steps
    harness.finish()
    assert final_of(items).finish_reason is FinishReason.ABORT
    assert hear.stats().steps == steps
    assert not hear.component._running  # type: ignore[attr-defined]


def long_sound(number: int) -> dict[str, object]:
    """Of four pieces or more, and different from the others."""
    return sound(seconds=61.0 + number)


def test_text_is_tokenized_before_the_stages(loaded: EngineParts, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = PipelineHarness(loaded)
    image: dict[str, Any] = {"modalities": ["image"]}
    params = {"think": GREEDY, "draw": {"steps": 1}}
    items = [
        harness.submit("chat", say("Hello!"), params),
        harness.submit("drawn", say("Hello!"), params, **image),
        harness.submit("bare", "Hello!", params),
        harness.submit("bare-drawn", "Hello!", params, **image),
    ]

    def refuse(self: object, *args: object) -> tuple[int, ...]:
        raise AssertionError("tokens are made in a stage")

    for name in ("encode", "encode_plain"):
        monkeypatch.setattr(PromptTokenizer, name, refuse)
    harness.finish()
    assert [final_of(got).error for got in items] == [None] * 4
    assert [final_of(got).usage.completion_tokens for got in items] == [8, 1, 8, 1]


def test_several_answers_to_one_question(omni: Omni) -> None:
    out = omni.chat(say("Hello!"), SamplingParams(n=3, max_tokens=4, temperature=1.0, seed=1))
    assert [len(answer.token_ids) for answer in out.outputs] == [4, 4, 4]
    assert len({answer.text for answer in out.outputs}) > 1


# ----------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"width": 64}, "width"),
        ({"height": 1024}, "height"),
        ({"negative_prompt": "people"}, "negative_prompt"),
        ({"strength": 0.5}, "strength"),
        ({"true_cfg": 2.0}, "true_cfg"),
        ({"num_frames": 8}, "num_frames"),
        ({"fps": 8.0}, "fps"),
        ({"max_sequence_length": 64}, "max_sequence_length"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_image_parameters_are_refused_by_name(omni: Omni, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        answered(omni, say("A fox."), asked, modalities=["image"])
    assert refused.value.param == param


def test_the_native_size_may_be_named(omni: Omni) -> None:
    out = answered(omni, say("A fox."), {"width": SIZE, "height": SIZE}, modalities=["image"])
    assert out.image is not None


def test_videos_and_unknown_voices_are_refused(omni: Omni) -> None:
    with pytest.raises(UnsupportedModalityError):
        omni.chat(say("Hello!"), modalities=["video"])
    with pytest.raises(InvalidRequestError, match="voice"):
        omni.chat(say("Hello!"), modalities=["audio"], voice="nobody")


@pytest.mark.parametrize("heard", [(), (sound(),)], ids=["text", "sound"])
def test_a_prompt_that_is_too_long_is_the_callers_error_before_any_work(loaded: EngineParts, heard: Any) -> None:
    harness = PipelineHarness(loaded)
    for prompt in (say("fox " * 5000, *heard), "fox " * 5000, {"prompt_token_ids": [1] * 5000}):
        with pytest.raises(PromptTooLongError) as refused:
            harness.submit("long", prompt, THINK)
        assert (refused.value.code, refused.value.status) == ("context_length_exceeded", 400)


def test_a_prompt_far_beyond_the_limit_is_not_tokenized(loaded: EngineParts, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, *args: object) -> tuple[int, ...]:
        raise AssertionError("tokens were made")

    for name in ("encode", "encode_plain"):
        monkeypatch.setattr(PromptTokenizer, name, refuse)
    harness = PipelineHarness(loaded)
    half = "x" * 180_000
    messages = [*say(half), {"role": "assistant", "content": "I see."}, *say(half, sound())]
    for prompt in (messages, messages[:1] * 2, half * 2):
        with pytest.raises(PromptTooLongError, match=r"36000\d characters"):
            harness.submit("long", prompt, THINK)


def test_audio_and_read_aloud_text_beyond_their_limits_are_refused_before_any_work(loaded: EngineParts) -> None:
    harness = PipelineHarness(loaded)
    hours = [{"role": "user", "content": [sound(seconds=301.0), sound(seconds=300.0)]}]
    with pytest.raises(LimitExceededError, match=r"601\.0 s of audio and at most 600 s"):
        harness.submit("long", hours, THINK)
    aloud = loaded.processor.read_aloud("x" * 4097)  # type: ignore[union-attr]
    with pytest.raises(LimitExceededError, match="4097 characters and at most 4096"):
        harness.submit("aloud", aloud, THINK, modalities=["audio"])


# ----------------------------------------------------------------------------------------------------- pictures


def test_images_depend_on_their_seed(omni: Omni) -> None:
    two = answered(omni, say("A fox."), {"n": 2, "seed": 11}, modalities=["image"])
    first, second, again = (
        answered(omni, say("A fox."), {"seed": seed}, modalities=["image"]) for seed in (11, 12, 12)
    )
    assert len(two.images) == 2
    assert apart(two, first) <= 1
    assert apart(first, second) > 10
    two.images.reverse()
    assert apart(two, second) <= 1
    assert apart(second, again) == 0


def test_every_image_parameter_matters(omni: Omni) -> None:
    dials: list[dict[str, Any]] = [{}, {"guidance": 1.0}, {"guidance": 7.0}, {"steps": 3}, {"seed": 5}]
    drawn = [answered(omni, say("A fox."), dial, modalities=["image"]).image for dial in dials]
    seen = {image.pixels.tobytes() for image in drawn if image is not None}
    assert len(seen) == len(dials)


def test_without_guidance_the_unconditional_row_is_not_computed(loaded: EngineParts) -> None:
    harness = PipelineHarness(loaded)
    rows = {}
    for guidance in (1.0, 4.0):
        before = loaded.stages["draw"].stats().extra["rows"]
        params = {"draw": DiffusionParams(steps=3, seed=1, guidance=guidance)}
        items = harness.submit(f"g{guidance}", say("A fox."), params, modalities=["image"])
        harness.finish()
        assert final_of(items).error is None
        rows[guidance] = loaded.stages["draw"].stats().extra["rows"] - before
    assert rows == {1.0: 3, 4.0: 6}


def _forwards(parts: EngineParts) -> float:
    return float(parts.stages["draw"].stats().extra["forwards"])


# ------------------------------------------------------------------------------------------------- the name alone


def test_a_starter_that_was_not_pulled_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="omnistage pull starter") as refused:
        find_model("starter", REGISTRY)
    assert refused.value.param == "model"


def test_a_pulled_starter_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    store = Store.of(STARTER)
    for part in store.manifest.parts:
        if part.without is None:
            store.folder(part).mkdir(parents=True, exist_ok=True)
            store.licences(part).mkdir(parents=True)
            (store.folder(part) / part.files[0].name).write_bytes(b"weights")
            store.write_receipt(part, [part.files[0].name])
    with pytest.raises(CheckpointError, match="omnistage pull starter"):
        find_model("starter", REGISTRY)  # interrupted before its last file
    (store.root / "config.json").write_text("{}", encoding="utf-8")
    assert find_model("starter", REGISTRY) == store.root


def test_a_model_in_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "starter").mkdir()
    with pytest.raises(CheckpointError, match="omnistage pull starter"):
        find_model("starter", REGISTRY)  # any other folder, like `starter` in a clone, does not hide the bundle
    assert find_model("./starter/", REGISTRY) == (tmp_path / "starter").resolve()
    (tmp_path / "starter" / "config.json").write_text("{}", encoding="utf-8")
    assert find_model("starter", REGISTRY) == (tmp_path / "starter").resolve()


# ------------------------------------------------------------------------------------------------- the real weights


@pytest.fixture(scope="module")
def real() -> Iterator[Omni]:
    try:
        folder = find_model("starter", REGISTRY)
    except CheckpointError as error:
        pytest.skip(f"the real parts are not here: {error}")
    with Omni(str(folder), progress=False) as omni:
        yield omni


@pytest.mark.real_weights
def test_the_real_starter_answers_speaks_and_draws(real: Omni) -> None:
    asked = say("What is the capital of France?")
    params: dict[str, Any] = {"think": {**GREEDY, "max_tokens": 60}, "draw": {"seed": 1, "steps": 8}}
    out = real.chat(asked, params, modalities=["text", "audio", "image"])
    assert out.error is None
    assert "Paris" in out.text
    assert out.audio is not None
    assert out.audio.seconds > 1
    assert out.image is not None
    assert out.image.pixels.shape == (SIZE, SIZE, 3)


@pytest.mark.real_weights
def test_the_real_starter_speaks_before_its_answer_ends(real: Omni) -> None:
    params = {"think": {**GREEDY, "max_tokens": 120}}
    out = real.chat(say("Tell me a story about a fox and a river."), params, modalities=["text", "audio"])
    assert out.trace is not None
    stages = out.trace.stages
    first, last = stages["speak"].first_chunk, stages["think"].last_chunk
    assert first is not None
    assert last is not None
    assert first < last


@pytest.mark.real_weights
def test_the_real_starter_transcribes_its_own_speech(real: Omni) -> None:
    if Modality.AUDIO not in real.processor.input_modalities:
        pytest.skip("this starter has no speech recognition: it was pulled without npm")
    text = "What is the capital of France?"
    spoken = real.chat(real.processor.read_aloud(text), modalities=["audio"]).audio  # type: ignore[union-attr]
    assert spoken is not None
    asked = [{"role": "user", "content": [{"type": "audio", "audio": (spoken.samples, spoken.sample_rate)}]}]
    out = real.chat(asked, {"think": {**GREEDY, "max_tokens": 60}})
    assert "Paris" in out.text


def test_spoken_turns_reuse_the_conversation_before_them_and_drawings_do_not(starter: Path) -> None:
    """Speech reads text alone; a picture is drawn from hidden states, which the same message must always give."""
    with open_door(parts_of(starter)) as omni:
        think = omni.orchestrator.stages["think"]

        def hits(*modalities: str) -> float:
            before = think.stats().extra["prefix_hits"]
            omni.chat(chat, THINK, modalities=list(modalities))
            return think.stats().extra["prefix_hits"] - before

        chat = say("tell me about the cat and the bird, at length, in many words, again and again")
        hits("text", "audio")
        assert hits("text", "audio") > 0
        assert hits("text", "audio", "image") == 0
        assert hits("image") == 0
