"""Wan's components against diffusers' pipelines: every layout of checkpoint, bad requests, batches of mixed rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from omnistage.cli.model_runner import OmniRunner
from omnistage.config import OmniEngineArgs, resolve
from omnistage.core.errors import CheckpointError, InvalidRequestError, UnsupportedModalityError
from omnistage.core.family import LoadContext
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Condition, DiffusionInput, Modality
from omnistage.engines.diffusion.component import Lane, Row
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import Case, DiffusionResult, drive, load_components, rows_of
from omnistage.models.registry import REGISTRY
from omnistage.models.wan import FAMILY, tiny, verify
from omnistage.models.wan.components import Decoder, Denoiser, Encoder
from omnistage.pipeline.build import load_component

VARIANTS = tiny.VARIANTS
SMALL = {"width": 64, "height": 32, "num_frames": 5, "steps": 3, "seed": 1}


@dataclass(frozen=True)
class Model:
    folder: Path
    parts: tuple[Encoder, Denoiser, Decoder]
    reference: verify.Reference

    def draw(self, case: Case) -> DiffusionResult:
        return drive(*self.parts, case)


def load(folder: Path) -> Model:
    parts: Any = load_components(OmniRunner(folder))
    return Model(folder, parts, verify.Reference(folder))


@pytest.fixture(scope="module")
def model(checkpoint_of: Callable[..., Path]) -> Callable[[str], Model]:
    """Loads each variant once, when a test first asks for it."""
    loaded: dict[str, Model] = {}

    def get(variant: Any) -> Model:
        if variant not in loaded:
            loaded[variant] = load(checkpoint_of("wan", variant))
        return loaded[variant]

    return get


def case(prompt: str = "a red cat", pictures: int = 0, **params: object) -> Case:
    images = (picture(80, 60, 3), picture(40, 56, 4))[:pictures]
    return Case(prompt, DiffusionInput(prompt, images), DiffusionParams.parse({**SMALL, **params}))


def fits(variant: str) -> int:
    """A number of pictures that the variant takes."""
    return {"i2v_clip": 1, "flf2v": 2, "i2v_experts": 1, "ti2v": 1}.get(variant, 0)


# ------------------------------------------------------------------------------------------------- parity

CASES = [
    ("t2v", case()),
    ("t2v", case("a quiet river", width=96, height=48, num_frames=9, steps=6, negative_prompt="people", seed=5)),
    ("t2v", case("music", width=32, height=80, num_frames=1, steps=1, guidance=2.5)),
    ("t2v", case("a bird", guidance=1.0, num_frames=13, steps=4)),
    ("t2v", case("a bird", guidance=0.0, steps=2)),
    ("t2v", case("the old &amp; new  school,\n  " + "many trees " * 300, max_sequence_length=64)),
    ("t2v_experts", case(steps=8)),
    ("t2v_experts", case("two", guidance=1.0, steps=5, height=64, seed=2)),
    ("t2v_experts", case("three", negative_prompt="water", guidance=7.5, steps=1)),
    ("i2v_clip", case(pictures=1, steps=4)),
    ("i2v_clip", case(pictures=1, guidance=1.0, height=64, num_frames=9)),
    ("i2v_clip", case(pictures=1, num_frames=1, steps=2, negative_prompt="noise")),
    ("flf2v", case(pictures=2)),
    ("i2v_experts", case(pictures=1, steps=8, negative_prompt="people")),
    ("i2v_experts", case(pictures=2, guidance=1.0, num_frames=9)),
    ("ti2v", case()),
    ("ti2v", case(guidance=1.0, num_frames=9, height=64)),
    ("ti2v", case(pictures=1, steps=5, negative_prompt="rain")),
    ("ti2v", case(pictures=1, guidance=1.0, num_frames=9, width=32)),
]


@pytest.mark.parametrize(("variant", "asked"), CASES)
def test_matches_diffusers(model: Callable[[str], Model], variant: str, asked: Case) -> None:
    loaded = model(variant)
    ours = loaded.draw(asked)
    assert ours.pixels.dtype == np.uint8
    params = asked.params
    assert ours.pixels.shape == (params.num_frames, params.height, params.width, 3)
    rows = rows_of(asked, ours, loaded.reference(asked))
    assert all(row.ok for row in rows), rows


@pytest.mark.parametrize("variant", ["t2v", "ti2v"])
def test_reference_is_what_diffusers_gives(model: Callable[[str], Model], variant: str) -> None:
    asked = case("a cat", fits(variant))
    reference = model(variant).reference
    whole = (reference.generate(asked, "np") * 255).round().astype(np.uint8)
    np.testing.assert_allclose(reference(asked).pixels.astype(int), whole, atol=1)


def test_defaults_are_those_of_diffusers(model: Callable[[str], Model]) -> None:
    loaded = model("t2v")
    bare = DiffusionParams.parse({"seed": 0})
    assert loaded.parts[0].size(DiffusionInput("x"), bare) == (832, 480)
    few = {"width": 32, "height": 32, "num_frames": 1, "seed": 0}
    asked = Case("x", DiffusionInput("x"), DiffusionParams.parse(few))  # 50 steps, guidance 5
    assert all(row.ok for row in rows_of(asked, loaded.draw(asked), loaded.reference(asked)))


def test_flow_matching_scheduler(model: Callable[[str], Model], tmp_path: Path) -> None:
    folder = tmp_path / "flow"
    shutil.copytree(model("t2v_experts").folder, folder)
    shutil.rmtree(folder / "scheduler")
    diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0).save_pretrained(folder / "scheduler")
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    (folder / "model_index.json").write_text(json.dumps(index))
    loaded, asked = load(folder), case(steps=6)
    assert all(row.ok for row in rows_of(asked, loaded.draw(asked), loaded.reference(asked)))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
        ("DPMSolverMultistepScheduler", {"flow_shift": 3.0}),
        ("DEISMultistepScheduler", {"flow_shift": 3.0}),
        ("UniPCMultistepScheduler", {"flow_shift": 3.0}),
    ],
)
def test_another_scheduler(model: Callable[[str], Model], name: str, settings: dict[str, object]) -> None:
    loaded = model("t2v")
    pipe = loaded.reference.pipe
    own = pipe.scheduler
    if "flow_shift" in settings:
        settings = {**settings, "prediction_type": "flow_prediction", "use_flow_sigmas": True}
    pipe.scheduler = getattr(diffusers, name)(**settings)
    try:
        expected = loaded.reference(case(steps=5))
    finally:
        pipe.scheduler = own
    asked = case(steps=5, scheduler=name)
    loaded.parts[1].check(asked.params)
    assert all(row.ok for row in rows_of(asked, loaded.draw(asked), expected))


def test_verify_takes_more_pictures_with_every_case(model: Callable[[str], Model]) -> None:
    seen: list[str] = []
    verify.Reference.run(OmniRunner(model("ti2v").folder), cases=2, seed=3, progress=lambda name, _: seen.append(name))
    assert [name.split(", ")[-1] for name in seen] == ["0 pictures 1", "1 pictures 2", "all at once"]


# ------------------------------------------------------------------------------- rows of several requests


@torch.inference_mode()
def opened(loaded: Model, asked: Case, steps_done: int = 0) -> Lane:
    encoder, denoiser, _ = loaded.parts
    encoded = encoder.encode(encoder.jobs(asked.payload, asked.params))
    condition = encoder.condition(asked.payload, asked.params, encoded)
    lane = denoiser.open(condition, asked.params, torch.Generator().manual_seed(asked.params.seed or 0))
    for _ in range(steps_done):
        denoiser.advance(lane, [denoiser.forward([row])[0] for row in denoiser.rows(lane)])
    return lane


@pytest.mark.parametrize("variant", VARIANTS)
def test_mixed_batch_equals_each_alone(model: Callable[[str], Model], variant: str) -> None:
    loaded, pictures = model(variant), fits(variant)
    denoiser = loaded.parts[1]
    lanes = [
        opened(loaded, case("a red cat", pictures, steps=12, seed=4)),
        opened(loaded, case("a quiet river", pictures, steps=30, seed=5, negative_prompt="people"), 2),
        opened(loaded, case("music", pictures, steps=15, guidance=1.0, seed=6), 1),
    ]
    rows = [row for lane in lanes for row in denoiser.rows(lane)]
    assert [row.branch for row in rows] == ["positive", "negative", "positive", "negative", "positive"]
    assert len({denoiser.group(row) for row in rows}) == 1
    with torch.inference_mode():
        together = denoiser.forward(rows)
        for row, prediction in zip(rows, together, strict=True):
            torch.testing.assert_close(prediction, denoiser.forward([row])[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("variant", ["t2v_experts", "i2v_experts"])
def test_experts_do_not_share_a_forward(model: Callable[[str], Model], variant: str) -> None:
    loaded, pictures = model(variant), fits(variant)
    denoiser = loaded.parts[1]
    assert len(denoiser.transformers) == 2
    early = opened(loaded, case("one", pictures, steps=8))
    late = opened(loaded, case("two", pictures, steps=8), 6)
    assert denoiser.group(Row(early, "positive")) != denoiser.group(Row(late, "positive"))
    assert denoiser.group(Row(early, "positive")) == denoiser.group(Row(early, "negative"))
    experts = early.context["experts"]
    assert experts == sorted(experts)
    assert set(experts) == {0, 1}


def test_sizes_and_frames_do_not_share_a_forward(model: Callable[[str], Model]) -> None:
    loaded = model("t2v")
    lanes = [
        opened(loaded, case(**size)) for size in ({}, {"width": 32}, {"num_frames": 9}, {"max_sequence_length": 64})
    ]
    assert len({loaded.parts[1].group(Row(lane, "positive")) for lane in lanes}) == 4


@torch.inference_mode()
def test_lanes_in_turns_keep_their_own_schedule(model: Callable[[str], Model]) -> None:
    loaded = model("t2v_experts")
    denoiser = loaded.parts[1]
    asked = [case("one", steps=4, seed=1), case("two", steps=7, seed=2), case("three", steps=4, seed=3, guidance=1.0)]
    lanes = [opened(loaded, each) for each in asked]
    while not all(lane.done for lane in lanes):
        for lane in (lane for lane in lanes if not lane.done):
            denoiser.advance(lane, [denoiser.forward([row])[0] for row in denoiser.rows(lane)])
    for lane, each in zip(lanes, asked, strict=True):
        torch.testing.assert_close(denoiser.result(lane), loaded.draw(each).latents, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_encoding_together_equals_alone(model: Callable[[str], Model]) -> None:
    encoder = model("t2v").parts[0]
    jobs = [encoder.jobs(each.payload, each.params)[0] for each in (case("a cat"), case("many trees " * 40))]
    for job, together in zip(jobs, encoder.encode(jobs), strict=True):
        torch.testing.assert_close(together["embeds"], encoder.encode([job])[0]["embeds"], atol=2e-5, rtol=0)


@torch.inference_mode()
def test_decoding_together_equals_alone(model: Callable[[str], Model]) -> None:
    loaded = model("t2v")
    drawn = [loaded.draw(case("one")), loaded.draw(case("two", seed=9))]
    decoder = loaded.parts[2]
    together = decoder.decode([each.latents for each in drawn], width=64, height=32, num_frames=5)
    for each, frames in zip(drawn, together, strict=True):
        np.testing.assert_array_equal(frames, each.pixels)


# -------------------------------------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("variant", "pictures", "params", "param", "message"),
    [
        ("t2v", 0, {"width": 40}, "width", "multiple of 16, got 40; use 32 or 48"),
        ("ti2v", 0, {"height": 48}, "height", "multiple of 32, got 48; use 32 or 64"),
        ("t2v", 0, {"num_frames": 6}, "num_frames", "one more than a multiple of 4, got 6; use 5 or 9"),
        ("t2v", 0, {"num_frames": 4}, "num_frames", "use 1 or 5"),
        ("t2v", 1, {}, "image", "takes no images"),
        ("i2v_clip", 0, {}, "image", "needs a picture to start from"),
        ("i2v_clip", 2, {}, "image", "takes 1 images, got 2"),
        ("flf2v", 1, {}, "image", "needs two pictures"),
        ("i2v_experts", 0, {}, "image", "needs a picture"),
        ("i2v_experts", 2, {"num_frames": 1}, "num_frames", "at least 5 frames"),
        ("ti2v", 2, {}, "image", "takes 1 images"),
        ("ti2v", 1, {"strength": 0.5}, "strength", "start from noise"),
        ("t2v", 0, {"strength": 0.5}, "strength", "omit it"),
        ("i2v_clip", 1, {"max_sequence_length": 256}, "max_sequence_length", "exactly 512"),
    ],
)
def test_bad_requests(
    model: Callable[[str], Model], variant: str, pictures: int, params: dict[str, object], param: str, message: str
) -> None:
    asked = case("x", pictures, **params)
    with pytest.raises(InvalidRequestError, match=message) as caught:
        model(variant).parts[0].check(asked.payload, asked.params)
    assert caught.value.param == param


def test_masks_and_schedulers_are_refused(model: Callable[[str], Model]) -> None:
    encoder, denoiser, _ = model("ti2v").parts
    photo = picture(32, 32)
    with pytest.raises(InvalidRequestError, match="mask: not supported"):
        encoder.check(DiffusionInput("x", (photo,), np.zeros((32, 32), np.uint8)), DiffusionParams())
    with pytest.raises(InvalidRequestError, match="no scheduler 'Magic'"):
        opened(model("ti2v"), case(scheduler="Magic"))
    assert denoiser.expanded


def test_picture_gives_the_size(model: Callable[[str], Model]) -> None:
    encoder = model("i2v_clip").parts[0]

    def size(wide: int, tall: int, **params: object) -> tuple[int, int]:
        return encoder.size(DiffusionInput("x", (picture(wide, tall),)), DiffusionParams.parse(params))

    assert size(832, 480) == (832, 480)
    assert size(600, 600) == (624, 624)
    assert size(300, 600) == (432, 880)
    assert size(600, 300, width=320) == (320, 160)
    assert size(600, 300, height=320) == (640, 320)
    assert size(600, 300, width=64, height=48) == (64, 48)
    assert size(2000, 10) == (8928, 32)
    assert model("ti2v").parts[0].size(DiffusionInput("x"), DiffusionParams()) == (1280, 704)


def test_tokens(model: Callable[[str], Model]) -> None:
    assert model("t2v").parts[1].tokens(832, 480, 81) == 21 * 30 * 52
    assert model("ti2v").parts[1].tokens(1280, 704, 121) == 31 * 22 * 40
    assert opened(model("t2v"), case()).tokens == 2 * 2 * 4
    resolved = resolve(OmniEngineArgs.parse({"model": str(model("t2v").folder)}), registry=REGISTRY)
    budget: Any = resolved.config.pipeline.stages["denoise"].budget
    assert 2 * model("t2v").parts[1].tokens(1280, 720, 81) <= budget.max_batch_tokens


# ------------------------------------------------------------------------------------ checkpoints and loading


def test_each_stage_has_only_its_weights(model: Callable[[str], Model]) -> None:
    encoder, denoiser, decoder = model("t2v").parts
    assert encoder.pipe.vae.quant_conv.weight.is_meta
    assert encoder.pipe.transformer.patch_embedding.weight.is_meta
    assert denoiser.pipe.text_encoder is None
    assert denoiser.pipe.vae.quant_conv.weight.is_meta
    assert not list(decoder.vae.encoder.parameters())
    assert decoder.pipe.transformer is None
    encoder = model("i2v_clip").parts[0]
    assert not list(encoder.pipe.vae.decoder.parameters())
    assert not encoder.pipe.vae.quant_conv.weight.is_meta
    assert (decoder.modality, decoder.fps) == (Modality.VIDEO, 16.0)
    assert model("ti2v").parts[2].fps == 24.0


@torch.inference_mode()
@pytest.mark.parametrize("variant", ["i2v_clip", "ti2v"])
def test_bfloat16(model: Callable[[str], Model], variant: str) -> None:
    loaded, asked = model(variant), case(pictures=1, steps=4)
    resolved = resolve(OmniEngineArgs.parse({"model": str(loaded.folder), "device": "cpu"}), registry=REGISTRY)
    parts: Any = [
        load_component(LoadContext(resolved.model, name, stage, torch.device("cpu"), torch.bfloat16))
        for name, stage in resolved.config.pipeline.stages.items()
    ]
    assert parts[1].transformer.dtype == torch.bfloat16
    assert parts[0].pipe.vae.dtype == parts[2].vae.dtype == torch.float32
    rounded, exact = drive(*parts, asked), loaded.draw(asked)
    assert rounded.latents.dtype == torch.float32
    assert float((rounded.latents - exact.latents).abs().mean()) < 0.1


def test_two_experts_need_both(model: Callable[[str], Model], tmp_path: Path) -> None:
    folder = tmp_path / "half"
    shutil.copytree(model("t2v_experts").folder, folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "transformer_2": [None, None]}))
    with pytest.raises(CheckpointError, match="no transformer_2"):
        load_components(OmniRunner(folder))
    (folder / "model_index.json").write_text(json.dumps({**index, "transformer": [None, None]}))
    with pytest.raises(CheckpointError, match="no transformer"):
        load_components(OmniRunner(folder))


def test_processor_takes_pictures_where_the_model_does(model: Callable[[str], Model]) -> None:
    for variant in VARIANTS:
        resolved = resolve(OmniEngineArgs.parse({"model": str(model(variant).folder)}), registry=REGISTRY)
        assert resolved.model.family == "wan"
        modalities = FAMILY.processor(resolved.model).input_modalities
        assert (Modality.IMAGE in modalities) == bool(fits(variant))


def test_the_text_encoder_of_the_small_checkpoint_is_that_of_wan(checkpoint_of: Callable[..., Path]) -> None:
    pipe = diffusers.DiffusionPipeline.from_pretrained(checkpoint_of("wan"))
    assert type(pipe.text_encoder).__name__ == "UMT5EncoderModel"


def test_tiny_grows_to_the_published_shapes() -> None:
    full = tiny.transformer(1.0, "t2v", clip=None)
    assert (full.config.num_attention_heads, full.config.attention_head_dim, full.config.num_layers) == (12, 128, 30)
    assert (full.config.ffn_dim, full.config.text_dim, full.config.freq_dim) == (8960, 4096, 256)
    clip = tiny.image_encoder(1.0)
    assert (clip.config.hidden_size, clip.config.image_size, clip.config.patch_size) == (1280, 224, 14)
    flf = tiny.transformer(1.0, "flf2v", clip=clip)
    assert (flf.config.in_channels, flf.config.pos_embed_seq_len, flf.config.image_dim) == (36, 514, 1280)
    sizes = [sum(p.numel() for p in tiny.transformer(s, "t2v", clip=None).parameters()) for s in (0.0, 0.2, 0.4)]
    assert sizes == sorted(sizes)
    assert tiny.text_encoder(1.0).config.vocab_size == 256384
    assert tiny.autoencoder(1.0, residual=True).config.decoder_base_dim == 256


@pytest.mark.parametrize("variant", ["t2v", "i2v_experts", "ti2v"])
def test_everything_asked_for_changes_the_video(model: Callable[[str], Model], variant: str) -> None:
    loaded, pictures = model(variant), fits(variant)
    base = {"width": 32, "height": 32, "steps": 3}
    video = loaded.draw(case("a red cat", pictures, **base)).pixels.astype(int)
    assert video.std() > 25
    assert min(frame.std() for frame in video) > 10
    assert np.abs(np.diff(video, axis=0)).mean() > 5
    others = [
        case("a quiet river", pictures, **base),
        case("a red cat", pictures, **base, negative_prompt="people"),
        case("a red cat", pictures, **base, guidance=2.0),
        case("a red cat", pictures, **base, seed=8),
    ]
    for other in others:
        assert np.abs(loaded.draw(other).pixels.astype(int) - video).mean() > 1.0, other
    if pictures:
        asked = case("a red cat", pictures, **base)
        changed = Case("x", DiffusionInput("a red cat", (picture(64, 64, 99),)), asked.params)
        assert np.abs(loaded.draw(changed).pixels.astype(int) - video).mean() > 3.0


def test_condition_is_without_batch_dimension(model: Callable[[str], Model]) -> None:
    condition: Condition = opened(model("i2v_clip"), case(pictures=1)).condition
    assert condition.positive["embeds"].shape == (512, 64)
    assert condition.shared["picture"].shape == (20, 2, 4, 8)
    assert (condition.width, condition.height, condition.num_frames) == (64, 32, 5)


def test_pictures_for_text_only_models_are_refused_early(model: Callable[[str], Model]) -> None:
    resolved = resolve(OmniEngineArgs.parse({"model": str(model("t2v").folder)}), registry=REGISTRY)
    processor: Any = FAMILY.processor(resolved.model)
    with pytest.raises(UnsupportedModalityError, match="text alone"):
        processor.draw("x", [picture(32, 32)], None, DiffusionParams())
