"""Stable Diffusion 3 on our components against diffusers' three pipelines, and what we refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from omnistage.cli.model_runner import OmniRunner
from omnistage.core.errors import (
    CheckpointError,
    InvalidRequestError,
    LimitExceededError,
    OmniError,
    UnsupportedModelError,
)
from omnistage.models._diffusers.loading import Parts, diffusers
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import Case, drive, load_components, rows_of
from omnistage.models.stable_diffusion_3 import tiny, verify
from tests.diffusion_harness import Components, case, check_decoding, check_differ, check_groups, opened

PHOTO = picture(96, 48, 3)
MASK = np.zeros((48, 96), np.uint8)
MASK[10:30, 20:80] = 255
SMALL = {"width": 64, "height": 64, "max_sequence_length": 24}
WIDE = {"width": 96, "height": 48, "max_sequence_length": 24}


@pytest.fixture(scope="module")
def folder(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("stable_diffusion_3")


@pytest.fixture(scope="module")
def parts(folder: Path) -> Components:
    return load_components(OmniRunner(folder))


@pytest.fixture(scope="module")
def reference(folder: Path) -> verify.Reference:
    return verify.Reference(folder)


TEXT = [
    case(**SMALL, steps=4),
    case(**SMALL, steps=1, guidance=2.0),
    case(**WIDE, steps=3, guidance=4.5, negative_prompt="people and cars"),
    case(width=48, height=80, steps=5, guidance=1.0, max_sequence_length=24),
    case(width=32, height=112, steps=2, guidance=0.0, max_sequence_length=24),
    case("a very long story about the robot in the garden " * 12, **SMALL, steps=2),
    case("no length given", width=32, height=32, steps=2, seed=2**40),
    case("Ein Bär, 7 Vögel \U0001f3b7", **SMALL, steps=2, seed=0),
    case("the model's own size", steps=1, max_sequence_length=24),
]
CHANGES = [
    case("at night", images=(PHOTO,), **WIDE, steps=5, strength=0.7),
    case("at night", images=(PHOTO,), **WIDE, steps=4),
    case("at night", images=(PHOTO,), **SMALL, steps=3, strength=1.0, guidance=1.0),
    case("at night", images=(PHOTO,), **WIDE, steps=7, strength=0.05, negative_prompt="day"),
]
PAINTINGS = [
    case("a bird", images=(PHOTO,), mask=MASK, **WIDE, steps=4, strength=0.8),
    case("a bird", images=(PHOTO,), mask=MASK, **WIDE, steps=3, strength=1.0, guidance=1.0),
    case("a bird", images=(PHOTO,), mask=MASK, **SMALL, steps=4, negative_prompt="a plane"),
]


@pytest.mark.parametrize("asked", [*TEXT, *CHANGES, *PAINTINGS])
def test_as_diffusers_draws(asked: Case, parts: Components, reference: verify.Reference) -> None:
    rows = rows_of(asked, drive(*parts, asked), reference(asked))
    assert all(row.ok for row in rows), rows


def test_defaults_are_those_of_diffusers(parts: Components, reference: verify.Reference) -> None:
    asked = case(width=32, height=32, max_sequence_length=24)
    rows = rows_of(asked, drive(*parts, asked), reference(asked))
    assert all(row.ok for row in rows), rows


def test_pixels_outside_the_mask_stay(parts: Components) -> None:
    asked = PAINTINGS[0]
    drawn = drive(*parts, asked)
    with torch.inference_mode():
        lane = opened(parts, asked)
    kept = lane.context["mask"][0] == 0
    assert bool(kept.any())
    assert not bool(kept.all())
    assert torch.equal(drawn.latents[:, kept], lane.context["picture"][0][:, kept])
    assert not torch.allclose(drawn.latents[:, ~kept], lane.context["picture"][0][:, ~kept], atol=0.1)


def test_every_parameter_counts(parts: Components) -> None:
    base = drive(*parts, case(**SMALL, steps=3))
    others = {
        "prompt": case("two blue dogs", **SMALL, steps=3),
        "seed": case(**SMALL, steps=3, seed=6),
        "guidance": case(**SMALL, steps=3, guidance=3.0),
        "no guidance": case(**SMALL, steps=3, guidance=1.0),
        "negative": case(**SMALL, steps=3, negative_prompt="fog"),
        "steps": case(**SMALL, steps=4),
        "picture": case(images=(PHOTO,), **SMALL, steps=3),
        "strength": case(images=(PHOTO,), **SMALL, steps=3, strength=0.3),
    }
    drawn = {"base": base} | {name: drive(*parts, asked) for name, asked in others.items()}
    check_differ(drawn, 1)


# ----------------------------------------------------------------------------------------------- batching


@torch.inference_mode()
def test_rows_do_not_feel_their_neighbours(parts: Components) -> None:
    lanes = [
        opened(parts, case(**WIDE, steps=6), 2),
        opened(parts, case("a boat", **WIDE, steps=3, guidance=3.0, negative_prompt="sea", seed=9), 1),
        opened(parts, case("a hill", **WIDE, steps=4, guidance=1.0, seed=2)),
        opened(parts, PAINTINGS[0], 1),
        opened(parts, case("a wall", **SMALL, steps=4, seed=3), 1),
    ]
    check_groups(parts[1], lanes, [2, 7])


@torch.inference_mode()
def test_texts_encoded_together_are_those_encoded_alone(parts: Components) -> None:
    encoder = parts[0]
    jobs = [job for asked in TEXT[:3] for job in encoder.jobs(asked.payload, asked.params)]
    for job, together in zip(jobs, encoder.encode(jobs), strict=True):
        (alone,) = encoder.encode([job])
        assert all(float((together[name] - alone[name]).abs().max()) < 2e-5 for name in alone)


def test_pictures_decoded_together_are_those_decoded_alone(parts: Components) -> None:
    check_decoding(parts[2], 16, 6, 10)


# ----------------------------------------------------------------------------------------------- checkpoints


def test_stages_hold_only_their_weights(parts: Components) -> None:
    encoder, denoiser, decoder = (part.pipe for part in parts)  # type: ignore[attr-defined]
    assert not list(encoder.vae.decoder.parameters())
    assert encoder.vae.encoder is not None
    assert not list(decoder.vae.encoder.parameters())
    assert decoder.vae.decoder is not None
    assert encoder.transformer.proj_out.weight.is_meta
    assert denoiser.vae.decoder.conv_in.weight.is_meta
    assert denoiser.text_encoder is None
    assert decoder.text_encoder_3 is None


def _variant(folder: Path, made: Path, *left_out: str) -> None:
    """The same checkpoint without some of its parts, which the test then puts there."""
    for path in folder.iterdir():
        if path.name not in left_out:
            (made / path.name).symlink_to(path)


def test_checkpoints_without_t5_are_drawn_with(folder: Path, tmp_path: Path) -> None:
    _variant(folder, tmp_path, "text_encoder_3", "tokenizer_3", "model_index.json")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    rows = rows_of(TEXT[0], drive(*load_components(OmniRunner(tmp_path)), TEXT[0]), verify.Reference(tmp_path)(TEXT[0]))
    assert all(row.ok for row in rows), rows


def test_schedules_may_depend_on_the_size(folder: Path, tmp_path: Path) -> None:
    _variant(folder, tmp_path, "scheduler")
    scheduler = diffusers().FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    scheduler.save_pretrained(tmp_path / "scheduler")
    parts, reference = load_components(OmniRunner(tmp_path)), verify.Reference(tmp_path)
    for asked in (TEXT[2], CHANGES[0]):
        rows = rows_of(asked, drive(*parts, asked), reference(asked))
        assert all(row.ok for row in rows), rows


def test_transformers_made_for_inpainting_alone_are_refused(folder: Path, tmp_path: Path) -> None:
    _variant(folder, tmp_path, "transformer")
    made = tiny.transformer(0.0, pooled=64)
    model = type(made)(**{**made.config, "in_channels": 33})
    model.save_pretrained(tmp_path / "transformer")
    with pytest.raises(UnsupportedModelError, match="33 channels"):
        load_components(OmniRunner(tmp_path))


# ----------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("asked", "error", "param"),
    [
        (case(width=65, height=64), InvalidRequestError, "width"),
        (case(width=64, height=72), InvalidRequestError, "height"),
        (case(width=400, height=64), LimitExceededError, "width"),
        (case(width=64, height=400), LimitExceededError, "height"),
        (case(images=(picture(640, 48),)), LimitExceededError, "width"),
        (case(max_sequence_length=513), LimitExceededError, "max_sequence_length"),
        (case(images=(PHOTO, PHOTO)), InvalidRequestError, "image"),
        (case(strength=0.5), InvalidRequestError, "strength"),
        (case(mask=MASK), InvalidRequestError, "mask"),
        (case(images=(PHOTO,), mask=MASK[:40]), InvalidRequestError, "mask"),
    ],
)
def test_refusals_name_the_parameter(asked: Case, error: type[OmniError], param: str, parts: Components) -> None:
    with pytest.raises(error) as raised:
        parts[0].check(asked.payload, asked.params)
    assert raised.value.param == param


def test_an_input_picture_gives_the_size(parts: Components) -> None:
    asked = case(images=(picture(100, 50),), steps=2)
    assert drive(*parts, asked).pixels.shape == (48, 96, 3)


def test_verify_finds_a_weight_that_is_changed_on_our_side(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Parts.load_model

    def changed(self: Parts, name: str, device: torch.device, dtype: torch.dtype) -> object:
        model = load(self, name, device, dtype)
        if name == "transformer":
            model.proj_out.bias += 0.1
        return model

    monkeypatch.setattr(Parts, "load_model", changed)
    rows = verify.Reference.run(OmniRunner(folder), cases=1)
    assert [row.quantity for row in rows if not row.ok] == ["latents", "pixels", "pixels, all at once"]


# ---------------------------------------------------------------------------------------- hostile checkpoints


def _shard_index(part: Path, file: str) -> None:
    weights = part / "diffusion_pytorch_model.safetensors"
    with safe_open(weights, framework="pt") as opened:
        names = list(opened.keys())
    weights.rename(part / "other.safetensors")
    text = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, file)})
    (part / "diffusion_pytorch_model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize("file", ["weights.bin", "../vae/x.safetensors", "/etc/x.safetensors", "gone.safetensors"])
def test_an_index_of_shards_names_safetensors_of_its_folder_only(folder: Path, tmp_path: Path, file: str) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    torch.save({}, tmp_path / "copy" / "transformer" / "weights.bin")
    _shard_index(tmp_path / "copy" / "transformer", file)
    with pytest.raises(CheckpointError, match=r"refused|gone\.safetensors is missing"):
        load_components(OmniRunner(tmp_path / "copy"))


@pytest.mark.parametrize(
    ("part", "named", "reason"),
    [
        ("tokenizer", ["diffusers", "DDPMPipeline"], "whole pipeline"),
        ("tokenizer", ["transformers", "CLIPTextModel"], "is a network"),
        ("text_encoder", ["transformers", "CLIPTokenizer"], "is not a network"),
        ("transformer", ["transformers", "CLIPTextModel"], "not a model of diffusers"),
    ],
)
def test_a_part_is_of_the_kind_that_it_must_be(
    folder: Path, tmp_path: Path, part: str, named: list[str], reason: str
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), part: named}))
    with pytest.raises(CheckpointError, match=reason):
        load_components(OmniRunner(tmp_path / "copy"))


@pytest.mark.parametrize(
    ("part", "settings", "reason"),
    [
        ("text_encoder", {"attn_implementation": "kernels-community/flash-attn"}, "code is not fetched"),
        ("transformer", {"num_layers": 10**9}, "num_layers=1000000000"),
        ("vae", {"block_out_channels": [8000] * 4}, "fetch the model again"),
    ],
)
def test_a_configuration_that_takes_too_much_is_refused_before_it_does(
    folder: Path, tmp_path: Path, part: str, settings: dict[str, object], reason: str
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / part / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    with pytest.raises(CheckpointError, match=reason):
        load_components(OmniRunner(tmp_path / "copy"))
