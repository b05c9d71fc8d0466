"""Pipelines that run whole: diffusers' own pictures, a step at a time, and nothing loaded that should not be."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from omnistage.config import OmniEngineArgs, resolve
from omnistage.config.schema import DiffusionBudget
from omnistage.core.errors import (
    CheckpointError,
    ConfigError,
    InvalidRequestError,
    OmniError,
    StageError,
    UnsupportedModalityError,
    UnsupportedModelError,
)
from omnistage.core.family import LoadContext
from omnistage.core.params import DiffusionParams, SamplingParams
from omnistage.core.registry import Registry
from omnistage.core.types import (
    AudioChunk,
    CodecFrames,
    CodecInput,
    DiffusionInput,
    FinishReason,
    ImageChunk,
    Progress,
    RequestInfo,
    StageChunk,
    StageInput,
    VideoChunk,
)
from omnistage.engines.diffusion.whole_pipeline import OnStep, VideoWithAudio, WholePipeline, WholeStage
from omnistage.hf import transformers
from omnistage.models._diffusers import tiny
from omnistage.models._diffusers.loading import diffusers
from omnistage.models.diffusers_pipeline import FAMILY, inspection
from omnistage.models.diffusers_pipeline.component import Pipeline, pixels_of
from omnistage.models.diffusers_pipeline.inspection import (
    check_pipeline,
    is_sound_pipeline,
    output_fields,
    signature,
)
from omnistage.pipeline.build import build_stage, load_component
from omnistage.placement.devices import resolve_device

PROMPT = "a red fox in the snow"
GENERIC = Registry(lambda registry: registry.register(FAMILY))
"""So that Stable Diffusion, which has a family of its own, is run whole here."""


def vae(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return diffusers().AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        latent_channels=4,
        sample_size=32,
    )


def write_stable_diffusion(folder: Path) -> None:
    torch.manual_seed(0)
    vocab, _ = tiny.clip_vocabulary()
    text_config = transformers.CLIPTextConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=vocab[tiny.CLIP_BOS],
        eos_token_id=vocab[tiny.CLIP_EOS],
        pad_token_id=vocab[tiny.CLIP_EOS],
    )
    unet = diffusers().UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
    )
    tiny.write_clip_tokenizer(folder / "tokenizer")
    pipe = diffusers().StableDiffusionPipeline(
        vae=vae(),
        text_encoder=transformers.CLIPTextModel(text_config),
        tokenizer=transformers.CLIPTokenizer.from_pretrained(folder / "tokenizer"),
        unet=unet,
        scheduler=diffusers().DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.save_pretrained(folder, safe_serialization=True)


def edited(folder: Path, to: Path, **index: object) -> Path:
    """A copy of a checkpoint with other entries in its index."""
    shutil.copytree(folder, to)
    known = json.loads((to / "model_index.json").read_text())
    (to / "model_index.json").write_text(json.dumps({**known, **index}))
    return to


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sd")
    write_stable_diffusion(made)
    return made


def loaded(folder: Path) -> Pipeline:
    resolved = resolve(
        OmniEngineArgs.parse({"model": str(folder), "device": "cpu", "dtype": "float32"}), registry=GENERIC
    )
    assert resolved.model.family == "diffusers_pipeline"
    stage = resolved.config.pipeline.stages["draw"]
    component = load_component(LoadContext(resolved.model, "draw", stage, resolve_device("cpu"), torch.float32))
    assert isinstance(component, Pipeline)
    return component


@pytest.fixture(scope="module")
def component(folder: Path) -> Pipeline:
    return loaded(folder)


@pytest.fixture(scope="module")
def stock(folder: Path) -> Callable[..., np.ndarray]:
    pipe = diffusers().StableDiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)

    def draw(seed: int, **arguments: Any) -> np.ndarray:
        generator = torch.Generator().manual_seed(seed)
        return np.asarray(pipe(prompt=PROMPT, generator=generator, **arguments).images[0])

    return draw


def staged(component: WholePipeline) -> WholeStage:
    return WholeStage("draw", component, DiffusionBudget())


def put(stage: WholeStage, request_id: str, payload: Any = None, priority: int = 0, **params: Any) -> None:
    info = RequestInfo(request_id, priority=priority)
    stage.submit(StageInput(info, DiffusionParams(**params), payload or DiffusionInput(PROMPT)))


def pictures(chunks: list[StageChunk], request_id: str) -> list[ImageChunk]:
    found = [chunk.payload for chunk in chunks if chunk.request_id == request_id]
    return [payload for payload in found if isinstance(payload, ImageChunk)]


def progress(chunks: list[StageChunk], request_id: str) -> list[tuple[int, int]]:
    found = [chunk.payload for chunk in chunks if chunk.request_id == request_id]
    return [(payload.step, payload.steps) for payload in found if isinstance(payload, Progress)]


# ------------------------------------------------------------------------------------------- real pipelines


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {"num_inference_steps": 50}),
        ({"steps": 3}, {"num_inference_steps": 3}),
        (
            {"steps": 4, "width": 48, "height": 32, "guidance": 1.0},
            {"num_inference_steps": 4, "width": 48, "height": 32, "guidance_scale": 1.0},
        ),
        (
            {"steps": 3, "guidance": 5.0, "negative_prompt": "blurry"},
            {"num_inference_steps": 3, "guidance_scale": 5.0, "negative_prompt": "blurry"},
        ),
    ],
)
def test_pixels_are_diffusers_own(component: Pipeline, stock: Any, ours: Any, theirs: Any) -> None:
    stage = staged(component)
    put(stage, "a", seed=7, **ours)
    chunks = stage.drain()
    (picture,) = pictures(chunks, "a")
    assert np.array_equal(picture.pixels, stock(7, **theirs))
    assert picture.pixels.std() > 5
    assert picture.seed == 7
    assert chunks[-1].finish is FinishReason.STOP


def test_one_step_at_a_time(component: Pipeline) -> None:
    stage = staged(component)
    assert not stage.has_work()
    assert stage.step() == []
    put(stage, "a", seed=1, steps=4)
    seen = []
    while stage.has_work():
        seen.append(stage.step())
    assert [len(chunks) for chunks in seen] == [2, 1, 1, 1, 1]  # a started marker first, the picture last
    assert seen[0][0].payload is None
    assert progress([chunk for chunks in seen for chunk in chunks], "a") == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert stage.stats().steps == 5
    assert stage.stats().tokens == 4


def test_n_pictures_start_from_seeds_that_follow(component: Pipeline, stock: Any) -> None:
    stage = staged(component)
    put(stage, "a", seed=10, steps=2, n=3)
    chunks = stage.drain()
    drawn = pictures(chunks, "a")
    assert [(picture.index, picture.seed) for picture in drawn] == [(0, 10), (1, 11), (2, 12)]
    for picture in drawn:
        assert np.array_equal(picture.pixels, stock(picture.seed or 0, num_inference_steps=2))
    assert [chunk.finish for chunk in chunks if isinstance(chunk.payload, ImageChunk)] == [
        None,
        None,
        FinishReason.STOP,
    ]
    assert progress(chunks, "a") == [(k, 6) for k in range(1, 7)]


def test_without_a_seed_pictures_differ(component: Pipeline) -> None:
    stage = staged(component)
    put(stage, "a", steps=1)
    put(stage, "b", steps=1)
    chunks = stage.drain()
    (a,), (b,) = pictures(chunks, "a"), pictures(chunks, "b")
    assert a.seed != b.seed
    assert not np.array_equal(a.pixels, b.pixels)


def test_abort_midway_leaves_the_others_exact(component: Pipeline, stock: Any) -> None:
    stage = staged(component)
    before = threading.active_count()
    put(stage, "a", seed=1, steps=50)
    put(stage, "b", seed=2, steps=3)
    for _ in range(3):
        stage.step()
    calls = []
    handle = component.pipe.unet.register_forward_hook(lambda *_: calls.append(1))
    stage.abort("a")
    handle.remove()
    assert not calls  # it ended where it stood
    assert threading.active_count() == before
    chunks = stage.drain()
    assert {chunk.request_id for chunk in chunks} == {"b"}
    assert np.array_equal(pictures(chunks, "b")[0].pixels, stock(2, num_inference_steps=3))
    stage.abort("a")  # unknown by now


def test_other_schedulers(component: Pipeline, stock: Any) -> None:
    stage = staged(component)
    own = component.pipe.scheduler
    put(stage, "a", seed=3, steps=3, scheduler="EulerAncestralDiscreteScheduler")
    put(stage, "b", seed=3, steps=3, scheduler="DDIMScheduler")
    chunks = stage.drain()
    plain = stock(3, num_inference_steps=3)
    assert not np.array_equal(pictures(chunks, "a")[0].pixels, plain)
    assert np.array_equal(pictures(chunks, "b")[0].pixels, plain)
    assert component.pipe.scheduler is own
    with pytest.raises(InvalidRequestError, match="DDIMScheduler") as caught:
        put(stage, "c", scheduler="NoSuchScheduler")
    assert caught.value.param == "scheduler"


def test_from_a_picture(folder: Path, tmp_path: Path) -> None:
    other = edited(folder, tmp_path / "img2img", _class_name="StableDiffusionImg2ImgPipeline")
    stage = staged(loaded(other))
    start = tiny.picture(32, 32)
    put(stage, "a", DiffusionInput(PROMPT, (start,)), seed=5, steps=6, strength=0.5)
    chunks = stage.drain()
    pipe = diffusers().StableDiffusionImg2ImgPipeline.from_pretrained(other)
    generator = torch.Generator().manual_seed(5)
    wanted = pipe(PROMPT, Image.fromarray(start), strength=0.5, num_inference_steps=6, generator=generator).images[0]
    assert np.array_equal(pictures(chunks, "a")[0].pixels, np.asarray(wanted))
    assert progress(chunks, "a") == [(1, 3), (2, 3), (3, 3)]
    with pytest.raises(InvalidRequestError) as caught:
        put(stage, "b", DiffusionInput(PROMPT, (start,)), width=64)
    assert caught.value.param == "width"


def test_inpainting(folder: Path, tmp_path: Path) -> None:
    other = edited(folder, tmp_path / "inpaint", _class_name="StableDiffusionInpaintPipeline")
    stage = staged(loaded(other))
    start, mask = tiny.picture(32, 32), np.zeros((32, 32), dtype=np.uint8)
    mask[8:24, 8:24] = 255
    put(stage, "a", DiffusionInput(PROMPT, (start,), mask), seed=5, steps=2, width=32, height=32)
    (picture,) = pictures(stage.drain(), "a")
    pipe = diffusers().StableDiffusionInpaintPipeline.from_pretrained(other)
    arguments = {"image": Image.fromarray(start), "mask_image": Image.fromarray(mask), "width": 32, "height": 32}
    generator = torch.Generator().manual_seed(5)
    wanted = pipe(PROMPT, **arguments, num_inference_steps=2, generator=generator).images[0]
    assert np.array_equal(picture.pixels, np.asarray(wanted))


def test_a_pipeline_without_prompt_or_callback_is_one_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    unet = diffusers().UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    pipe = diffusers().DDPMPipeline(unet=unet, scheduler=diffusers().DDPMScheduler())
    pipe.save_pretrained(tmp_path)
    stage = staged(loaded(tmp_path))
    put(stage, "a", seed=4, steps=3, n=2)
    first = stage.step()
    assert [type(chunk.payload) for chunk in first] == [type(None), Progress, ImageChunk]
    chunks = first + stage.drain()
    assert progress(chunks, "a") == [(1, 2), (2, 2)]
    for picture in pictures(chunks, "a"):
        generator = torch.Generator().manual_seed(picture.seed or 0)
        wanted = pipe(num_inference_steps=3, generator=generator).images[0]
        assert np.array_equal(picture.pixels, np.asarray(wanted))
    for field, value in (("width", 32), ("guidance", 2.0), ("negative_prompt", "x")):
        with pytest.raises(InvalidRequestError, match="DDPMPipeline does not support this parameter") as caught:
            put(stage, "b", **{field: value})
        assert caught.value.param == field


def test_classes_for_a_prompt(tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformer = diffusers().DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8
    )
    pipe = diffusers().DiTPipeline(transformer, vae(), diffusers().DDIMScheduler(), id2label={3: "fox, red fox"})
    pipe.save_pretrained(tmp_path / "bare")
    # diffusers does not write the names, but published checkpoints have them.
    named = edited(tmp_path / "bare", tmp_path / "named", id2label={"3": "fox, red fox"})
    stage = staged(loaded(named))
    put(stage, "a", DiffusionInput("red fox"), seed=1, steps=2)
    put(stage, "b", DiffusionInput("3"), seed=1, steps=2)
    chunks = stage.drain()
    wanted = pipe(class_labels=[3], num_inference_steps=2, generator=torch.Generator().manual_seed(1)).images[0]
    for name in ("a", "b"):
        assert np.array_equal(pictures(chunks, name)[0].pixels, np.asarray(wanted))
    with pytest.raises(InvalidRequestError, match="not a class of this model"):
        put(stage, "c", DiffusionInput("a cat"))


def test_through_the_build(folder: Path) -> None:
    resolved = resolve(
        OmniEngineArgs.parse({"model": str(folder), "device": "cpu", "dtype": "float32"}), registry=GENERIC
    )
    config = resolved.config
    stage = build_stage(resolved.model, "draw", config.pipeline.stages["draw"], config.deployment)
    assert isinstance(stage, WholeStage)
    stage.close()


# ---------------------------------------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"true_cfg": 2.0}, "true_cfg"),
        ({"strength": 0.5}, "strength"),
        ({"num_frames": 8}, "num_frames"),
        ({"fps": 8.0}, "fps"),
        ({"max_sequence_length": 64}, "max_sequence_length"),
        ({"preview_every": 1}, "preview_every"),
        ({"early_stop": 0.1}, "early_stop"),
    ],
)
def test_parameters_that_a_pipeline_does_not_take(component: Pipeline, params: Any, param: str) -> None:
    stage = staged(component)
    with pytest.raises(InvalidRequestError) as caught:
        put(stage, "a", **params)
    assert caught.value.param == param
    assert not stage.has_work()


def test_pictures_that_a_pipeline_does_not_take(component: Pipeline) -> None:
    start = tiny.picture(32, 32)
    with pytest.raises(UnsupportedModalityError, match="image: not supported"):
        put(staged(component), "a", DiffusionInput(PROMPT, (start,)))
    with pytest.raises(UnsupportedModalityError, match="mask: not supported"):
        put(staged(component), "a", DiffusionInput(PROMPT, (), start[..., 0]))


def test_what_diffusers_refuses_ends_its_request_only(folder: Path, tmp_path: Path) -> None:
    stage = staged(loaded(edited(folder, tmp_path / "img2img", _class_name="StableDiffusionImg2ImgPipeline")))
    put(stage, "a", steps=2)
    put(stage, "b", DiffusionInput(PROMPT, (tiny.picture(32, 32),)), seed=2, steps=2)
    chunks = stage.drain()
    (failed,) = [chunk for chunk in chunks if chunk.finish is FinishReason.ERROR]
    assert failed.request_id == "a"
    assert isinstance(failed.error, InvalidRequestError)
    assert "StableDiffusionImg2ImgPipeline cannot run this" in str(failed.error)
    assert len(pictures(chunks, "b")) == 1


class NeedsPicture:
    """A pipeline's signature is all that is looked at."""

    def __call__(self, image: Any, num_frames: int, prompt: str = "", fps: int = 7, **more: Any) -> None: ...


