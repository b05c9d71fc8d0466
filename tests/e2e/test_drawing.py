"""Pictures end to end, from a small random Stable Diffusion 3: streams, ends, bad input, broken checkpoints, the CLI.

Where it matters who does what when, everything runs turn by turn in one thread; the rest goes through the front doors.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from omnistage.cli import app
from omnistage.config import OmniEngineArgs
from omnistage.core.errors import (
    CapacityError,
    CheckpointError,
    InvalidRequestError,
    LimitExceededError,
    MediaError,
    OmniError,
    QueueFullError,
    SizeError,
    SizeLimitError,
    StageError,
    UnsupportedModalityError,
)
from omnistage.core.params import DiffusionParams, SamplingParams
from omnistage.core.types import FinishReason, ImageChunk, Latents, Modality, OmniTokensPrompt, Progress
from omnistage.media.image_output import ImageOutput, read_metadata
from omnistage.models.stable_diffusion_3 import tiny
from omnistage.omni import AsyncOmni, Omni
from omnistage.pipeline.build import EngineParts, build_parts
from omnistage.pipeline.orchestrator import Orchestrator
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk
from tests.e2e.harness import PipelineHarness, final_of, open_door, say


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sd3") / "model"
    tiny.write(made, seed=5)
    return made


def load_parts(folder: Path, *overrides: str) -> EngineParts:
    args = OmniEngineArgs(model=str(folder), device="cpu", dtype="float32", overrides=overrides)
    return build_parts(args, progress=False)


@pytest.fixture(scope="module")
def parts(folder: Path) -> EngineParts:
    return load_parts(folder)


@pytest.fixture(scope="module")
def _door(folder: Path) -> Iterator[Omni]:
    with Omni(folder, device="cpu", dtype="float32", progress=False) as door:
        yield door


@pytest.fixture
def omni(_door: Omni) -> Iterator[Omni]:
    yield _door
    assert_empty(_door.orchestrator)


def assert_empty(orchestrator: Orchestrator) -> None:
    """No request is left anywhere, in no stage and no runner."""
    orchestrator.check_idle()
    encode, denoise, decode = (orchestrator.stages[name] for name in ("encode", "denoise", "decode"))
    assert len(encode._queue) == 0  # type: ignore[attr-defined]
    assert not denoise._requests  # type: ignore[attr-defined]
    assert not denoise._runner._jobs  # type: ignore[attr-defined]
    assert not denoise._runner._lanes  # type: ignore[attr-defined]
    assert not denoise._scheduler.has_work()  # type: ignore[attr-defined]
    assert not decode._requests  # type: ignore[attr-defined]
    assert len(decode._queue) == 0  # type: ignore[attr-defined]


def small(**params: Any) -> DiffusionParams:
    values = {"width": 32, "height": 32, "steps": 4, "guidance": 4.0, "seed": 1, "max_sequence_length": 8}
    return DiffusionParams.parse({**values, **params})


def endless(**params: Any) -> DiffusionParams:
    """More steps than any test waits for."""
    return small(steps=1000, **params)


def kinds(items: list[OutputChunk]) -> list[object]:
    """What each item of a stream carries: a step's number, "preview", "image", "final"."""
    found: list[object] = []
    for item in items:
        if item.progress is not None:
            found.append(item.progress.step)
        if item.image is not None:
            found.append("preview" if item.image.preview else "image")
        if item.final is not None:
            found.append("final")
    return found


def only(output: OmniRequestOutput) -> ImageOutput:
    assert output.error is None
    assert output.finish_reason is FinishReason.STOP
    (image,) = output.images
    return image


