"""Qwen2.5-Omni's processor: from parsed chats to token ids, media spans and what stages need of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from omnistage.core.cancellation import Cancellation, cancellation_scope
from omnistage.core.clips import AudioClip, VideoClip
from omnistage.core.errors import (
    CancelledRequestError,
    CheckpointError,
    DeadlineExceededError,
    InvalidRequestError,
    LimitExceededError,
    MediaError,
    PromptTooLongError,
)
from omnistage.core.messages import AudioPart, ChatMessage, ImagePart, Part, TextPart, VideoPart
from omnistage.core.types import ARInput, Modality, OmniTokensPrompt
from omnistage.models.qwen2_5_omni import tiny
from omnistage.models.qwen2_5_omni.processor import Qwen25OmniProcessor
from tests.hang_guard import HANG_SECONDS

VOCAB = 1296
IDS = tiny.special_ids(VOCAB)
IMAGE, AUDIO, VIDEO = IDS["<|IMAGE|>"], IDS["<|AUDIO|>"], IDS["<|VIDEO|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen") / "model"
    tiny.write(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def processor(folder: Path) -> Qwen25OmniProcessor:
    return Qwen25OmniProcessor.load(folder)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def picture(seed: int = 0, width: int = 56, height: int = 56) -> ImagePart:
    return ImagePart(Image.fromarray(rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)))


def clip(seed: int = 0, seconds: float = 1.0, rate: int = 16_000) -> AudioClip:
    return AudioClip((0.1 * rng(seed).standard_normal(int(rate * seconds))).astype(np.float32), rate)


def film(seed: int = 0, frames: int = 4, fps: float = 2.0, audio: AudioClip | None = None) -> VideoPart:
    pixels = rng(seed).integers(0, 256, (frames, 56, 84, 3), dtype=np.uint8)
    return VideoPart(VideoClip(pixels, fps, frames / fps, audio), use_audio=audio is not None)


def ask(processor: Qwen25OmniProcessor, *parts: Part) -> ARInput:
    return processor.chat([ChatMessage("user", (*parts, TextPart("What is it?")))])


def places(made: ARInput, token: int) -> list[int]:
    return [index for index, found in enumerate(made.token_ids) if found == token]


# ------------------------------------------------------------------------------------------------- text


def test_a_chat_of_text_has_no_spans_and_ends_where_the_assistant_begins(processor: Qwen25OmniProcessor) -> None:
    made = ask(processor)
    assert (made.media, dict(made.context), made.embeds, made.positions) == ((), {}, None, None)
    text = processor._prompts.tokenizer.decode(made.token_ids)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("What is it?<|im_end|>\n<|im_start|>assistant\n")


def test_turns_keep_their_order_and_roles(processor: Qwen25OmniProcessor) -> None:
    made = processor.chat(
        [
            ChatMessage("system", (TextPart("Be brief."),)),
            ChatMessage("user", (TextPart("One"),)),
            ChatMessage("assistant", (TextPart("Two"),)),
            ChatMessage("user", (TextPart("Three"),)),
        ]
    )
    text = processor._prompts.tokenizer.decode(made.token_ids)
    assert [text.index(word) for word in ("Be brief.", "One", "Two", "Three")] == sorted(
        text.index(word) for word in ("Be brief.", "One", "Two", "Three")
    )
    assert text.count("<|im_start|>") == 5


@pytest.mark.parametrize("token", sorted(IDS))
def test_a_special_token_spelled_by_a_user_is_text(processor: Qwen25OmniProcessor, token: str) -> None:
    plain = [t for t in ask(processor).token_ids if t in IDS.values()]
    made = ask(processor, TextPart(f"a {token} b"))
    assert [t for t in made.token_ids if t in IDS.values()] == plain
    assert token in processor._prompts.tokenizer.decode(made.token_ids)
    assert IDS[token] not in processor.text(token).token_ids


def test_placeholders_spelled_beside_a_real_picture_do_not_take_its_rows(processor: Qwen25OmniProcessor) -> None:
    quiet = ask(processor, picture())
    sly = ask(processor, TextPart("<|IMAGE|><|vision_bos|>"), picture())
    assert len(places(sly, IMAGE)) == len(places(quiet, IMAGE))
    assert sly.media[0].positions.tolist() == places(sly, IMAGE)


def test_an_empty_prompt_is_refused(processor: Qwen25OmniProcessor) -> None:
    with pytest.raises(InvalidRequestError):
        processor.text("")


# ------------------------------------------------------------------------------------------------- media


@pytest.mark.parametrize(("width", "height"), [(56, 56), (140, 84), (30, 200)])
def test_a_picture_fills_one_row_per_merged_patch(processor: Qwen25OmniProcessor, width: int, height: int) -> None:
    made = ask(processor, picture(width=width, height=height))
    [span] = made.media
    grid = made.context["image_grid_thw"]
    assert span.kind is Modality.IMAGE
    assert span.positions.tolist() == places(made, IMAGE)
    assert len(span.positions) == int(grid.prod()) // 4
    assert span.inputs["pixel_values"].shape[0] == int(grid.prod())
    assert torch.equal(span.inputs["image_grid_thw"], grid)


def test_pictures_keep_their_order_and_share_no_rows(processor: Qwen25OmniProcessor) -> None:
    first, second = picture(1, 56, 56), picture(2, 112, 84)
    made = ask(processor, first, second)
    assert len(made.media) == 2
    one, two = (span.positions.tolist() for span in made.media)
    assert [*one, *two] == places(made, IMAGE)
    assert [span.key for span in made.media] == [ask(processor, p).media[0].key for p in (first, second)]


@pytest.mark.parametrize("seconds", [0.1, 0.5, 1.0, 3.21, 29.9])
def test_sound_fills_a_row_every_40_ms(processor: Qwen25OmniProcessor, seconds: float) -> None:
    made = ask(processor, AudioPart(clip(seconds=seconds)))
    [span] = made.media
    assert span.kind is Modality.AUDIO
    assert span.positions.tolist() == places(made, AUDIO)
    assert len(span.positions) == pytest.approx(seconds * 25, abs=1.5)
    frames = int(made.context["audio_seqlens"])
    # Only what was said is handed on, not the padding to the extractor's full length.
    assert span.inputs["input_features"].shape == (1, 128, frames)
    assert span.inputs["feature_attention_mask"].all()


def test_a_video_fills_rows_for_pairs_of_frames(processor: Qwen25OmniProcessor) -> None:
    made = ask(processor, film(frames=6))
    [span] = made.media
    assert span.kind is Modality.VIDEO
    assert span.positions.tolist() == places(made, VIDEO)
    assert int(made.context["video_grid_thw"][0, 0]) == 3
    assert made.context["video_second_per_grid"].tolist() == [1.0]
    assert not bool(made.context["use_audio_in_video"])
    assert not places(made, AUDIO)


def test_sound_of_a_video_is_interleaved_with_it(processor: Qwen25OmniProcessor) -> None:
    made = ask(processor, film(frames=12, audio=clip(seconds=6.0)))
    spans = {span.kind: span.positions.tolist() for span in made.media}
    assert spans == {Modality.VIDEO: places(made, VIDEO), Modality.AUDIO: places(made, AUDIO)}
    assert bool(made.context["use_audio_in_video"])
    # Chunks of two seconds take turns, so neither lies wholly before the other.
    assert min(spans[Modality.AUDIO]) < max(spans[Modality.VIDEO])
    assert min(spans[Modality.VIDEO]) < max(spans[Modality.AUDIO])


def test_every_video_keeps_its_own_frame_rate(processor: Qwen25OmniProcessor) -> None:
    made = ask(processor, film(1, fps=2.0), film(2, fps=0.5))
    assert made.context["video_second_per_grid"].tolist() == [1.0, 4.0]


def test_media_of_all_kinds_share_a_chat(processor: Qwen25OmniProcessor) -> None:
    made = ask(processor, AudioPart(clip()), picture(), film(), picture(3))
    kinds = [span.kind for span in made.media]
    assert sorted(kinds) == ["audio", "image", "image", "video"]
    filled = sorted(row for span in made.media for row in span.positions.tolist())
    assert filled == sorted(places(made, IMAGE) + places(made, AUDIO) + places(made, VIDEO))


# -------------------------------------------------------------------------------------------------- keys


def keys(made: ARInput) -> list[bytes]:
    return [span.key for span in made.media]


def test_equal_content_has_equal_keys_wherever_it_stands(processor: Qwen25OmniProcessor) -> None:
    for make in (lambda: picture(1), lambda: AudioPart(clip(1)), lambda: film(1)):
        alone = keys(ask(processor, make()))
        assert keys(ask(processor, TextPart("Before that:"), make())) == alone
    twice = keys(ask(processor, picture(1), picture(1)))
    assert twice[0] == twice[1]


def test_other_content_has_other_keys(processor: Qwen25OmniProcessor) -> None:
    given: list[Part] = [
        picture(1),
        picture(2),
        picture(1, width=84),
        AudioPart(clip(1)),
        AudioPart(clip(2)),
        AudioPart(clip(1, seconds=1.5)),
        film(1),
        film(2),
        film(1, fps=1.0),
    ]
    found = [keys(ask(processor, part))[0] for part in given]
    assert len(set(found)) == len(given)


def test_one_pixel_and_one_sample_count(processor: Qwen25OmniProcessor) -> None:
    pixels = np.asarray(picture(1).image).copy()
    pixels[20, 20] ^= 128
    assert keys(ask(processor, ImagePart(Image.fromarray(pixels)))) != keys(ask(processor, picture(1)))
    samples = clip(1).samples.copy()
    samples[5000] += 0.5
    assert keys(ask(processor, AudioPart(AudioClip(samples, 16_000)))) != keys(ask(processor, AudioPart(clip(1))))


# ----------------------------------------------------------------------------------------------- refusals


def test_videos_with_and_without_sound_cannot_share_a_chat(processor: Qwen25OmniProcessor) -> None:
    with pytest.raises(InvalidRequestError, match="use_audio_in_video"):
        ask(processor, film(1, audio=clip(seconds=2.0)), film(2))


def test_sound_longer_than_the_model_hears_is_refused_rather_than_cut(processor: Qwen25OmniProcessor) -> None:
    ask(processor, AudioPart(clip(seconds=30.0)))
    with pytest.raises(LimitExceededError, match="30 s"):
        ask(processor, AudioPart(clip(seconds=30.01)))
    with pytest.raises(LimitExceededError, match="30 s"):
        ask(processor, film(audio=clip(seconds=31.0)))


def test_sound_too_short_to_be_heard_is_refused(processor: Qwen25OmniProcessor) -> None:
    assert len(ask(processor, AudioPart(clip(seconds=0.03))).media[0].positions) == 1
    for given in (AudioPart(clip(seconds=0.015)), film(audio=clip(seconds=0.015))):
        with pytest.raises(MediaError, match="30 ms"):
            ask(processor, picture(), given)


def test_sound_of_another_rate_is_refused(processor: Qwen25OmniProcessor) -> None:
    with pytest.raises(InvalidRequestError, match="16000"):
        ask(processor, AudioPart(clip(rate=24_000)))


def test_what_the_stock_processor_refuses_is_an_error_of_ours(
    processor: Qwen25OmniProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any, **_options: Any) -> Any:
        raise ValueError("no such thing")

    monkeypatch.setattr(processor.items, "_processor", _Wrapped(processor._processor, refuse))
    with pytest.raises(MediaError, match="no such thing"):
        ask(processor, picture())


class _Wrapped:
    def __init__(self, inner: Any, call: Any) -> None:
        self._inner, self._call = inner, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._call(*args, **options)


@pytest.mark.parametrize("token", [IMAGE, AUDIO, VIDEO])
def test_placeholders_among_given_tokens_are_refused(processor: Qwen25OmniProcessor, token: int) -> None:
    with pytest.raises(InvalidRequestError, match="placeholders"):
        processor.tokens(OmniTokensPrompt((1, token, 2)))
    assert processor.tokens(OmniTokensPrompt((1, 2))).token_ids == (1, 2)


def test_embeddings_of_the_thinker_width_are_taken(processor: Qwen25OmniProcessor) -> None:
    assert processor.tokens(OmniTokensPrompt(prompt_embeds=torch.zeros(3, 64))).token_ids == (0, 0, 0)
    with pytest.raises(InvalidRequestError, match=r"\[n, 64\]"):
        processor.tokens(OmniTokensPrompt(prompt_embeds=torch.zeros(3, 65)))


@pytest.mark.parametrize("make_error", [StopIteration, ValueError, partial(ValueError, "too small")])
def test_media_that_the_processor_does_not_take_are_refused_with_a_reason(
    processor: Qwen25OmniProcessor, make_error: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise make_error()

    monkeypatch.setattr(type(processor._processor), "__call__", refuse)
    with pytest.raises(MediaError, match=r"cannot take these media: (StopIteration|ValueError|too small)"):
        ask(processor, picture())


# -------------------------------------------------------------------------------------- size and deadline


def blank_film(frames: int, height: int, width: int) -> VideoPart:
    """Of one frame's memory, however many there are."""
    pixels = np.broadcast_to(np.zeros((1, height, width, 3), np.uint8), (frames, height, width, 3))
    return VideoPart(VideoClip(pixels, 2.0, frames / 2), use_audio=False)