def test_what_a_pipeline_needs_must_be_given() -> None:
    component = Pipeline(NeedsPicture())
    start = DiffusionInput(PROMPT, (tiny.picture(8, 8),) * 2)
    with pytest.raises(InvalidRequestError, match="is missing") as caught:
        component.check(DiffusionInput(PROMPT), DiffusionParams(num_frames=3))
    assert caught.value.param == "image"
    with pytest.raises(InvalidRequestError, match="is missing") as caught:
        component.check(start, DiffusionParams(fps=4))
    assert caught.value.param == "num_frames"
    component.check(start, DiffusionParams(num_frames=3, fps=4))
    with pytest.raises(InvalidRequestError, match="known: none"):
        component.check(start, DiffusionParams(num_frames=3, scheduler="DDIMScheduler"))


class Controlled:
    def __call__(self, prompt: str = "", control_image: Any = None) -> None: ...


class ControlledFromPicture:
    def __call__(self, prompt: str = "", image: Any = None, control_image: Any = None) -> None: ...


class FirstAndLast:
    def __call__(self, image: Any, last_image: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("cls", "count", "names"),
    [
        (Controlled, 1, ["control_image"]),
        (Controlled, 0, None),
        (Controlled, 2, None),
        (ControlledFromPicture, 2, ["image", "control_image"]),
        (ControlledFromPicture, 1, None),
        (FirstAndLast, 1, ["image"]),
        (FirstAndLast, 2, ["image", "last_image"]),
    ],
)
def test_pictures_go_where_the_pipeline_takes_them(cls: type, count: int, names: list[str] | None) -> None:
    given: dict[str, Any] = {}

    class Noting(cls):  # type: ignore[misc]
        def __call__(self, *more: Any, **arguments: Any) -> Any:
            given.update(arguments)
            return type("Output", (), {"images": [Image.new("RGB", (8, 8))]})

    component = Pipeline(cls())
    payload = DiffusionInput(PROMPT, tuple(tiny.picture(8, 8, seed) for seed in range(count)))
    if names is None:
        with pytest.raises(
            InvalidRequestError, match=r"takes one picture, which controls|then one that controls"
        ) as caught:
            component.check(payload, DiffusionParams())
        assert caught.value.param == "image"
        return
    component.check(payload, DiffusionParams())
    component.pipe = Noting()
    component.draw(payload, DiffusionParams(), 0, lambda done, steps: None)
    pictures = {name: value for name, value in given.items() if isinstance(value, Image.Image)}
    assert list(pictures) == names
    for name, picture in zip(names, payload.images, strict=True):
        assert np.array_equal(np.asarray(pictures[name]), picture)