def assert_same_pixels(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape
    assert np.abs(got.astype(int) - expected.astype(int)).max() <= 1


# -------------------------------------------------------------------------------------------------- streams


def test_a_stream_shows_steps_then_previews_then_the_picture_then_the_whole(parts: EngineParts) -> None:
    harness = PipelineHarness(parts)
    items = harness.submit("r", "a cat", small(preview_every=2))
    harness.finish()
    assert kinds(items) == [1, 2, "preview", 3, 4, "image", "final"]
    assert {item.modality for item in items} == {Modality.IMAGE}
    assert [item.progress for item in items if item.progress] == [Progress(step, 4) for step in range(1, 5)]
    assert [item.finish_reason for item in items] == [None] * 5 + [FinishReason.STOP, None]
    output = final_of(items)
    assert items[-2].image is not None
    np.testing.assert_array_equal(only(output).pixels, items[-2].image.pixels)
    assert (output.usage.images, output.usage.steps) == (1, 4)


def test_pictures_of_one_request_are_streamed_by_index(parts: EngineParts) -> None:
    harness = PipelineHarness(parts)
    items = harness.submit("r", "a cat", small(n=3, seed=7, steps=2))
    harness.finish()
    shown = [item for item in items if item.image is not None]
    assert [item.index for item in shown] == [0, 1, 2]
    assert [item.image.seed for item in shown if item.image] == [7, 8, 9]
    output = final_of(items)
    assert [image.metadata["seed"] for image in output.images] == [7, 8, 9]
    assert [item.progress for item in items if item.progress] == [Progress(3, 6), Progress(6, 6)]


def test_each_picture_counts_for_the_requests_that_run_at_once(parts: EngineParts) -> None:
    harness = PipelineHarness(parts, max_inflight=4)
    harness.submit("three", "a cat", small(n=3, steps=1))
    with pytest.raises(QueueFullError):
        harness.submit("two", "a cat", small(n=2, steps=1))
    with pytest.raises(LimitExceededError, match="5 answers are over the limit of 4"):
        harness.submit("five", "a cat", small(n=5, steps=1))
    harness.submit("one", "a cat", small(steps=1))
    harness.finish()
    harness.submit("four", "a cat", small(n=4, steps=1))
    harness.finish()


def test_async_streams_run_side_by_side_and_each_is_in_order(folder: Path, omni: Omni) -> None:
    alone = [only(omni.generate(f"cat {i}", small(seed=i), progress=False)[0]).pixels for i in range(3)]

    async def read(door: AsyncOmni, number: int) -> list[OutputChunk]:
        params = small(seed=number, preview_every=1)
        return [item async for item in door.generate(f"cat {number}", params, request_id=str(number))]

    async def main() -> list[list[OutputChunk]]:
        async with AsyncOmni(folder, device="cpu", dtype="float32", progress=False) as door:
            streams = await asyncio.gather(*(read(door, number) for number in range(3)))
            door.orchestrator.check_idle()
            return streams

    for number, items in enumerate(asyncio.run(main())):
        found = kinds(items)
        assert [kind for kind in found if isinstance(kind, int)] == [1, 2, 3, 4]
        assert found[-2:] == ["image", "final"]
        assert found.count("image") == found.count("final") == 1
        assert found.count("preview") <= 3
        assert_same_pixels(only(final_of(items)).pixels, alone[number])


def test_a_batch_is_answered_in_its_order(omni: Omni) -> None:
    sizes = [(32, 32), (16, 48), (32, 32)]
    params = [small(width=width, height=height, seed=i, steps=3 - i) for i, (width, height) in enumerate(sizes)]
    outputs = omni.generate([f"cat {i}" for i in range(3)], params, progress=False)
    assert [(only(output).width, only(output).height) for output in outputs] == sizes
    assert [only(output).metadata["seed"] for output in outputs] == [0, 1, 2]


def test_a_chat_and_a_prompt_draw_the_same(omni: Omni) -> None:
    picture = only(omni.generate("a cat", small(), progress=False)[0]).pixels
    chat = only(omni.chat(say("a cat"), small(), progress=False)).pixels
    assert_same_pixels(chat, picture)
    items = list(omni.stream_chat(say("a cat"), small()))
    assert kinds(items) == [1, 2, 3, 4, "image", "final"]
    assert_same_pixels(only(final_of(items)).pixels, picture)


def test_an_input_picture_and_a_mask_are_used(omni: Omni) -> None:
    start = np.zeros((32, 32, 3), np.uint8)
    start[:, 16:] = 200
    mask = np.zeros((32, 32), np.uint8)
    mask[:, :16] = 255
    params = small(strength=0.8)
    drawn = [
        only(omni.generate(prompt, asked, progress=False)[0]).pixels
        for prompt, asked in (
            ("a cat", small()),
            ({"prompt": "a cat", "image": start}, params),
            ({"prompt": "a cat", "image": start, "mask": mask}, params),
        )
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(drawn[one].astype(int) - drawn[other].astype(int)).max() > 1


# ----------------------------------------------------------------------------------------- what is in a picture


def test_a_picture_says_what_made_it_and_so_does_its_file(omni: Omni, folder: Path, tmp_path: Path) -> None:
    image = only(omni.generate("a cat", small(seed=9, negative_prompt="blurry"), progress=False)[0])
    assert dict(image.metadata) == {
        "seed": 9,
        "model": omni.orchestrator.model,
        "prompt": "a cat",
        "parameters": {
            "width": 32,
            "height": 32,
            "steps": 4,
            "guidance": 4.0,
            "negative_prompt": "blurry",
            "n": 1,
            "max_sequence_length": 8,
            "preview_every": 0,
        },
    }
    assert folder.name in omni.orchestrator.model
    assert read_metadata(image.save(tmp_path / "cat.png")) == dict(image.metadata)


def test_a_seed_that_was_drawn_is_told_and_draws_the_same_again(omni: Omni) -> None:
    free = DiffusionParams(width=32, height=32, steps=2, max_sequence_length=8)
    first, second = (only(omni.generate("a cat", free, progress=False)[0]) for _ in range(2))
    assert first.metadata["seed"] != second.metadata["seed"]
    seeded = free.merged(DiffusionParams(seed=first.metadata["seed"]))  # type: ignore[arg-type]
    again = only(omni.generate("a cat", seeded, progress=False)[0])
    assert_same_pixels(again.pixels, first.pixels)


def test_the_defaults_of_the_pipeline_fill_in(folder: Path) -> None:
    with open_door(load_parts(folder, "denoise.steps=2", "decode.width=32", "encode.height=16")) as door:
        image = only(door.generate("a cat", progress=False)[0])
        assert (image.width, image.height) == (32, 16)
        parameters: Any = image.metadata["parameters"]
        assert (parameters["steps"], parameters["guidance"]) == (2, 7.0)
        by_stage = {"decode": {"height": 48}, "denoise": DiffusionParams(steps=1)}
        output = door.generate("a cat", by_stage, progress=False)[0]
        assert (only(output).height, output.usage.steps) == (48, 1)


# ------------------------------------------------------------------------------------------- ends on the way


def test_a_deadline_midway_ends_with_what_there_is(folder: Path) -> None:
    now = [time.monotonic()]
    harness = PipelineHarness(load_parts(folder, "denoise.max_running=1"), clock=lambda: now[0])
    items = harness.submit("r", "a cat", small(n=2, seed=3), timeout=60.0)
    other = harness.submit("other", "a dog", small(seed=8))
    harness.turns(6)
    now[0] += 61.0
    harness.orchestrator.run_until_idle()
    assert_empty(harness.orchestrator)
    output = final_of(items)
    assert output.finish_reason is FinishReason.DEADLINE
    assert output.error is None
    assert [image.metadata["seed"] for image in output.images] == [3], "the first was done in time"
    assert 4 < output.usage.steps < 8
    only(final_of(other))


def test_a_deadline_through_the_front_door(omni: Omni) -> None:
    (output,) = omni.generate("a cat", endless(), timeout=0.5, progress=False)
    assert output.finish_reason is FinishReason.DEADLINE
    assert output.images == []
    assert output.usage.steps < 1000


def test_an_abort_midway_ends_at_the_next_step_and_leaves_the_others(parts: EngineParts) -> None:
    harness = PipelineHarness(parts)
    alone = harness.submit("alone", "a dog", small(seed=8, steps=6))
    harness.finish()
    gone = harness.submit("gone", "a cat", endless(preview_every=1))
    stays = harness.submit("stays", "a dog", small(seed=8, steps=6))
    harness.turns(3)
    denoise: Any = parts.stages["denoise"]
    before = denoise._runner.rows
    assert harness.orchestrator.abort("gone")
    assert kinds(gone) == [1, "preview", 2, "preview", 3, "preview", "final"]
    assert final_of(gone).finish_reason is FinishReason.ABORT
    assert not harness.orchestrator.abort("gone")
    harness.turns(1)
    assert denoise._runner.rows == before + 2, "the next step holds the rows of the other request only"
    harness.finish()
    assert_empty(harness.orchestrator)
    assert_same_pixels(only(final_of(stays)).pixels, only(final_of(alone)).pixels)


def test_leaving_an_async_stream_aborts_its_request(parts: EngineParts) -> None:
    async def main() -> None:
        door: AsyncOmni = open_door(parts, AsyncOmni)
        try:
            stream = door.generate("a cat", endless(), request_id="left")
            async for item in stream:
                if item.progress is not None:
                    break
            await stream.aclose()
            assert door.stats().finished[FinishReason.ABORT] == 1
            items = []
            async for item in door.generate("a cat", endless(), request_id="aborted"):
                items.append(item)
                if item.progress is not None and item.progress.step == 2:
                    door.abort("aborted")
            assert final_of(items).finish_reason is FinishReason.ABORT
            await asyncio.to_thread(assert_empty, door.orchestrator)
        finally:
            await door.shutdown()

    asyncio.run(main())


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_a_hundred_requests_leave_nothing_behind(parts: EngineParts) -> None:
    door: Omni = open_door(parts)

    def draw(count: int) -> None:
        prompts = [f"cat {i % 5}" for i in range(count)]
        params = [small(steps=1 + i % 3, seed=i, guidance=1.0, width=16, n=1 + i % 2) for i in range(count)]
        for output in door.generate(prompts, params, progress=False):
            assert output.error is None
        for item in door._stream(door._plan("cat 0", endless(preview_every=1), _options())):
            if item.image is not None:
                break  # the stream is closed, and its request aborted
        with pytest.raises(InvalidRequestError):
            door.generate("cat 0", small(width=33), progress=False)

    draw(20)
    assert_empty(door.orchestrator)
    before = tensors()
    draw(100)
    assert_empty(door.orchestrator)
    assert tensors() <= before + 5
    stats = door.stats()
    assert stats.inflight == 0
    assert stats.finished[FinishReason.STOP] == 120
    assert stats.finished[FinishReason.ABORT] == 2
    door.close()


def _options() -> Any:
    from omnistage.pipeline.intake import RequestOptions

    return RequestOptions()


# ------------------------------------------------------------------------------------------------- bad input

NEIGHBOUR = ("a lighthouse at dusk", small(steps=6, seed=4, preview_every=2))


@pytest.fixture(scope="module")
def undisturbed(parts: EngineParts) -> np.ndarray:
    """The neighbour's picture when nothing else happens."""
    harness = PipelineHarness(parts)
    items = harness.submit("alone", *NEIGHBOUR)
    harness.finish()
    return only(final_of(items)).pixels


@pytest.fixture
def beside(undisturbed: np.ndarray) -> Callable[..., Any]:
    """`with beside(harness):` runs the block in the middle of a neighbour's picture, which must come out as ever."""

    @contextmanager
    def neighbourhood(harness: PipelineHarness) -> Iterator[None]:
        items = harness.submit("neighbour", *NEIGHBOUR)
        harness.turns(3)
        assert kinds(items) == [1, 2, "preview", 3]
        yield
        harness.finish()
        assert_empty(harness.orchestrator)
        assert kinds(items) == [1, 2, "preview", 3, 4, "preview", 5, 6, "image", "final"]
        assert_same_pixels(only(final_of(items)).pixels, undisturbed)

    return neighbourhood


def pixels(width: int = 32, height: int = 32) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def asked(**values: Any) -> dict[str, dict[str, Any]]:
    return {"denoise": values}


SOUND = {"type": "audio", "audio": (np.zeros(1600, np.float32), 16_000)}
CAT = "a cat"
REFUSED: dict[str, tuple[Any, Any, dict[str, Any], type[OmniError], str]] = {
    "odd width": (CAT, small(width=33), {}, SizeError, "width"),
    "odd height": (CAT, small(height=40), {}, SizeError, "height"),
    "odd default side": (CAT, DiffusionParams(width=100), {}, SizeError, "width"),
    "tiny width": (CAT, asked(width=1), {}, InvalidRequestError, "sampling_params.denoise.width"),
    "width of a million": (CAT, asked(width=10**6), {}, InvalidRequestError, "sampling_params.denoise.width"),
    "larger than the model's positions": (CAT, small(width=400), {}, SizeLimitError, "width"),
    "zero steps": (CAT, asked(steps=0), {}, InvalidRequestError, "sampling_params.denoise.steps"),
    "ten thousand steps": (CAT, asked(steps=10_000), {}, InvalidRequestError, "sampling_params.denoise.steps"),
    "steps that are text": (CAT, asked(steps="many"), {}, InvalidRequestError, "sampling_params.denoise.steps"),
    "NaN guidance": (CAT, asked(guidance=float("nan")), {}, InvalidRequestError, "sampling_params.denoise.guidance"),
    "infinite guidance": (
        CAT,
        asked(guidance=float("inf")),
        {},
        InvalidRequestError,
        "sampling_params.denoise.guidance",
    ),
    "n of zero": (CAT, asked(n=0), {}, InvalidRequestError, "sampling_params.denoise.n"),
    "n of a thousand": (CAT, asked(n=1000), {}, InvalidRequestError, "sampling_params.denoise.n"),
    "negative seed": (CAT, asked(seed=-1), {}, InvalidRequestError, "sampling_params.denoise.seed"),
    "unknown scheduler": (CAT, small(scheduler="NoSuchScheduler"), {}, InvalidRequestError, "scheduler"),
    "a scheduler that is no scheduler": (CAT, small(scheduler="os.system"), {}, InvalidRequestError, "scheduler"),
    "too much text asked for": (CAT, small(max_sequence_length=513), {}, LimitExceededError, "max_sequence_length"),
    "strength without image": (CAT, small(strength=0.5), {}, InvalidRequestError, "strength"),
    "true_cfg where there is guidance only": (CAT, small(true_cfg=3.0), {}, InvalidRequestError, "true_cfg"),
    "frames of a picture": (CAT, small(num_frames=5), {}, InvalidRequestError, "num_frames"),
    "frame rate of a picture": (CAT, small(fps=8.0), {}, InvalidRequestError, "fps"),
    "negative prompt without guidance": (
        CAT,
        small(negative_prompt="people", guidance=1.0),
        {},
        InvalidRequestError,
        "negative_prompt",
    ),
    "strength of zero": (CAT, asked(strength=0.0), {}, InvalidRequestError, "sampling_params.denoise.strength"),
    "unknown parameter": (CAT, asked(heat=1), {}, InvalidRequestError, "sampling_params.denoise.heat"),
    "unknown stage": (CAT, {"painter": {}}, {}, InvalidRequestError, "sampling_params.painter"),
    "sampling parameters": (CAT, SamplingParams(seed=1), {}, InvalidRequestError, "sampling_params"),
    "sampling parameters by stage": (
        CAT,
        {"denoise": SamplingParams(seed=1)},
        {},
        InvalidRequestError,
        "sampling_params",
    ),
    "parameters that are text": (CAT, "fast", {}, InvalidRequestError, "sampling_params"),
    "negative prompt of half a character": (
        CAT,
        asked(negative_prompt="\ud800"),
        {},
        InvalidRequestError,
        "sampling_params.denoise.negative_prompt",
    ),
    "empty prompt": ("", None, {}, InvalidRequestError, "prompt"),
    "blank prompt": ("  \n", None, {}, InvalidRequestError, "prompt"),
    "a prompt that is a number": (5, None, {}, InvalidRequestError, "prompt"),
    "tokens": (OmniTokensPrompt((1, 2)), None, {}, InvalidRequestError, "prompt"),
    "corrupt image": ({"prompt": CAT, "image": b"no image"}, None, {}, MediaError, "image"),
    "two images": ({"prompt": CAT, "images": [pixels(), pixels()]}, None, {}, UnsupportedModalityError, "image"),
    "wrong-size mask": (
        {"prompt": CAT, "image": pixels(), "mask": pixels(16, 32)},
        None,
        {},
        InvalidRequestError,
        "mask",
    ),
    "mask without image": ({"prompt": CAT, "mask": pixels()}, None, {}, InvalidRequestError, "mask"),
    "audio in a chat": (say("draw this", SOUND), None, {}, InvalidRequestError, "messages"),
    "unknown modality": (CAT, None, {"modalities": ["smell"]}, UnsupportedModalityError, "modalities"),
    "text from a model that draws": (CAT, None, {"modalities": ["text"]}, UnsupportedModalityError, "modalities"),
    "a voice": (CAT, None, {"voice": "Chelsie"}, InvalidRequestError, "voice"),
    "deadline in the past": (CAT, None, {"timeout": -1.0}, InvalidRequestError, "timeout"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_before_anything_runs(parts: EngineParts, beside: Any, case: str) -> None:
    prompt, params, options, error, param = REFUSED[case]
    harness = PipelineHarness(parts)
    with beside(harness), pytest.raises(OmniError) as caught:
        harness.submit("bad", prompt, params, **options)
    assert type(caught.value) is error
    assert caught.value.param == param
    assert 400 <= caught.value.status < 500
    assert len(str(caught.value)) < 400
    assert harness.orchestrator.trace("bad") is None


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"steps": 0}, "steps"),
        ({"steps": 10_000}, "steps"),
        ({"guidance": float("nan")}, "guidance"),
        ({"n": 1000}, "n"),
        ({"seed": -1}, "seed"),
    ],
)
def test_parameters_refuse_by_name_what_can_never_be(values: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        DiffusionParams.parse(values)
    assert caught.value.param == param


def test_the_front_doors_refuse_a_number(omni: Omni) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        omni.generate(5, progress=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError) as caught:
        omni.generate([CAT, 5], small(), progress=False)  # type: ignore[list-item]
    assert caught.value.param == "prompt"


def test_a_picture_over_the_budget_is_refused_with_numbers_and_what_would_fit(folder: Path, beside: Any) -> None:
    harness = PipelineHarness(load_parts(folder, "denoise.max_batch_tokens=4"))
    with beside(harness):
        with pytest.raises(CapacityError) as caught:
            harness.submit("bad", CAT, small(width=64, height=64))
        # The model's own size is known only once the prompt is encoded.
        late = harness.submit("late", CAT, DiffusionParams(steps=2, max_sequence_length=8))
    message = str(caught.value)
    assert caught.value.param == "width"
    assert caught.value.status == 413
    assert "64x64 is 16 latent patches, over the budget of 4" in message
    assert "denoise.max_batch_tokens" in message
    fits = re.search(r"about (\d+)x(\d+) would fit", message)
    assert fits is not None
    output = final_of(late)
    assert output.finish_reason is FinishReason.ERROR
    assert type(output.error) is CapacityError
    assert "16 latent patches, over the budget of 4" in str(output.error)
    advised = harness.submit("advised", CAT, small(width=int(fits[1]), height=int(fits[2])))
    harness.finish()
    only(final_of(advised))


def test_steps_and_strength_that_leave_nothing_to_do_end_their_own_request(parts: EngineParts, beside: Any) -> None:
    harness = PipelineHarness(parts)
    with beside(harness):
        items = harness.submit("bad", {"prompt": CAT, "image": pixels()}, small(strength=1e-20))
    error = final_of(items).error
    assert type(error) is InvalidRequestError
    assert error.param == "strength"


# -------------------------------------------------------------------------------------------- broken stages


@pytest.mark.parametrize(
    ("stage", "part", "method"),
    [
        ("encode", "encoder", "encode"),
        ("encode", "encoder", "condition"),
        ("denoise", "denoiser", "open"),
        ("denoise", "denoiser", "forward"),
        ("denoise", "denoiser", "advance"),
        ("denoise", "denoiser", "result"),
        ("decode", "decoder", "decode"),
    ],
)
def test_what_breaks_on_one_request_ends_that_one_only(
    parts: EngineParts, beside: Any, monkeypatch: pytest.MonkeyPatch, stage: str, part: str, method: str
) -> None:
    """The others that share its batches, before and after it broke, go on."""
    component = getattr(parts.stages[stage], part)
    stock = getattr(component, method)
    cursed_latents: list[torch.Tensor] = []

    def is_cursed(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return any(is_cursed(one) for one in value)
        if isinstance(value, torch.Tensor):
            return any(value is one for one in cursed_latents)
        params = getattr(getattr(value, "lane", value), "params", value)
        return getattr(params, "seed", None) == 666 or "cursed" in getattr(value, "text", "")

    def broken(*args: Any, **options: Any) -> Any:
        if any(is_cursed(value) for value in args):
            raise RuntimeError("a kernel failed")
        return stock(*args, **options)

    def remember(request: Any, state: object, chunk: Any) -> Any:
        if request.request_id == "bad" and isinstance(chunk.payload, Latents):
            cursed_latents.append(chunk.payload.picture)
        return bridge(request, state, chunk)

    bridge = parts.bridges["decode"]
    monkeypatch.setattr(component, method, broken)
    harness = PipelineHarness(parts, bridges={**parts.bridges, "decode": remember})
    with beside(harness):
        bad = harness.submit("bad", "a cursed cat", small(seed=666, steps=3))
        good = harness.submit("good", "a dog", small(seed=8, steps=3))
    output = final_of(bad)
    assert output.finish_reason is FinishReason.ERROR
    assert type(output.error) is StageError
    assert "kernel" not in str(output.error)
    assert output.images == []
    only(final_of(good))


def test_values_that_are_not_numbers_are_an_error_and_no_picture(
    parts: EngineParts, beside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    denoiser = parts.stages["denoise"].denoiser  # type: ignore[attr-defined]
    stock = denoiser.forward

    def forward(rows: Any) -> Any:
        found = stock(rows)
        return [
            one * float("nan") if row.lane.params.seed == 666 else one for row, one in zip(rows, found, strict=True)
        ]

    monkeypatch.setattr(denoiser, "forward", forward)
    harness = PipelineHarness(parts)
    with beside(harness):
        bad = harness.submit("bad", CAT, small(seed=666, steps=3))
    assert "not finite" in str(final_of(bad).error)
    assert not [item for item in bad if isinstance(item.image, ImageChunk)]


# ---------------------------------------------------------------------------------------- broken checkpoints


def set_part(folder: Path, name: str, value: object) -> None:
    path = folder / "model_index.json"
    index = json.loads(path.read_text())
    index[name] = value
    path.write_text(json.dumps(index))


def pickled(folder: Path, part: str) -> None:
    for path in (folder / part).glob("*.safetensors"):
        path.rename(path.with_suffix(".bin"))


def truncated(folder: Path, part: str) -> None:
    (path,) = (folder / part).glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:1000])


def without_one_weight(folder: Path, part: str) -> None:
    (path,) = (folder / part).glob("*.safetensors")
    weights = load_file(path)
    del weights[sorted(weights)[0]]
    save_file(weights, path, metadata={"format": "pt"})


def index_text(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "model_index.json").write_text(text)


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    **{
        f"no {part}": (lambda folder, part=part: shutil.rmtree(folder / part), part)
        for part in ("vae", "transformer", "text_encoder_2", "tokenizer", "scheduler")
    },
    **{
        f"pickled {part}": (lambda folder, part=part: pickled(folder, part), "pickled weights")
        for part in ("transformer", "vae", "text_encoder_3")
    },
    "no weights": (
        lambda folder: [path.unlink() for path in (folder / "transformer").glob("*.safetensors")],
        "no safetensors",
    ),
    "truncated weights": (lambda folder: truncated(folder, "transformer"), "transformer"),
    "a weight that is missing": (lambda folder: without_one_weight(folder, "transformer"), "transformer"),
    "a weight of an encoder that is missing": (lambda folder: without_one_weight(folder, "text_encoder"), "text_enc"),
    "a class that does not exist": (
        lambda folder: set_part(folder, "transformer", ["diffusers", "NoSuchModel"]),
        "has no NoSuchModel",
    ),
    "a pipeline that does not exist": (lambda folder: set_part(folder, "_class_name", "NoSuchPipeline"), "NoSuch"),
    "another library": (lambda folder: set_part(folder, "transformer", ["os", "system"]), "os.system"),
    "code of its own": (lambda folder: set_part(folder, "vae", ["vae", "MyVae"]), "vae.MyVae"),
    "a function": (lambda folder: set_part(folder, "vae", ["diffusers", "logging"]), "logging"),
    "a private name": (lambda folder: set_part(folder, "vae", ["diffusers", "__loader__"]), "__loader__"),
    "broken index": (index_text("{"), "not valid JSON"),
    "an index that is a list": (index_text("[]"), "not an object"),
    "an empty index": (index_text("{}"), ""),
    "broken configuration": (lambda folder: (folder / "vae" / "config.json").write_text("{"), "vae"),
}