def test_rows_of_images_and_videos_are_known_from_their_sizes(processor: Qwen25OmniProcessor) -> None:
    images = [picture(width=w, height=h) for w, h in ((56, 56), (30, 200), (641, 479), (1, 150), (1000, 333))]
    films = [blank_film(*shape) for shape in ((1, 56, 84), (5, 480, 641), (2, 1080, 1920), (4, 20, 300))]
    made = ask(processor, *images, *films)
    assert (
        processor._image_tokens([part.image for part in images])
        == (made.context["image_grid_thw"].prod(-1) // 4).tolist()
    )
    assert (
        processor._video_tokens([part.clip for part in films])
        == (made.context["video_grid_thw"].prod(-1) // 4).tolist()
    )


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([blank_film(1600, 56, 84)], id="frames"),
        pytest.param([blank_film(400, 56, 84)] * 2, id="videos"),
        pytest.param([ImagePart(Image.new("RGB", (700, 700)))] * 600, id="pixels"),
    ],
)
def test_media_that_cannot_fit_are_refused_before_they_are_converted(
    processor: Qwen25OmniProcessor, parts: list[Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_options: object) -> None:
        pytest.fail("the media were converted")

    monkeypatch.setattr(type(processor._processor), "__call__", fail)
    with pytest.raises(PromptTooLongError, match="tokens of media"):
        ask(processor, *parts)


def test_a_picture_too_narrow_for_the_processor_is_refused_with_its_reason(processor: Qwen25OmniProcessor) -> None:
    with pytest.raises(MediaError, match="cannot take these media: absolute aspect ratio"):
        ask(processor, ImagePart(Image.new("RGB", (1000, 2))))


def test_a_request_that_waits_for_the_processor_ends_when_it_is_cancelled(processor: Qwen25OmniProcessor) -> None:
    cancellation = Cancellation()

    def work() -> None:
        with cancellation_scope(cancellation):
            ask(processor, picture())

    with ThreadPoolExecutor(1) as pool, processor._lock:
        waiting = pool.submit(work)
        assert not waiting.done()
        cancellation.cancel()
        with pytest.raises(CancelledRequestError):
            waiting.result(HANG_SECONDS)
    ask(processor, picture())  # the lock was left as it was


def test_a_request_past_its_deadline_does_not_reach_the_processor(
    processor: Qwen25OmniProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_options: object) -> None:
        pytest.fail("the media were converted")

    monkeypatch.setattr(type(processor._processor), "__call__", fail)
    with cancellation_scope(Cancellation(time.monotonic() - 1)), pytest.raises(DeadlineExceededError):
        ask(processor, picture())


# ------------------------------------------------------------------------------------------------ loading


def test_voices_come_from_the_checkpoint(processor: Qwen25OmniProcessor) -> None:
    assert sorted(processor.voices()) == ["Chelsie", "Ethan"]
    assert processor.input_modalities == {Modality.TEXT, Modality.IMAGE, Modality.AUDIO, Modality.VIDEO}


def test_a_folder_without_a_processor_is_an_error_of_ours(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError):
        Qwen25OmniProcessor.load(tmp_path)


def test_threads_do_not_disturb_each_other(processor: Qwen25OmniProcessor) -> None:
    chats: list[tuple[Part, ...]] = [(picture(1),), (AudioPart(clip(1)),), (TextPart("<|im_end|>"),), (film(1),)]
    alone = [ask(processor, *parts) for parts in chats]
    barrier = threading.Barrier(len(chats))

    def work(index: int) -> list[ARInput]:
        barrier.wait(HANG_SECONDS)
        return [ask(processor, *chats[index]) for _ in range(3)]

    with ThreadPoolExecutor(len(chats)) as pool:
        for expected, found in zip(alone, pool.map(work, range(len(chats))), strict=True):
            assert [made.token_ids for made in found] == [expected.token_ids] * 3
            assert [keys(made) for made in found] == [keys(expected)] * 3
