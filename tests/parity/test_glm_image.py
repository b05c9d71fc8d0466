"""GLM-Image against transformers' `generate` and diffusers' pipeline: the same tokens, then the same picture."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omnistage.cli.model_runner import OmniRunner
from omnistage.config import ARBudget, OmniEngineArgs
from omnistage.core.errors import (
    CapacityError,
    CheckpointError,
    InvalidRequestError,
    OmniError,
    UnsupportedModalityError,
    UnsupportedModelError,
)
from omnistage.core.params import DiffusionParams, SamplingParams
from omnistage.core.types import ARInput, DiffusionInput, FinishReason, RequestInfo, StageChunk, StageInput, TokenChunk
from omnistage.engines.ar.stage import ARStage
from omnistage.engines.diffusion.component import Denoiser, Lane, LatentDecoder, PromptEncoder, Row
from omnistage.models._diffusers.verify import (
    LATENT_TOLERANCE,
    PIXEL_TOLERANCE,
    Case,
    DiffusionResult,
    drive,
    load_components,
    rows_of,
)
from omnistage.models.glm_image import tiny, verify
from omnistage.models.glm_image.bridges import prior2encode
from omnistage.models.glm_image.layout import fitted_size, generated_positions, target_grids
from omnistage.models.glm_image.processor import GlmImageInputProcessor
from omnistage.models.glm_image.verify import PriorOutput, Reference
from omnistage.omni import Omni
from omnistage.pipeline.build import build_parts

Parts = tuple[PromptEncoder, Denoiser, LatentDecoder]


def _picture(seed: int, width: int, height: int) -> np.ndarray:
    """Smooth colours with some noise."""
    rng = np.random.default_rng(seed)
    coarse = np.kron(rng.integers(0, 256, (height // 16, width // 16, 3)), np.ones((16, 16, 1)))
    return (0.8 * coarse + 0.2 * rng.integers(0, 256, (height, width, 3))).astype(np.uint8)


def _params(width: int, height: int, steps: int, guidance: float | None, seed: int) -> DiffusionParams:
    return DiffusionParams(width=width, height=height, steps=steps, guidance=guidance, seed=seed)


REQUESTS = (
    Case("square", DiffusionInput("a cat under a tree"), _params(64, 64, 3, 1.5, 0)),
    Case("wide", DiffusionInput("a sign that says 'OPEN'"), _params(128, 64, 2, 4.0, 1)),
    Case("tall", DiffusionInput('a shop called "第三" and "Straße"'), _params(64, 160, 4, None, 2)),
    Case("edit", DiffusionInput("make it 'blue'", (_picture(1, 96, 64),)), _params(64, 96, 3, 1.5, 4)),
    Case(
        "two",
        DiffusionInput("put both together", (_picture(2, 64, 64), _picture(3, 64, 128))),
        _params(96, 96, 2, 3.0, 5),
    ),
    Case(
        "unguided",
        DiffusionInput("a 'short' and a 'much longer' word", (_picture(4, 64, 64),)),
        _params(64, 64, 2, 1.0, 6),
    ),
)
EDIT = REQUESTS[3]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("glm_image")


@pytest.fixture(scope="module")
def parts(folder: Path) -> Parts:
    return load_components(OmniRunner(folder))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def processor(folder: Path) -> GlmImageInputProcessor:
    return GlmImageInputProcessor.load(folder)


@pytest.fixture(scope="module")
def stage(folder: Path) -> ARStage:
    return verify.load_prior_stage(OmniRunner(folder))


@pytest.fixture(scope="module")
def written(stage: ARStage, processor: GlmImageInputProcessor) -> dict[str, PriorOutput]:
    """All requests in one batch of ours."""
    found = verify.write_ours(stage, processor, REQUESTS)
    stage.check_integrity()
    return {request.name: item for request, item in zip(REQUESTS, found, strict=True)}


# --------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: r.name)
def test_greedy_tokens_are_those_of_transformers(
    request_: Case, written: dict[str, PriorOutput], reference: Reference
) -> None:
    ours, theirs = written[request_.name], reference.write(request_)
    assert ours.tokens == theirs.tokens
    assert ours.drawing.tokens == theirs.drawing.tokens
    assert verify.differing(ours, theirs) == 0.0
    assert len(set(ours.tokens)) > 3


def test_a_request_alone_writes_what_it_writes_in_a_batch(
    stage: ARStage, processor: GlmImageInputProcessor, written: dict[str, PriorOutput]
) -> None:
    for request in (REQUESTS[0], EDIT):
        assert verify.write_ours(stage, processor, [request])[0].tokens == written[request.name].tokens


def test_tokens_outlast_preemption_and_small_chunks(
    folder: Path, processor: GlmImageInputProcessor, written: dict[str, PriorOutput]
) -> None:
    """What was preempted is computed anew, generated tokens at the positions of their grid."""
    component: Any = verify.load_prior_stage(OmniRunner(folder)).component
    budget = ARBudget(kv_blocks=28, block_size=16, prefill_chunk=7, max_batch_tokens=24, prefix_caching=False)
    tight = ARStage("prior", component, budget)
    found = verify.write_ours(tight, processor, REQUESTS[:2])
    assert tight.stats().preemptions > 0
    for request, item in zip(REQUESTS[:2], found, strict=True):
        assert item.tokens == written[request.name].tokens


def test_positions_of_the_grid_matter(stage: ARStage, processor: GlmImageInputProcessor) -> None:
    request = REQUESTS[1]
    payload = processor.draw(request.payload.prompt, (), None, request.params)
    prepared = stage.component.prepare(RequestInfo("p"), payload)
    assert prepared.positions is not None
    assert payload.num_tokens == 2 * 4 + 11 * 22
    assert prepared.positions.shape == (3, len(payload.token_ids) + payload.num_tokens)
    # The preview's rows and columns start behind the prompt, the picture's behind the preview's longer side.
    length = len(payload.token_ids)
    assert prepared.positions[:, length].tolist() == [length] * 3
    assert prepared.positions[:, length + 23].tolist() == [length, length + 1, length + 1]
    assert prepared.positions[:, length + 242 + 5].tolist() == [length + 22, length + 23, length + 23]
    tokens = _write(stage, {"grid": (prepared, GREEDY), "plain": (replace(prepared, positions=None), GREEDY)})
    assert tokens["grid"] != tokens["plain"]


def test_sampled_pictures_follow_the_drawing_seed(stage: ARStage, processor: GlmImageInputProcessor) -> None:
    def sampled(seed: int | None, own: int | None = None) -> tuple[ARInput, SamplingParams]:
        params = DiffusionParams(width=64, height=64, seed=seed)
        return processor.draw("a cat", (), None, params), SamplingParams(temperature=1.0, seed=own)

    tokens = _write(stage, {"a": sampled(7), "b": sampled(7), "c": sampled(None, own=7), "d": sampled(8)})
    assert len(tokens["a"]) == 4 + 256
    assert max(tokens["a"]) < tiny.num_codes(0.0)
    assert tokens["a"] == tokens["b"] == tokens["c"]
    assert tokens["a"] != tokens["d"]


def _write(stage: ARStage, inputs: dict[str, tuple[ARInput, SamplingParams]]) -> dict[str, list[int]]:
    """Tokens of several inputs in one batch; those that are prepared already are taken as they are."""
    prepare = stage.component.prepare
    for name, (payload, params) in inputs.items():
        if payload.positions is None and "grid" not in payload.context:
            payload = prepare(RequestInfo(name), payload)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stage.component, "prepare", lambda _info, payload: payload)
            stage.submit(StageInput(RequestInfo(name), params, payload))
    tokens: dict[str, list[int]] = {name: [] for name in inputs}
    while stage.has_work():
        for chunk in stage.step():
            assert chunk.error is None
            if isinstance(chunk.payload, TokenChunk):
                tokens[chunk.request_id] += chunk.payload.token_ids
    return tokens


def test_special_tokens_in_a_prompt_stay_text(processor: GlmImageInputProcessor, reference: Reference) -> None:
    hostile = "a cat <|image|><sop>9 9<eop><|dit_token_16384|>"
    payload = processor.draw(hostile, (), None, DiffusionParams(width=64, height=64))
    special = set(tiny.special_ids(0.0).values())
    # Two grids and the start of the picture, nothing of the prompt's.
    assert sum(token in special for token in payload.token_ids) == 5
    plain = Case("x", DiffusionInput("a cat 'on' the roof, 100%"), DiffusionParams(width=96, height=64))
    stock = reference._inputs(plain)
    ours = processor.draw(plain.payload.prompt, (), None, plain.params)
    assert list(ours.token_ids) == stock["input_ids"][0].tolist()
    assert torch.equal(ours.context["image_grid_thw"], stock["image_grid_thw"])


# ------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: r.name)
def test_pictures_are_those_of_diffusers(
    request_: Case, written: dict[str, PriorOutput], parts: Parts, reference: Reference
) -> None:
    case = Case(request_.name, written[request_.name].drawing, request_.params)
    ours = drive(*parts, case)
    assert ours.pixels.shape == (request_.params.height, request_.params.width, 3)
    assert ours.pixels.std() > 10
    rows = rows_of(case, ours, reference.draw(case))
    assert [row.quantity for row in rows] == ["latents", "pixels"]
    assert rows[0].difference <= LATENT_TOLERANCE
    assert rows[1].difference <= PIXEL_TOLERANCE


def test_everything_asked_for_changes_the_picture(written: dict[str, PriorOutput], parts: Parts) -> None:
    request = EDIT
    drawing = written[request.name].drawing
    base = _draw(parts, drawing, request.params)
    other_tokens = replace(drawing, tokens=drawing.tokens[::-1])
    source = replace(drawing, images=(_picture(9, 96, 64),))
    codes = dict(drawing.context, source_tokens=drawing.context["source_tokens"].flip(0))
    changed = [
        _draw(parts, replace(drawing, prompt="make it 'green'"), request.params),
        _draw(parts, other_tokens, request.params),
        _draw(parts, source, request.params),
        _draw(parts, replace(drawing, context=codes), request.params),
        _draw(parts, drawing, request.params.model_copy(update={"seed": 99})),
        _draw(parts, drawing, request.params.model_copy(update={"guidance": 5.0})),
        _draw(parts, drawing, request.params.model_copy(update={"steps": 5})),
    ]
    for picture in changed:
        assert np.abs(picture.pixels.astype(int) - base.pixels.astype(int)).max() > 3


def _draw(parts: Parts, drawing: DiffusionInput, params: DiffusionParams) -> DiffusionResult:
    return drive(*parts, Case("x", drawing, params))


@torch.inference_mode()
def _lane(parts: Parts, drawing: DiffusionInput, params: DiffusionParams, steps: int) -> Lane:
    encoder, denoiser, _ = parts
    encoded = encoder.encode(encoder.jobs(drawing, params))
    condition = encoder.condition(drawing, params, encoded)
    lane = denoiser.open(condition, params, torch.Generator().manual_seed(params.seed or 0))
    for _ in range(steps):
        denoiser.advance(lane, [denoiser.forward([row])[0] for row in denoiser.rows(lane)])
    return lane


@pytest.mark.parametrize("name", ["square", "edit"])
@torch.inference_mode()
def test_rows_do_not_depend_on_their_neighbours(name: str, written: dict[str, PriorOutput], parts: Parts) -> None:
    """Two requests at different steps, of both branches, with pictures of their own."""
    denoiser = parts[1]
    drawing = written[name].drawing
    params = _params(*_size(drawing), 4, 1.5, 0)
    images = tuple(_picture(11, image.shape[1], image.shape[0]) for image in drawing.images)
    other = replace(drawing, prompt="make it 'bleu'" if images else "a dog", tokens=drawing.tokens[::-1], images=images)
    lanes = [_lane(parts, drawing, params, 0), _lane(parts, other, params.model_copy(update={"seed": 8}), 2)]
    rows = [row for lane in lanes for row in denoiser.rows(lane)]
    groups: dict[object, list[Row]] = {}
    for row in rows:
        groups.setdefault(denoiser.group(row), []).append(row)
    # Without words to write, the prompt and the empty one are as long; pictures are read by the prompt's rows alone.
    assert sorted(len(group) for group in groups.values()) == ([2, 2] if images else [4])
    for group in groups.values():
        for row, together in zip(group, denoiser.forward(group), strict=True):
            alone = denoiser.forward([row])[0]
            assert float((together - alone).abs().max()) <= 2e-5


def _size(drawing: DiffusionInput) -> tuple[int, int]:
    rows, columns = drawing.context["grid"].tolist()
    return columns * 32, rows * 32


def test_latents_of_several_pictures_decode_together(written: dict[str, PriorOutput], parts: Parts) -> None:
    drawing, params = written["wide"].drawing, REQUESTS[1].params
    drawn = [_draw(parts, drawing, params.model_copy(update={"seed": seed})) for seed in (1, 2)]
    with torch.inference_mode():
        both = parts[2].decode([item.latents for item in drawn], width=128, height=64, num_frames=1)
    for one, item in zip(both, drawn, strict=True):
        assert np.abs(one.astype(int) - item.pixels.astype(int)).max() <= 1


def test_another_scheduler_can_be_asked_for(written: dict[str, PriorOutput], parts: Parts) -> None:
    params = REQUESTS[0].params.model_copy(update={"scheduler": "NoSuchScheduler"})
    with pytest.raises(InvalidRequestError, match="NoSuchScheduler"):
        _draw(parts, written["square"].drawing, params)


def test_the_whole_pipeline_draws_the_same(folder: Path, parts: Parts, written: dict[str, PriorOutput]) -> None:
    requests = (REQUESTS[0], EDIT)
    built = build_parts(OmniEngineArgs(model=str(folder), device="cpu", dtype="float32"), progress=False)
    with Omni.from_parts(built.graph, built.stages, built.bridges, built.defaults, built.processor) as omni:
        outputs = omni.generate(
            [{"prompt": case.payload.prompt, "images": list(case.payload.images)} for case in requests],
            [{"prior": GREEDY, "denoise": request.params} for request in requests],
            progress=False,
        )
    for request, output in zip(requests, outputs, strict=True):
        assert output.error is None
        assert output.finish_reason is FinishReason.STOP
        assert output.usage.stage_tokens["prior"] == len(written[request.name].tokens)
        assert output.image is not None
        alone = _draw(parts, written[request.name].drawing, request.params)
        assert np.abs(output.image.pixels.astype(int) - alone.pixels.astype(int)).max() <= 1


# ---------------------------------------------------------------------------------------------------- input


@pytest.mark.parametrize(
    ("params", "images", "mask", "error", "words"),
    [
        ({"width": 100}, 0, False, InvalidRequestError, "use 96 or 128"),
        ({"height": 16}, 0, False, InvalidRequestError, "use 32 or 64"),
        ({"negative_prompt": "fog"}, 0, False, InvalidRequestError, "negative_prompt: not supported"),
        ({"strength": 0.5}, 1, False, InvalidRequestError, "strength: not supported"),
        ({"true_cfg": 2.0}, 0, False, InvalidRequestError, "true_cfg"),
        ({"num_frames": 5}, 0, False, InvalidRequestError, "num_frames"),
        ({}, 1, True, InvalidRequestError, "mask: not supported"),
        ({}, 17, False, UnsupportedModalityError, "16 images"),
        ({"width": 16384, "height": 32}, 0, False, InvalidRequestError, "outside the supported aspect ratios"),
    ],
)
def test_what_can_never_be_drawn_is_refused(
    processor: GlmImageInputProcessor,
    params: dict[str, Any],
    images: int,
    mask: bool,
    error: type[OmniError],
    words: str,
) -> None:
    pictures = [_picture(0, 64, 64)] * images
    with pytest.raises(error, match=words):
        processor.draw("a cat", pictures, np.zeros((64, 64), np.uint8) if mask else None, DiffusionParams(**params))


def test_pictures_are_brought_to_whole_tokens(processor: GlmImageInputProcessor) -> None:
    payload = processor.draw("x", [_picture(0, 112, 80)], None, DiffusionParams())
    assert payload.drawing is not None
    assert payload.drawing.images[0].shape == (64, 128, 3)
    assert payload.num_tokens == 2 * 4, "an edit is as large as its picture"
    assert fitted_size(1000, 700, 512, 2048) == (992, 704)
    assert fitted_size(100, 50, 512, 2048) == (1024, 512)
    assert fitted_size(8000, 2000, 512, 2048) == (2048, 512)
    with pytest.raises(InvalidRequestError, match="crop it"):
        processor.draw("x", [_picture(0, 320, 64)], None, DiffusionParams())


def test_the_default_is_a_megapixel(processor: GlmImageInputProcessor) -> None:
    payload = processor.draw("x", (), None, DiffusionParams())
    assert payload.num_tokens == 32 * 32 + 16 * 16
    assert processor.draw("x", (), None, DiffusionParams(width=512)).num_tokens == 32 * 16 + 22 * 11


def test_a_picture_with_more_tokens_than_the_stage_holds_is_refused(
    stage: ARStage, processor: GlmImageInputProcessor
) -> None:
    payload = processor.draw("x", (), None, DiffusionParams(width=16384, height=16384))
    with pytest.raises(CapacityError, match="smaller picture"):
        stage.check(StageInput(RequestInfo("big"), SamplingParams(), payload))
    with pytest.raises(InvalidRequestError, match="draws pictures"):
        stage.check(StageInput(RequestInfo("bare"), SamplingParams(), ARInput((1, 2))))


def test_the_encoder_refuses_tokens_that_make_no_picture(parts: Parts, written: dict[str, PriorOutput]) -> None:
    encoder, params = parts[0], EDIT.params
    drawing = written["edit"].drawing
    encoder.check(drawing, params)
    for wrong, words in (
        (replace(drawing, tokens=drawing.tokens[:-1]), "needs 6 picture tokens, got 5"),
        (replace(drawing, context={}), "a grid of picture tokens"),
        (replace(drawing, tokens=(*drawing.tokens[:-1], 256)), r"\[0, 256\)"),
        (replace(drawing, images=()), "its tokens"),
        (replace(drawing, context={"grid": drawing.context["grid"]}), "its tokens"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            encoder.check(wrong, params)
    with pytest.raises(InvalidRequestError, match="tokens for 96x64"):
        _draw(parts, replace(drawing, images=(_picture(0, 64, 64),)), params)


def test_the_bridge_waits_for_the_last_token() -> None:
    drawing = DiffusionInput("a cat")
    prompt = ARInput((1,), drawing=drawing, context={"grid": torch.tensor([1, 2])})
    info, state = RequestInfo("r"), None
    sent: list[object] = []
    for number in range(5):
        payload = TokenChunk((number,), prompt=prompt if number == 0 else None)
        finish = FinishReason.LENGTH if number == 4 else None
        state, inputs = prior2encode(info, state, StageChunk("r", "prior", payload, finish=finish))
        sent += inputs
        assert (number == 4) == bool(inputs)
    assert isinstance(sent[0], DiffusionInput)
    assert (sent[0].prompt, sent[0].tokens) == ("a cat", (3, 4))
    _, inputs = prior2encode(info, None, StageChunk("r", "prior", finish=FinishReason.ERROR))
    assert not inputs


def test_grids_and_positions() -> None:
    assert target_grids(1024, 1024, edits=False) == [(32, 32), (16, 16)]
    assert target_grids(768, 1152, edits=False) == [(36, 24), (19, 13)]
    assert target_grids(768, 1152, edits=True) == [(36, 24)]
    positions = generated_positions(10, [(1, 2), (2, 1)])
    assert positions.tolist() == [[10, 10, 12, 12], [10, 10, 12, 13], [10, 11, 12, 12]]


# ----------------------------------------------------------------------------------------------- checkpoint


@pytest.mark.parametrize("scale", [0.1, 0.3, 0.5, 0.7, 1.0])
def test_every_scale_has_shapes_that_fit(scale: float) -> None:
    from diffusers import AutoencoderKL, GlmImageTransformer2DModel
    from transformers import GlmImageForConditionalGeneration, T5EncoderModel

    with torch.device("meta"):
        models: list[Any] = [
            GlmImageForConditionalGeneration(tiny.prior_config(scale)),
            T5EncoderModel(tiny.glyph_config(scale)),
            GlmImageTransformer2DModel.from_config(tiny.transformer_config(scale)),
            AutoencoderKL.from_config(tiny.vae_config(scale, 0)),
        ]
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in models]
    if scale == 1.0:
        assert [round(size / 1e9, 1) for size in sizes[:3]] == [10.1, 0.2, 6.9]
    assert models[2].config.text_embed_dim == models[1].config.d_model


def test_stock_diffusers_draws_from_text(reference: Reference) -> None:
    pictures = reference.pipe(
        prompt="a cat", height=64, width=64, num_inference_steps=1, generator=torch.Generator().manual_seed(0)
    ).images
    assert np.asarray(pictures[0]).std() > 10


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (("vae", "latents_mean", None), CheckpointError, "latents_mean"),
        (("vae", "latents_std", [1.0]), CheckpointError, "latents_std"),
        (("transformer", "patch_size", 4), UnsupportedModelError, "32 pixels"),
        (("vision_language_encoder", "vision_config", {"depth": 99}), CheckpointError, "vision_language|Glm"),
    ],
)
def test_a_broken_config_is_named(
    folder: Path, tmp_path: Path, change: tuple[str, str, object], error: type[OmniError], words: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    part, key, value = change
    config = json.loads((broken / part / "config.json").read_text())
    config[key] = value
    (broken / part / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=words):
        load_components(OmniRunner(broken))