BROKEN["a part that is named nowhere"] = (lambda folder: set_part(folder, "transformer", None), "transformer")
BROKEN["a text encoder that is named nowhere"] = (lambda folder: set_part(folder, "text_encoder", None), "text_encoder")
BROKEN["a tokenizer that is named nowhere"] = (lambda folder: set_part(folder, "tokenizer", None), "tokenizer")


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_refused_by_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    spoil, says = BROKEN[case]
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    spoil(copy)
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("a checkpoint ran a command"))
    monkeypatch.setattr(torch, "load", lambda *args, **options: pytest.fail("a pickle was opened"))
    with pytest.raises(OmniError) as caught:
        Omni(copy, device="cpu", dtype="float32", progress=False)
    assert isinstance(caught.value, CheckpointError)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 1000


# ----------------------------------------------------------------------------------------------------- logs


def test_prompts_do_not_get_into_logs(parts: EngineParts) -> None:
    """diffusers warns of text that its encoders cut off, and quotes it."""
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    handler = Keep()
    loggers = [logging.getLogger(), logging.getLogger("diffusers"), logging.getLogger("transformers")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        harness = PipelineHarness(parts)
        items = harness.submit("r", "word " * 100 + "treasure", small(steps=1, max_sequence_length=256))
        harness.finish()
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    only(final_of(items))
    assert not any("treasure" in message for message in records)


# --------------------------------------------------------------------------------------------- command line

runner = CliRunner()


def generate(folder: Path, out: Path, *arguments: object, code: int = 0) -> Any:
    common = ["generate", folder, CAT, "--device", "cpu", "--width", 32, "--height", 32, "--steps", 2, "--seed", 3]
    result = runner.invoke(app, [str(part) for part in (*common, "--out", out, *arguments)])
    assert result.exit_code == code, result.output
    return result


def test_the_command_draws_what_the_front_door_draws(folder: Path, omni: Omni, tmp_path: Path) -> None:
    result = generate(folder, tmp_path)
    with Image.open(tmp_path / "picture.png") as image:
        drawn = np.asarray(image)
    params = DiffusionParams(width=32, height=32, steps=2, seed=3)
    assert_same_pixels(drawn, only(omni.generate(CAT, params, progress=False)[0]).pixels)
    metadata: Any = read_metadata(tmp_path / "picture.png")
    assert (metadata["prompt"], metadata["seed"], metadata["parameters"]["steps"]) == (CAT, 3, 2)
    assert "1 picture, 2 denoising steps, finish reason stop" in result.stderr


def test_the_command_writes_several_and_a_sheet_without_metadata(folder: Path, tmp_path: Path) -> None:
    options = ["--n", 2, "--contact-sheet", "--format", "webp", "--no-metadata"]
    generate(folder, tmp_path, *options)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "contact-sheet.webp",
        "picture-0.webp",
        "picture-1.webp",
    ]
    for path in tmp_path.iterdir():
        assert read_metadata(path) == {}
        with Image.open(path) as image:
            assert image.format == "WEBP"