def test_the_inputs_that_pipelines_need_are_arguments_of_theirs() -> None:
    """Names in the table that a release of diffusers no longer has would say nothing."""
    for name, argument in inspection._NEEDED_INPUTS.items():
        takes, needs = signature(getattr(diffusers(), name))
        assert argument in takes
        assert argument not in needs


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("WanVideoToVideoPipeline", "fails without video, which no request can give"),
        ("StableAudio3InpaintPipeline", "fails without audio, which no request can give"),
        ("LTX2HDRPipeline", "high dynamic range"),
        ("FluxPriorReduxPipeline", "gives pooled_prompt_embeds, prompt_embeds; only"),
        ("MarigoldDepthPipeline", "gives latent, prediction, uncertainty; only"),
        ("KandinskyPipeline", "cannot be called without image_embeds"),
        ("KandinskyCombinedPipeline", "fetches other checkpoints"),
    ],
)
def test_what_cannot_be_driven_is_refused_by_its_class(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        check_pipeline(getattr(diffusers(), name))


@pytest.mark.parametrize(
    "name", ["PixArtAlphaPipeline", "AuraFlowPipeline", "AllegroPipeline", "Kandinsky5T2IPipeline"]
)
def test_what_can_be_driven_is_accepted(name: str) -> None:
    cls = getattr(diffusers(), name)
    assert output_fields(cls) & {"images", "frames", "image"}
    check_pipeline(cls)


@pytest.mark.parametrize(
    ("name", "alone"),
    [("StableAudioPipeline", True), ("AudioLDM2Pipeline", True), ("LTX2Pipeline", False), ("AllegroPipeline", False)],
)
def test_pipelines_that_give_sound_are_accepted(name: str, alone: bool) -> None:
    check_pipeline(getattr(diffusers(), name))
    assert is_sound_pipeline(name) is alone


@pytest.mark.parametrize("name", ["UNet2DModel", "_Pipeline", "NoSuchPipeline", None])
def test_what_is_no_pipeline_gives_no_sound(name: object) -> None:
    assert not is_sound_pipeline(name)


def test_the_older_callback_gives_progress_and_ends(tmp_path: Path) -> None:
    torch.manual_seed(0)
    unet = diffusers().UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    pipe = diffusers().ConsistencyModelPipeline(unet=unet, scheduler=diffusers().CMStochasticIterativeScheduler())
    pipe.save_pretrained(tmp_path)
    stage = staged(loaded(tmp_path))
    put(stage, "a", DiffusionInput("1"), seed=4, steps=3)
    put(stage, "b", DiffusionInput("1"), seed=5, steps=3)
    chunks = stage.drain()
    assert progress(chunks, "a") == [(1, 3), (2, 3), (3, 3)]
    wanted = pipe(num_inference_steps=3, generator=torch.Generator().manual_seed(4)).images[0]
    assert np.array_equal(pictures(chunks, "a")[0].pixels, np.asarray(wanted))
    put(stage, "a", DiffusionInput("1"), steps=50)
    stage.step()
    stage.abort("a")
    assert not stage.has_work()


class Broken:
    """Fails inside, as a pipeline does whose parts do not fit."""

    def __call__(self, prompt: str, callback_on_step_end: Any = None) -> None:
        callback_on_step_end(self, 0, 0, {})
        raise TypeError("forward() got an unexpected keyword argument 'mask'")


def test_a_pipeline_that_fails_says_where_and_why() -> None:
    with pytest.raises(
        StageError, match=r"Broken failed after step 1, at .*\.py:\d+ in __call__ .*keyword argument 'mask'"
    ):
        Pipeline(Broken()).draw(DiffusionInput(PROMPT), DiffusionParams(), 0, lambda done, steps: None)


# ------------------------------------------------------------------------------------- the stage, by itself


class Fake(WholePipeline):
    """Draws grey, saying each step."""

    def __init__(self, steps: int = 2, *, video: bool = False) -> None:
        self.steps = steps
        self.video = video
        self.fails_at: dict[str, BaseException] = {}
        self.log: list[str] = []
        self.closed = False

    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        if payload.prompt == "bad":
            raise InvalidRequestError("no", param="prompt")

    def draw(self, payload: DiffusionInput, params: DiffusionParams, seed: int, on_step: OnStep) -> Any:
        self.log.append(payload.prompt)
        for step in range(self.steps):
            try:
                on_step(step + 1, self.steps)
            except Exception:  # a pipeline that swallows errors of callbacks
                self.log.append("swallowed")
        if payload.prompt in self.fails_at:
            raise self.fails_at[payload.prompt]
        if payload.prompt == "odd":
            return np.zeros((4, 4), dtype=np.uint8)
        if payload.prompt == "flat":
            return np.zeros((1, 1, 1, 4, 3), dtype=np.uint8)
        return np.full((5, 4, 6, 3) if self.video else (4, 6, 3), seed % 256, dtype=np.uint8)


def test_most_urgent_first_and_no_switching() -> None:
    fake = Fake()
    stage = staged(fake)
    put(stage, "late", DiffusionInput("late"), priority=5)
    put(stage, "soon", DiffusionInput("soon"), priority=1)
    stage.step()
    put(stage, "now", DiffusionInput("now"), priority=0)
    assert stage.stats().waiting == 2
    assert stage.stats().running == 1
    stage.drain()
    assert fake.log == ["soon", "now", "late"]


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_a_failing_pipeline_ends_only_its_request(kind: type[BaseException]) -> None:
    fake = Fake()
    fake.fails_at["a"] = error = kind("boom")
    stage = staged(fake)
    put(stage, "a", DiffusionInput("a"))
    put(stage, "b", DiffusionInput("b"), seed=9)
    chunks = stage.drain()
    (failed,) = [chunk for chunk in chunks if chunk.error is not None]
    assert failed.request_id == "a"
    assert type(failed.error) is StageError
    assert failed.error.__cause__ is error
    assert "boom" not in str(failed.error)
    assert pictures(chunks, "b")[0].pixels[0, 0, 0] == 9


def test_our_errors_stay_themselves() -> None:
    fake = Fake()
    fake.fails_at["a"] = error = OmniError("ours")
    stage = staged(fake)
    put(stage, "a", DiffusionInput("a"))
    assert stage.drain()[-1].error is error


@pytest.mark.parametrize(("prompt", "message"), [("odd", "no picture"), ("flat", "not a picture")])
def test_what_is_no_picture_is_an_error(prompt: str, message: str) -> None:
    stage = staged(Fake())
    put(stage, "a", DiffusionInput(prompt))
    last = stage.drain()[-1]
    assert isinstance(last.error, StageError)
    assert message in str(last.error)


SOUND = np.linspace(-1, 1, 40, dtype=np.float32).reshape(20, 2)


class Sounding(Fake):
    """Gives this."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def draw(self, payload: DiffusionInput, params: DiffusionParams, seed: int, on_step: OnStep) -> Any:
        return self.result


def test_sound_alone_and_with_frames() -> None:
    stage = staged(Sounding(AudioChunk(SOUND, 8000)))
    put(stage, "a")
    sound = stage.drain()[-1].payload
    assert isinstance(sound, AudioChunk)
    assert np.array_equal(sound.samples, SOUND)
    frames = np.zeros((3, 4, 6, 3), dtype=np.uint8)
    stage = staged(Sounding(VideoWithAudio(frames, AudioChunk(SOUND, 8000))))
    put(stage, "a")
    video = stage.drain()[-1].payload
    assert isinstance(video, VideoChunk)
    assert video.audio is not None
    assert np.array_equal(video.audio.samples, SOUND)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.full(4, np.nan, dtype=np.float32), "NaN or infinite"),
        (np.zeros((1, 2, 3), dtype=np.float32), "not a sound"),
        (np.zeros(0, dtype=np.float32), "not a sound"),
    ],
)
def test_what_is_no_sound_is_an_error(samples: np.ndarray, message: str) -> None:
    frames = np.zeros((3, 4, 6, 3), dtype=np.uint8)
    for result in (AudioChunk(samples, 8000), VideoWithAudio(frames, AudioChunk(samples, 8000))):
        stage = staged(Sounding(result))
        put(stage, "a")
        last = stage.drain()[-1]
        assert isinstance(last.error, StageError)
        assert message in str(last.error)


@pytest.mark.parametrize(("given", "fps"), [({}, 16.0), ({"fps": 8.0}, 8.0)])
def test_videos(given: Any, fps: float) -> None:
    stage = staged(Fake(video=True))
    put(stage, "a", seed=3, **given)
    video = stage.drain()[-1].payload
    assert isinstance(video, VideoChunk)
    assert video.frames.shape == (5, 4, 6, 3)
    assert (video.fps, video.seed) == (fps, 3)


def test_abort_cannot_be_swallowed() -> None:
    fake = Fake(steps=100)
    stage = staged(fake)
    put(stage, "a", DiffusionInput("a"))
    stage.step()
    stage.abort("a")
    assert not stage.has_work()
    assert fake.log == ["a"]


def test_abort_while_waiting_and_between_pictures() -> None:
    fake = Fake(steps=1)
    stage = staged(fake)
    put(stage, "a", DiffusionInput("a"), n=2)
    put(stage, "b", DiffusionInput("b"))
    stage.abort("b")
    stage.step()
    stage.step()  # the first picture is done, the second not begun
    stage.abort("a")
    assert not stage.has_work()
    assert fake.log == ["a"]
    put(stage, "a", DiffusionInput("again"))
    assert stage.drain()[-1].finish is FinishReason.STOP


def test_close_ends_what_runs() -> None:
    before = threading.active_count()
    stage = staged(Fake(steps=10))
    put(stage, "a")
    stage.step()
    assert threading.active_count() == before + 1
    stage.close()
    assert threading.active_count() == before


def test_wrong_input() -> None:
    stage = staged(Fake())
    info = RequestInfo("a")
    with pytest.raises(InvalidRequestError, match="takes DiffusionParams"):
        stage.check(StageInput(info, SamplingParams(), DiffusionInput(PROMPT)))
    with pytest.raises(StageError, match="takes DiffusionInput"):
        stage.check(StageInput(info, DiffusionParams(), CodecInput()))
    with pytest.raises(InvalidRequestError):
        put(stage, "a", DiffusionInput("bad"))
    put(stage, "a")
    with pytest.raises(InvalidRequestError, match="already"):
        put(stage, "a")
    with pytest.raises(StageError, match="cannot be fed"):
        stage.feed("a", CodecFrames(()))
    stage.feed("gone", CodecFrames(()))
    with pytest.raises(ConfigError) as caught:
        WholeStage("draw", Fake(), DiffusionBudget(cache="first_block:0.1"))
    assert caught.value.param == "draw.cache"


def test_every_form_of_pixels() -> None:
    picture = tiny.picture(6, 4)
    scaled = picture.astype(np.float32) / 255

    class Output:
        def __init__(self, **fields: Any) -> None:
            self.__dict__.update(fields)

    tensor = torch.from_numpy(scaled).permute(2, 0, 1)
    for form in (Image.fromarray(picture), picture, scaled, tensor, Image.fromarray(picture).convert("RGBA")):
        assert np.array_equal(pixels_of(Output(images=[form])), picture)
        assert np.array_equal(pixels_of(Output(frames=[[form, form]])), np.stack([picture, picture]))
    assert np.array_equal(pixels_of(Output(frames=torch.stack([tensor])[None])), picture[None])
    assert np.array_equal(pixels_of(Output(frames=scaled[None, None])), picture[None])
    grey = pixels_of(Output(images=[scaled[..., 0]]))
    assert grey.shape == (4, 6, 3)
    for empty in (Output(), Output(images=[]), (1, 2)):
        with pytest.raises(StageError, match="neither a picture nor a video"):
            pixels_of(empty)


# ------------------------------------------------------------------------------------------ bad checkpoints


def test_pickled_weights_are_refused_before_loading(folder: Path, tmp_path: Path) -> None:
    other = edited(folder, tmp_path / "pickled")
    weights = other / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(CheckpointError, match="only pickled weights"):
        loaded(other)


def test_parts_that_belong_to_one_pipeline(folder: Path, tmp_path: Path) -> None:
    """Stable Diffusion's safety checker is in the pipeline's own module; its weights are looked at like all others."""
    part = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    other = edited(folder, tmp_path / "checked", safety_checker=part)
    (other / "safety_checker").mkdir()
    (other / "safety_checker" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="only pickled weights"):
        loaded(other)


@pytest.mark.parametrize(
    "entry",
    [
        ["os", "system"],
        ["my_code", "Unet"],
        ["diffusers.utils", "x"],
        ["transformers", "_x"],
        ["stable_diffusion", "os"],
    ],
)
def test_foreign_code_is_refused(folder: Path, tmp_path: Path, entry: list[str]) -> None:
    other = edited(folder, tmp_path / "foreign", unet=entry)
    (other / "unet" / "my_code.py").write_text("raise SystemExit('this must never run')")
    with pytest.raises(CheckpointError, match="code in a checkpoint is not run"):
        loaded(other)


def test_a_part_outside_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    other = edited(folder, tmp_path / "outside", **{"../unet": ["diffusers", "UNet2DConditionModel"]})
    with pytest.raises(CheckpointError, match="not a folder in it"):
        loaded(other)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("MyOwnPipeline", "is not a pipeline of diffusers"),
        ("_Pipeline", "is not a pipeline of diffusers"),
        ("UNet2DModel", "is not a pipeline of diffusers"),
        ("StableDiffusionAttendAndExcitePipeline", "cannot be called without token_indices"),
        ("KandinskyCombinedPipeline", "fetches other checkpoints"),
    ],
)
def test_pipelines_that_cannot_be_served(folder: Path, tmp_path: Path, name: str, says: str) -> None:
    other = edited(folder, tmp_path / "other", _class_name=name)
    (other / "pipeline.py").write_text("raise SystemExit('this must never run')")
    with pytest.raises(UnsupportedModelError, match=says):
        loaded(other)


def test_missing_weights_are_an_error(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    other = edited(folder, tmp_path / "missing")
    path = other / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(next(name for name in tensors if "mlp" in name))
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="missing"):
        loaded(other)
