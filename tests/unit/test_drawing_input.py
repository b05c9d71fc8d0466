"""What a drawing pipeline is given and gives: prompts with pictures, shared parameters, outputs, the command line."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from omnistage.cli import app, drawing
from omnistage.core.errors import InvalidRequestError, LimitExceededError, MediaError, OmniError
from omnistage.core.params import CodecParams, DiffusionParams, SamplingParams, StageParams
from omnistage.core.types import (
    AudioChunk,
    FinishReason,
    ImageChunk,
    Modality,
    OmniTokensPrompt,
    Progress,
    StageChunk,
    TokenChunk,
    VideoChunk,
)
from omnistage.media.image_output import ImageOutput, read_metadata
from omnistage.media.limits import MediaLimits
from omnistage.media.video_output import VideoOutput
from omnistage.pipeline.messages.drawing import parse_drawing
from omnistage.pipeline.output_assembler import OutputAssembler, OutputBuffer
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk, Trace, Usage
from omnistage.pipeline.request import spread

LIMITS = MediaLimits()


def pixels(width: int = 8, height: int = 6, value: int = 100) -> np.ndarray:
    return np.full((height, width, 3), value, np.uint8)


def png(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


# -------------------------------------------------------------------------------------------------- prompts


def test_a_text_is_a_prompt_as_it_is() -> None:
    parsed = parse_drawing("  a cat\n", LIMITS)
    assert (parsed.prompt, parsed.images, parsed.mask) == ("  a cat\n", (), None)


@pytest.mark.parametrize("kind", ["array", "Pillow", "bytes", "path"])
def test_a_picture_may_come_in_any_form(kind: str, tmp_path: Path) -> None:
    array = pixels()
    path = tmp_path / "in.png"
    path.write_bytes(png(array))
    source = {"array": array, "Pillow": Image.fromarray(array), "bytes": png(array), "path": str(path)}[kind]
    parsed = parse_drawing({"prompt": "a cat", "image": source}, LIMITS)
    (image,) = parsed.images
    assert image.dtype == np.uint8
    np.testing.assert_array_equal(image, array)


def test_pictures_keep_their_order_and_the_mask_has_one_plane() -> None:
    mask = pixels(value=0)
    mask[:3] = 255
    given = {"prompt": "a cat", "images": [pixels(value=1), pixels(4, 4, value=2)], "mask": mask}
    parsed = parse_drawing(given, LIMITS)
    assert [int(image[0, 0, 0]) for image in parsed.images] == [1, 2]
    assert parsed.mask is not None
    np.testing.assert_array_equal(parsed.mask, mask[:, :, 0])


def test_a_chat_draws_its_last_user_message() -> None:
    messages = [
        {"role": "user", "content": "a dog"},
        {"role": "assistant", "content": "Here it is."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a cat"},
                {"type": "image", "image": pixels(value=9)},
                {"type": "text", "text": "on a mat"},
            ],
        },
    ]
    parsed = parse_drawing(messages, LIMITS)
    assert parsed.prompt == "a cat\non a mat"
    assert [int(image[0, 0, 0]) for image in parsed.images] == [9]


SOUND = {"type": "audio", "audio": (np.zeros(1600, np.float32), 16_000)}
BAD: dict[str, tuple[object, type[OmniError], str]] = {
    "empty": ("", InvalidRequestError, "prompt"),
    "blank": (" \n\t", InvalidRequestError, "prompt"),
    "half a surrogate pair": ("a \ud800 cat", InvalidRequestError, "prompt"),
    "a number": (5, InvalidRequestError, "prompt"),
    "nothing": (None, InvalidRequestError, "prompt"),
    "tokens": (OmniTokensPrompt((1, 2)), InvalidRequestError, "prompt"),
    "over-long": ("a" * 101, LimitExceededError, "prompt"),
    "a mapping without a text": ({"image": pixels()}, InvalidRequestError, "prompt"),
    "a mapping with a number": ({"prompt": 5}, InvalidRequestError, "prompt"),
    "a mapping with a blank text": ({"prompt": " "}, InvalidRequestError, "prompt"),
    "an unknown key": ({"prompt": "a cat", "picture": pixels()}, InvalidRequestError, "prompt"),
    "a key that is no text": ({"prompt": "a cat", 5: pixels()}, InvalidRequestError, "prompt"),
    "image and images": ({"prompt": "a cat", "image": pixels(), "images": []}, InvalidRequestError, "image"),
    "images that are one": ({"prompt": "a cat", "images": pixels()}, InvalidRequestError, "images"),
    "images that are text": ({"prompt": "a cat", "images": "cat.png"}, InvalidRequestError, "images"),
    "corrupt image": ({"prompt": "a cat", "image": b"this is no image"}, MediaError, "image"),
    "truncated image": ({"prompt": "a cat", "image": png(pixels(20, 20))[:-30]}, MediaError, "image"),
    "a corrupt one of two": ({"prompt": "a cat", "images": [pixels(), b"no image"]}, MediaError, "images.1"),
    "an image that is a number": ({"prompt": "a cat", "image": 5}, OmniError, "image"),
    "too many images": ({"prompt": "a cat", "images": [b"no image"] * 5}, LimitExceededError, "images"),
    "too large an image": ({"prompt": "a cat", "image": pixels(41, 25)}, LimitExceededError, "image"),
    "too large together": ({"prompt": "a cat", "images": [pixels(30, 30)] * 3}, LimitExceededError, "images.2"),
    "mask without image": ({"prompt": "a cat", "mask": pixels()}, InvalidRequestError, "mask"),
    "wrong-size mask": (
        {"prompt": "a cat", "image": pixels(8, 6), "mask": pixels(6, 8)},
        InvalidRequestError,
        "mask",
    ),
    "corrupt mask": ({"prompt": "a cat", "image": pixels(), "mask": b"no mask"}, MediaError, "mask"),
    "empty chat": ([], InvalidRequestError, "messages"),
    "a chat without a user": ([{"role": "system", "content": "Draw."}], InvalidRequestError, "messages"),
    "a chat of a picture alone": (
        [{"role": "user", "content": [{"type": "image", "image": pixels()}]}],
        InvalidRequestError,
        "prompt",
    ),
    "audio in a chat": (
        [{"role": "user", "content": [{"type": "text", "text": "draw"}, SOUND]}],
        InvalidRequestError,
        "messages",
    ),
    "a corrupt image in a chat": (
        [{"role": "user", "content": [{"type": "text", "text": "draw"}, {"type": "image", "image": b"no"}]}],
        MediaError,
        "messages[0].content[1].image",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_drawn_is_refused_by_name(case: str) -> None:
    prompt, error, param = BAD[case]
    limits = MediaLimits(max_text_chars=100, max_items=4, max_image_pixels=1000, max_total_pixels=2000)
    with pytest.raises(OmniError) as caught:
        parse_drawing(prompt, limits)
    assert error is OmniError or type(caught.value) is error
    assert caught.value.param == param
    assert 400 <= caught.value.status < 500
    assert len(str(caught.value)) < 400


def test_a_wrong_mask_is_told_both_sizes() -> None:
    with pytest.raises(InvalidRequestError, match="has 6x8 pixels and the image 8x6"):
        parse_drawing({"prompt": "a cat", "image": pixels(8, 6), "mask": pixels(6, 8)}, LIMITS)


# ---------------------------------------------------------------------------------------- shared parameters

DRAWING_TYPES: Mapping[str, type[StageParams]] = dict.fromkeys(("encode", "denoise", "decode"), DiffusionParams)


def test_parameters_of_a_shared_type_reach_every_stage_that_takes_it() -> None:
    params = DiffusionParams(steps=3)
    assert spread({"encode": params}, DRAWING_TYPES) == dict.fromkeys(DRAWING_TYPES, params)


def test_parts_given_to_several_stages_become_one_set_the_later_stage_winning() -> None:
    given = {
        "denoise": DiffusionParams(steps=5, guidance=2.0),
        "encode": DiffusionParams(steps=3, width=64),
        "decode": DiffusionParams(n=1),
    }
    one = DiffusionParams(width=64, steps=5, guidance=2.0, n=1)
    result = spread(given, DRAWING_TYPES)
    assert result == dict.fromkeys(DRAWING_TYPES, one)
    assert result["encode"].model_fields_set == {"width", "steps", "guidance", "n"}


def test_a_field_that_was_not_set_does_not_override_one_that_was() -> None:
    result = spread({"encode": DiffusionParams(n=4), "denoise": DiffusionParams(steps=2)}, DRAWING_TYPES)
    assert result["decode"] == DiffusionParams(n=4, steps=2)


def test_parameters_of_other_types_stay_with_their_stage() -> None:
    types = {"thinker": SamplingParams, "encode": DiffusionParams, "denoise": DiffusionParams, "vocoder": CodecParams}
    sampling, asked = SamplingParams(seed=1), DiffusionParams(seed=2)
    assert spread({"thinker": sampling, "denoise": asked}, types) == {
        "thinker": sampling,
        "encode": asked,
        "denoise": asked,
    }
    assert spread({"thinker": sampling}, types) == {"thinker": sampling}
    assert spread({}, types) == {}


def test_only_parameters_that_say_so_are_shared() -> None:
    types = {"thinker": SamplingParams, "talker": SamplingParams}
    assert spread({"thinker": SamplingParams(seed=1)}, types) == {"thinker": SamplingParams(seed=1)}


# -------------------------------------------------------------------------------------------------- outputs


def assembler(**modalities: Modality) -> OutputAssembler:
    stages = modalities or {"decode": Modality.IMAGE}
    return OutputAssembler("r", stages, 1, {"model": "m", "prompt": "a cat"})


def chunk(stage: str, payload: Any = None, finish: FinishReason | None = None) -> StageChunk:
    return StageChunk("r", stage, payload, finish=finish)


def ended(made: OutputAssembler, reason: FinishReason = FinishReason.STOP) -> OmniRequestOutput:
    item = made.final(reason, None, Usage(), Trace("r", 0.0))
    assert item.final is not None
    assert item.modality is next(iter(made._modalities.values()))
    return item.final


def test_progress_is_passed_on_from_whatever_stage() -> None:
    made = assembler()
    item = made.add(chunk("denoise", Progress(2, 9)))
    assert item is not None
    assert (item.modality, item.progress, item.image) == (Modality.IMAGE, Progress(2, 9), None)
    assert made.add(chunk("encode")) is None
    assert made.add(chunk("denoise", finish=FinishReason.STOP)) is None


def test_previews_are_streamed_and_not_kept() -> None:
    made = assembler()
    shown = ImageChunk(pixels(), 0, preview=True, seed=3)
    item = made.add(chunk("decode", shown))
    assert item is not None
    assert item.image is shown
    assert ended(made, FinishReason.ABORT).images == []


def test_pictures_are_put_in_order_with_the_seed_of_each() -> None:
    made = assembler()
    for index in (2, 0, 1):
        item = made.add(chunk("decode", ImageChunk(pixels(value=index), index, seed=10 + index)))
        assert item is not None
        assert item.index == index
    output = ended(made)
    assert [int(image.pixels[0, 0, 0]) for image in output.images] == [0, 1, 2]
    assert [dict(image.metadata) for image in output.images] == [
        {"seed": 10 + index, "model": "m", "prompt": "a cat"} for index in range(3)
    ]
    assert output.image is output.images[0]
    assert output.usage.images == 3
    assert (output.videos, output.video, output.outputs, output.text) == ([], None, [], "")


def test_the_end_of_the_stream_is_told_with_the_last_picture() -> None:
    made = assembler()
    item = made.add(chunk("decode", ImageChunk(pixels()), FinishReason.STOP))
    assert item is not None
    assert item.finish_reason is FinishReason.STOP


def test_videos_carry_frame_rate_and_sound() -> None:
    made = assembler(decode=Modality.VIDEO)
    sound = AudioChunk(np.zeros(800, np.float32), 16_000)
    frames = np.stack([pixels()] * 8)
    item = made.add(chunk("decode", VideoChunk(frames, 16.0, 0, seed=4, audio=sound)))
    assert item is not None
    assert item.video is not None
    made.add(chunk("decode", VideoChunk(frames, 16.0, 1, preview=True)))
    output = ended(made)
    assert output.video is output.videos[0]
    assert len(output.videos) == 1
    assert (output.videos[0].fps, output.videos[0].metadata["seed"]) == (16.0, 4)
    assert output.videos[0].audio is not None
    assert output.videos[0].audio.sample_rate == 16_000
    assert output.usage.video_seconds == 0.5


def test_a_model_that_writes_and_draws_gives_both() -> None:
    made = assembler(thinker=Modality.TEXT, decode=Modality.IMAGE)
    made.add(chunk("thinker", TokenChunk((1,), "Here:"), FinishReason.STOP))
    made.add(chunk("decode", ImageChunk(pixels())))
    output = ended(made)
    assert output.text == "Here:"
    assert len(output.images) == 1


def test_pictures_that_were_not_asked_for_are_not_given() -> None:
    made = assembler(thinker=Modality.TEXT)
    assert made.add(chunk("decode", ImageChunk(pixels()))) is None
    assert ended(made).images == []


def test_nothing_is_added_after_the_end() -> None:
    made = assembler()
    ended(made)
    assert made.add(chunk("denoise", Progress(1, 2))) is None
    assert made.add(chunk("decode", ImageChunk(pixels()))) is None


def test_a_slow_reader_gets_the_last_progress_and_the_last_picture_of_each() -> None:
    buffer = OutputBuffer(2)

    def put(**values: Any) -> None:
        buffer.put(OutputChunk("r", Modality.IMAGE, **values))

    for step in range(5):
        put(progress=Progress(step, 9))
        put(image=ImageChunk(pixels(value=step), 0, preview=True))
        put(index=1, image=ImageChunk(pixels(value=100 + step), 1, preview=True))
    put(index=1, image=ImageChunk(pixels(value=7), 1), finish_reason=FinishReason.STOP)
    items = buffer.pop_all()
    latest = {item.index: item for item in items}
    assert len(items) <= 4
    assert [item.progress for item in items if item.progress is not None][-1] == Progress(4, 9)
    assert latest[0].image is not None
    assert int(latest[0].image.pixels[0, 0, 0]) == 4
    assert latest[1].image is not None
    assert (int(latest[1].image.pixels[0, 0, 0]), latest[1].image.preview) == (7, False)
    assert latest[1].finish_reason is FinishReason.STOP


# --------------------------------------------------------------------------------------------- command line

runner = CliRunner()


def run(*arguments: object, code: int = 0) -> Any:
    result = runner.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@dataclass
class FakeOmni:
    """Stands in for the front door, draws `n` grey pictures, and remembers what it was asked."""

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.IMAGE,)
    asked: list[tuple[object, Any]] = field(default_factory=list)
    loaded: dict[str, Any] = field(default_factory=dict)
    videos: bool = False
    processor: None = None

    def __call__(self, model: str, **options: object) -> FakeOmni:
        self.loaded = options
        return self

    def __enter__(self) -> FakeOmni:
        stages = {name: SimpleNamespace(params_type=kind) for name, kind in DRAWING_TYPES.items()}
        self.orchestrator = SimpleNamespace(stages=stages)
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def generate(self, prompt: object, params: Any, **options: object) -> list[OmniRequestOutput]:
        self.asked.append((prompt, params))
        output = OmniRequestOutput("r", finish_reason=FinishReason.STOP)
        asked = params.get("encode", DiffusionParams())
        for index in range(asked.n):
            metadata = {"seed": index, "prompt": "a cat"}
            if self.videos:
                output.videos.append(VideoOutput(np.stack([pixels(16, 16)] * 4), 8.0, None, metadata))
            else:
                output.images.append(ImageOutput(pixels(value=50 + index), metadata))
        return [output]


@pytest.fixture
def omni(monkeypatch: pytest.MonkeyPatch) -> FakeOmni:
    fake = FakeOmni()
    module = ModuleType("omnistage.omni")
    module.Omni = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "omnistage.omni", module)
    return fake


def test_the_options_become_the_request(omni: FakeOmni, tmp_path: Path) -> None:
    source, mask = tmp_path / "in.png", tmp_path / "mask.png"
    source.write_bytes(png(pixels()))
    mask.write_bytes(png(pixels()))
    options = {"width": 64, "height": 32, "steps": 4, "guidance": 3.5, "true-cfg": 2.0, "seed": 9, "n": 2}
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    more = ["--negative-prompt", "blurry", "--strength", 0.5, "--mask", mask, "--cache", "first_block:0.1"]
    run("generate", "m", "a cat", "--image", source, "--out", tmp_path / "out", *flags, *more)
    [(prompt, params)] = omni.asked
    assert prompt == {"prompt": "a cat", "images": [str(source)], "mask": str(mask)}
    wanted = {name.replace("-", "_"): value for name, value in options.items()}
    assert params == {"encode": DiffusionParams(**wanted, negative_prompt="blurry", strength=0.5)}
    assert omni.loaded["overrides"] == ("denoise.cache=first_block:0.1",)


def test_nothing_asked_is_nothing_set(omni: FakeOmni, tmp_path: Path) -> None:
    run("generate", "m", "a cat", "--out", tmp_path)
    assert omni.asked == [({"prompt": "a cat"}, {})]
    assert omni.loaded["overrides"] == ()


@pytest.mark.parametrize(("ending", "kind"), [("png", "PNG"), ("jpg", "JPEG"), ("webp", "WEBP"), ("PNG", "PNG")])
def test_pictures_are_written_in_the_format_asked_for(omni: FakeOmni, tmp_path: Path, ending: str, kind: str) -> None:
    result = run("generate", "m", "a cat", "--format", ending, "--out", tmp_path)
    path = tmp_path / f"picture.{ending.lower()}"
    with Image.open(path) as image:
        assert (image.format, image.size) == (kind, (8, 6))
    assert read_metadata(path) == {"seed": 0, "prompt": "a cat"}
    assert f"wrote {path}" in result.stderr
    assert result.stdout == ""


def test_metadata_can_be_left_out(omni: FakeOmni, tmp_path: Path) -> None:
    run("generate", "m", "a cat", "--no-metadata", "--n", 2, "--contact-sheet", "--out", tmp_path)
    for path in tmp_path.iterdir():
        assert read_metadata(path) == {}
        assert b"a cat" not in path.read_bytes()


def test_several_pictures_are_numbered_and_may_have_a_contact_sheet(omni: FakeOmni, tmp_path: Path) -> None:
    run("generate", "m", "a cat", "--n", 3, "--contact-sheet", "--out", tmp_path / "some" / "where")
    written = sorted(path.name for path in (tmp_path / "some" / "where").iterdir())
    assert written == ["contact-sheet.png", "picture-0.png", "picture-1.png", "picture-2.png"]
    with Image.open(tmp_path / "some" / "where" / "picture-2.png") as image:
        assert image.getpixel((0, 0)) == (52, 52, 52)
    with Image.open(tmp_path / "some" / "where" / "contact-sheet.png") as sheet:
        assert sheet.width > 16
        assert {50, 51, 52} <= set(np.asarray(sheet).ravel().tolist())


def test_one_picture_has_no_contact_sheet(omni: FakeOmni, tmp_path: Path) -> None:
    run("generate", "m", "a cat", "--contact-sheet", "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


def test_without_a_folder_pictures_go_to_out(omni: FakeOmni, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("generate", "m", "a cat")
    assert (tmp_path / "out" / "picture.png").is_file()


def test_videos_are_written_as_mp4(omni: FakeOmni, tmp_path: Path) -> None:
    pytest.importorskip("av")
    omni.videos = True
    run("generate", "m", "a cat", "--n", 2, "--out", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["video-0.mp4", "video-1.mp4"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--format", "bmp"], "--format: must be one of png, jpg, webp, got 'bmp'"),
        (["--steps", "0"], "steps: "),
        (["--steps", "10000"], "steps: "),
        (["--guidance", "nan"], "guidance: "),
        (["--n", "1000"], "n: "),
        (["--width", "3"], "width: "),
        (["--strength", "2"], "strength: "),
        (["--seed", "-1"], "seed: "),
    ],
)
def test_mistakes_are_told_before_the_model_is_loaded(omni: FakeOmni, arguments: list[str], says: str) -> None:
    result = run("generate", "m", "a cat", *arguments, code=2)
    assert says in result.stderr
    assert "Traceback" not in result.output
    assert omni.loaded == {}


def test_sampling_options_go_to_the_stage_that_samples_and_drawing_ones_to_the_first_that_draws() -> None:
    stages = {"thinker": SamplingParams, "encode": DiffusionParams, "denoise": DiffusionParams}
    made = {name: SimpleNamespace(params_type=kind) for name, kind in stages.items()}
    door: Any = SimpleNamespace(orchestrator=SimpleNamespace(stages=made))
    sampling, asked = SamplingParams(seed=1), DiffusionParams(seed=1)
    assert drawing.stage_params(door, sampling, asked) == {"thinker": sampling, "encode": asked}
    assert drawing.stage_params(door, None, None) == {}


@pytest.mark.parametrize(
    ("gives", "wanted", "expected"),
    [
        (["image"], None, True),
        (["video"], None, True),
        (["text", "image"], None, False),
        (["text", "image"], ["image"], True),
        (["text", "image"], ["text", "image"], False),
        (["text"], None, False),
    ],
)
def test_a_request_draws_if_only_pictures_come_of_it(gives: list[str], wanted: Any, expected: bool) -> None:
    door: Any = SimpleNamespace(modalities=tuple(Modality(name) for name in gives), processor=None)
    asked = None if wanted is None else [Modality(name) for name in wanted]
    assert drawing.is_drawing(door, asked) is expected


def test_an_answer_without_pictures_writes_nothing(tmp_path: Path) -> None:
    options = drawing.FileOptions("png", metadata=True, contact_sheet=True)
    assert drawing.save_files(OmniRequestOutput("r"), tmp_path / "new", options) == []
    assert not (tmp_path / "new").exists()