def test_the_command_keeps_a_picture_that_has_no_room_for_its_metadata(folder: Path, tmp_path: Path) -> None:
    result = generate(folder, tmp_path, "--format", "jpg", "--contact-sheet", "--negative-prompt", "\u00e9" * 32_000)
    assert [path.name for path in tmp_path.iterdir()] == ["picture.jpg"]
    assert read_metadata(tmp_path / "picture.jpg") == {}
    assert "the metadata are too long for this format" in result.stderr
    assert "no contact sheet" in result.stderr


def test_the_command_refuses_what_it_would_not_use(folder: Path, tmp_path: Path) -> None:
    assert (
        "error: --use-audio-in-video: is not supported by this model"
        in generate(folder, tmp_path, "--use-audio-in-video", code=2).stderr
    )
    missing = generate(folder, tmp_path, "--mask", tmp_path / "none.png", code=2)
    assert "error: --mask: there is no file" in missing.stderr
    assert "loading" not in missing.stderr


def test_the_command_says_what_is_wrong_in_one_line(folder: Path, tmp_path: Path) -> None:
    result = generate(folder, tmp_path, "--scheduler", "NoSuchScheduler", "--format", "jpg", code=2)
    assert "error: scheduler: there is no scheduler 'NoSuchScheduler'" in result.stderr
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []
