"""The stages that encode, denoise and decode, on components small enough to know every number of."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from omnistage.config.schema import DiffusionBudget
from omnistage.core.errors import CapacityError, InvalidRequestError, OmniError, StageError
from omnistage.core.params import CodecParams, DiffusionParams
from omnistage.core.types import (
    CodecFrames,
    Condition,
    DiffusionInput,
    FinishReason,
    ImageChunk,
    Latents,
    Modality,
    Progress,
    RequestInfo,
    StageChunk,
    StageInput,
    VideoChunk,
)
from omnistage.engines.diffusion.component import Denoiser, EncodeJob, Lane, LatentDecoder, PromptEncoder, Row, Tensors
from omnistage.engines.diffusion.decode import DecodeStage
from omnistage.engines.diffusion.encode import EncodeStage, PromptCache, job_key
from omnistage.engines.diffusion.runner import _to_device
from omnistage.engines.diffusion.stage import DenoiseStage

STARTED, STOP, ERROR = None, FinishReason.STOP, FinishReason.ERROR


def of(chunks: Sequence[StageChunk], request_id: str) -> list[StageChunk]:
    return [chunk for chunk in chunks if chunk.request_id == request_id]


def payloads(chunks: Sequence[StageChunk], kind: type[Any]) -> list[Any]:
    return [chunk.payload for chunk in chunks if isinstance(chunk.payload, kind)]


def failure(chunks: Sequence[StageChunk], request_id: str) -> OmniError:
    """The error of a request that must have ended with one, exactly once and last."""
    mine = of(chunks, request_id)
    assert [chunk.finish for chunk in mine] == [None] * (len(mine) - 1) + [ERROR]
    assert mine[-1].error is not None
    return mine[-1].error


# ---------------------------------------------------------------------------------------- a small denoiser


class FlowMatchLine:
    """Straight from noise (sigma 1) to the picture (sigma 0), as flow matching's own schedulers go."""

    def __init__(self, steps: int) -> None:
        self.sigmas = torch.linspace(1.0, 0.0, steps + 1)
        self.at = 0

    def step(self, velocity: Tensor, timestep: Tensor, latents: Tensor, return_dict: bool) -> tuple[Tensor]:
        assert not return_dict
        assert timestep == self.sigmas[self.at]
        assert velocity.shape == latents.shape
        change = self.sigmas[self.at + 1] - self.sigmas[self.at]
        self.at += 1
        return (latents + change * velocity,)


class OtherLine(FlowMatchLine):
    """A scheduler of which nothing is known but its steps."""


OtherLine.__name__ = "OtherScheduler"


class SmallDenoiser(Denoiser):
    """Latents move from noise to noise minus the prompt's vector; requests are known by their prompt's number.

    `broken` maps a prompt's number to what raises for it: "open", "forward", "advance", "result", "nan".
    """

    def __init__(self) -> None:
        self.transformer = nn.Linear(1, 1)
        self.forwards: list[list[float]] = []
        self.broken: dict[float, str] = {}
        self.error: Exception = RuntimeError("a kernel failed")
        self.too_few = False
        self.schedule: type[FlowMatchLine] = FlowMatchLine
        self.bend = 0.0
        self.closed = 0

    def tokens(self, width: int, height: int, num_frames: int) -> int:
        return (width // 16) * (height // 16) * num_frames

    def open(self, condition: Condition, params: DiffusionParams, generator: torch.Generator) -> Lane:
        self._may_fail("open", condition)
        steps = params.steps or 4
        scheduler = self.schedule(steps)
        latents = torch.randn(condition.width // 16, generator=generator)
        tokens = self.tokens(condition.width, condition.height, condition.num_frames)
        return Lane(latents, scheduler, scheduler.sigmas[:-1], condition, params, tokens)

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        self.forwards.append([number(row.lane.condition) for row in rows])
        assert len({self.group(row) for row in rows}) == 1
        for row in rows:
            self._may_fail("forward", row.lane.condition)
        found = [
            row.tensors["text"] * torch.ones_like(row.lane.latents) + self.bend * row.timestep * row.lane.latents
            for row in rows
        ]
        return found[:-1] if self.too_few and len(rows) > 1 else found

    def advance(self, lane: Lane, predictions: Sequence[Tensor]) -> None:
        self._may_fail("advance", lane.condition)
        super().advance(lane, predictions)
        if self.broken.get(number(lane.condition)) == "nan":
            lane.latents = lane.latents * float("nan")

    def result(self, lane: Lane) -> Tensor:
        self._may_fail("result", lane.condition)
        return super().result(lane)

    def close(self) -> None:
        self.closed += 1

    def _may_fail(self, where: str, condition: Condition) -> None:
        if self.broken.get(number(condition)) == where:
            raise self.error


def number(condition: Condition) -> float:
    return float(condition.positive["text"][0])


def condition(value: float, *, away: float | None = None, width: int = 64, height: int = 16) -> Condition:
    negative = None if away is None else {"text": torch.tensor([away])}
    return Condition({"text": torch.tensor([value])}, negative, {}, width, height)


def drawn(seed: int, value: float, width: int = 64) -> Tensor:
    """What a picture comes out as."""
    return torch.randn(width // 16, generator=torch.Generator().manual_seed(seed)) - value


def denoise(denoiser: SmallDenoiser | None = None, **budget: Any) -> tuple[DenoiseStage, SmallDenoiser]:
    component = denoiser or SmallDenoiser()
    return DenoiseStage("denoise", component, DiffusionBudget(**budget)), component


def send(stage: Any, name: str, payload: Any, priority: int = 0, **params: Any) -> None:
    info = RequestInfo(name, frozenset({Modality.IMAGE}), priority)
    stage.submit(StageInput(info, DiffusionParams(**{"seed": 1, **params}), payload))


def assert_nothing_left(stage: DenoiseStage) -> None:
    stats = stage.stats()
    assert (stats.waiting, stats.running) == (0, 0)
    assert not stage.has_work()
    assert not stage._requests
    assert not stage._runner._jobs
    assert not stage._runner._lanes


# ------------------------------------------------------------------------------------------------ denoising


def test_a_request_goes_on_a_step_at_a_time_and_ends_with_its_latents() -> None:
    stage, _ = denoise()
    send(stage, "r", condition(3.0), steps=3, seed=7)
    steps = [stage.step() for _ in range(3)]
    assert [chunk.payload for chunk in steps[0]] == [None, Progress(1, 3)]
    assert [chunk.payload for chunk in steps[1]] == [Progress(2, 3)]
    assert steps[2][0].payload == Progress(3, 3)
    assert [chunk.finish for step in steps for chunk in step] == [None, None, None, None, STOP]
    (latents,) = payloads(steps[2], Latents)
    torch.testing.assert_close(latents.picture, drawn(7, 3.0))
    assert (latents.width, latents.height, latents.num_frames) == (64, 16, 1)
    assert (latents.index, latents.seed, latents.preview, latents.final) == (0, 7, False, True)
    assert_nothing_left(stage)
    assert stage.step() == []


def test_requests_at_different_steps_share_a_forward_and_come_out_as_alone() -> None:
    stage, denoiser = denoise()
    send(stage, "old", condition(1.0), steps=4, seed=1)
    stage.step()
    stage.step()
    send(stage, "new", condition(2.0), steps=3, seed=2)
    chunks = stage.drain()
    assert denoiser.forwards == [[1.0], [1.0], [1.0, 2.0], [1.0, 2.0], [2.0]]
    (old,), (new,) = (payloads(of(chunks, name), Latents) for name in ("old", "new"))
    torch.testing.assert_close(old.picture, drawn(1, 1.0))
    torch.testing.assert_close(new.picture, drawn(2, 2.0))
    assert_nothing_left(stage)


def test_shapes_that_do_not_agree_take_turns() -> None:
    stage, denoiser = denoise()
    send(stage, "narrow", condition(1.0, width=32), steps=2)
    send(stage, "wide", condition(2.0, width=64), steps=2)
    stage.drain()
    assert denoiser.forwards == [[1.0], [2.0], [1.0], [2.0]]


def test_guidance_is_two_rows_of_one_forward() -> None:
    stage, denoiser = denoise()
    send(stage, "r", condition(3.0, away=1.0), steps=2, guidance=5.0)
    (latents,) = payloads(stage.drain(), Latents)
    assert denoiser.forwards == [[3.0, 3.0]] * 2
    torch.testing.assert_close(latents.picture, drawn(1, 1.0 + 5.0 * (3.0 - 1.0)))
    assert stage.stats().extra["rows"] == 4


@pytest.mark.parametrize("budget", [{"max_batch": 1}, {"max_batch_tokens": 4}], ids=["rows", "tokens"])
def test_a_guided_picture_over_the_budget_is_split_and_comes_out_alike(budget: dict[str, int]) -> None:
    stage, denoiser = denoise(**budget)
    send(stage, "r", condition(3.0, away=1.0), steps=2, guidance=5.0)
    send(stage, "s", condition(4.0), steps=2, seed=2)
    chunks = stage.drain()
    assert {len(rows) for rows in denoiser.forwards} == {1}
    torch.testing.assert_close(payloads(of(chunks, "r"), Latents)[0].picture, drawn(1, 11.0))
    torch.testing.assert_close(payloads(of(chunks, "s"), Latents)[0].picture, drawn(2, 4.0))


def test_n_pictures_start_from_seeds_in_a_row_and_the_last_is_final() -> None:
    stage, denoiser = denoise()
    send(stage, "r", condition(3.0), steps=2, n=3, seed=5)
    chunks = stage.drain()
    assert denoiser.forwards == [[3.0] * 3] * 2
    latents = payloads(chunks, Latents)
    assert [(item.index, item.seed, item.final) for item in latents] == [(0, 5, False), (1, 6, False), (2, 7, True)]
    for item in latents:
        torch.testing.assert_close(item.picture, drawn(item.seed, 3.0))
    assert payloads(chunks, Progress) == [Progress(3, 6), Progress(6, 6)]
    assert [chunk.finish for chunk in chunks if chunk.finish] == [STOP]
    assert_nothing_left(stage)


def test_pictures_that_wait_for_room_count_in_the_progress_from_the_start() -> None:
    stage, _ = denoise(max_running=2)
    send(stage, "r", condition(3.0), steps=2, n=3)
    first = stage.step()
    assert (stage.stats().running, stage.stats().waiting) == (2, 1)
    progress = payloads([*first, *stage.drain()], Progress)
    assert progress == [Progress(2, 6), Progress(4, 6), Progress(5, 6), Progress(6, 6)]


def test_the_last_seed_wraps_around() -> None:
    stage, _ = denoise()
    send(stage, "r", condition(3.0), steps=1, n=2, seed=2**63 - 1)
    assert [item.seed for item in payloads(stage.drain(), Latents)] == [2**63 - 1, 0]


def test_without_a_seed_each_request_has_its_own_and_says_it() -> None:
    stage, _ = denoise()
    for name in ("r", "s"):
        send(stage, name, condition(0.0), steps=1, seed=None)
    first, second = payloads(stage.drain(), Latents)
    assert first.seed != second.seed
    torch.testing.assert_close(first.picture, drawn(first.seed, 0.0))


def test_a_schedule_belongs_to_its_lane() -> None:
    """Pictures of one request are at different steps where they were opened at different times."""
    stage, _ = denoise(max_running=1)
    send(stage, "r", condition(3.0), steps=3, n=2)
    for item in payloads(stage.drain(), Latents):
        torch.testing.assert_close(item.picture, drawn(item.seed, 3.0))


def test_a_picture_that_is_done_is_not_held_until_the_others_are() -> None:
    stage, _ = denoise(max_running=1)
    send(stage, "r", condition(3.0), steps=2, n=3)
    held = []
    while stage.has_work():
        stage.step()
        held.append(len(stage._runner._lanes))
    assert held == [1, 0, 1, 0, 1, 0]


# -------------------------------------------------------------------------------------- previews, early stop


def test_previews_come_between_and_show_where_it_is_heading() -> None:
    stage, _ = denoise()
    send(stage, "r", condition(3.0), steps=5, preview_every=2)
    steps = [stage.step() for _ in range(5)]
    shown = [[item.preview for item in payloads(step, Latents)] for step in steps]
    assert shown == [[], [True], [], [True], [False]]
    for step in steps:
        for item in payloads(step, Latents):
            # The line is straight, so every preview is the picture; taking one must not move the lane.
            torch.testing.assert_close(item.picture, drawn(1, 3.0))
            assert item.final is not item.preview
    assert_nothing_left(stage)


def test_the_last_step_gives_the_picture_and_no_preview() -> None:
    stage, _ = denoise()
    send(stage, "r", condition(3.0), steps=4, preview_every=2)
    assert [item.preview for item in payloads(stage.drain(), Latents)] == [True, False]


def test_previews_of_another_scheduler_are_the_latents_as_they_are() -> None:
    stage, denoiser = denoise()
    denoiser.schedule = OtherLine
    send(stage, "r", condition(3.0), steps=4, preview_every=2)
    preview, picture = payloads(stage.drain(), Latents)
    torch.testing.assert_close(preview.picture, drawn(1, 1.5))
    torch.testing.assert_close(picture.picture, drawn(1, 3.0))


def test_a_preview_stays_as_it_was_when_the_lane_goes_on() -> None:
    stage, denoiser = denoise()
    denoiser.schedule = OtherLine
    send(stage, "r", condition(3.0), steps=4, preview_every=1)
    (preview,) = payloads(stage.step(), Latents)
    before = preview.picture.clone()
    stage.drain()
    assert torch.equal(preview.picture, before)


def test_previews_do_not_change_the_picture() -> None:
    results = []
    for every in (0, 1, 3):
        stage, denoiser = denoise()
        denoiser.bend = 0.3
        send(stage, "r", condition(3.0), steps=7, preview_every=every)
        results.append(payloads(stage.drain(), Latents)[-1].picture)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_picture_that_no_longer_changes_stops_early() -> None:
    stage, denoiser = denoise()
    send(stage, "quick", condition(3.0), steps=10, early_stop=0.01)
    chunks = stage.drain()
    # Two steps in a row must leave the expected picture as it is, so the third is the first that can end it.
    assert len(denoiser.forwards) == 3
    assert payloads(chunks, Progress) == [Progress(1, 10), Progress(2, 10), Progress(3, 3)]
    (latents,) = payloads(chunks, Latents)
    torch.testing.assert_close(latents.picture, drawn(1, 3.0))
    assert_nothing_left(stage)


def test_a_picture_that_still_changes_takes_all_its_steps() -> None:
    stage, denoiser = denoise()
    denoiser.bend = 2.0
    send(stage, "r", condition(3.0), steps=10, early_stop=1e-6)
    assert payloads(stage.drain(), Progress)[-1] == Progress(10, 10)


def test_early_stop_is_of_its_own_request_only() -> None:
    stage, _ = denoise()
    send(stage, "quick", condition(3.0), steps=10, early_stop=0.01)
    send(stage, "slow", condition(4.0), steps=10, seed=2)
    chunks = stage.drain()
    assert payloads(of(chunks, "slow"), Progress)[-1] == Progress(10, 10)
    torch.testing.assert_close(payloads(of(chunks, "slow"), Latents)[0].picture, drawn(2, 4.0))


# ------------------------------------------------------------------------------------------- abort, failures


def test_an_aborted_request_is_in_no_further_step() -> None:
    stage, denoiser = denoise()
    send(stage, "gone", condition(1.0), steps=5, n=2)
    send(stage, "stays", condition(2.0), steps=5, seed=2)
    stage.step()
    stage.abort("gone")
    denoiser.forwards.clear()
    chunks = stage.drain()
    assert denoiser.forwards == [[2.0]] * 4
    assert of(chunks, "gone") == []
    torch.testing.assert_close(payloads(chunks, Latents)[0].picture, drawn(2, 2.0))
    assert_nothing_left(stage)
    stage.abort("gone")
    stage.abort("never here")


def test_an_id_is_free_again_after_an_abort() -> None:
    stage, _ = denoise()
    send(stage, "r", condition(1.0), steps=5)
    stage.step()
    stage.abort("r")
    send(stage, "r", condition(2.0), steps=2, seed=4)
    chunks = stage.drain()
    assert payloads(chunks, Progress) == [Progress(1, 2), Progress(2, 2)]
    torch.testing.assert_close(payloads(chunks, Latents)[0].picture, drawn(4, 2.0))


@pytest.mark.parametrize("where", ["open", "forward", "advance", "result", "nan"])
def test_what_fails_for_one_request_ends_that_one_only(where: str) -> None:
    stage, denoiser = denoise()
    denoiser.broken[2.0] = where
    send(stage, "before", condition(1.0), steps=4, seed=1)
    stage.step()
    send(stage, "bad", condition(2.0), steps=3, seed=2)
    send(stage, "after", condition(3.0), steps=4, seed=3)
    chunks = stage.drain()
    error = failure(chunks, "bad")
    assert type(error) is StageError
    assert "kernel" not in str(error), "what a library says is for the log"
    for name, seed in (("before", 1), ("after", 3)):
        (latents,) = payloads(of(chunks, name), Latents)
        torch.testing.assert_close(latents.picture, drawn(seed, float(seed)))
        assert of(chunks, name)[-1].finish is STOP
    assert_nothing_left(stage)


@pytest.mark.parametrize("where", ["result", "nan"])
def test_a_preview_that_cannot_be_given_ends_that_request_only(where: str) -> None:
    stage, denoiser = denoise()
    denoiser.broken[2.0] = where
    send(stage, "bad", condition(2.0), steps=4, preview_every=1)
    send(stage, "good", condition(3.0), steps=4, preview_every=1)
    chunks = stage.drain()
    assert type(failure(chunks, "bad")) is StageError
    assert payloads(of(chunks, "bad"), Progress) == [Progress(1, 4)]
    torch.testing.assert_close(payloads(of(chunks, "good"), Latents)[-1].picture, drawn(1, 3.0))
    assert_nothing_left(stage)


@pytest.mark.parametrize("option", [{"preview_every": 1}, {"early_stop": 0.01}])
def test_a_schedule_that_cannot_say_where_it_heads_ends_its_own_request(option: dict[str, Any]) -> None:
    class FlowMatchHidden(FlowMatchLine):
        def __init__(self, steps: int) -> None:
            super().__init__(steps)
            self.known = self.sigmas

        def step(self, velocity: Tensor, timestep: Tensor, latents: Tensor, return_dict: bool) -> tuple[Tensor]:
            self.sigmas = self.known
            moved = super().step(velocity, timestep, latents, return_dict)
            if float(velocity[0, 0]) == 2.0:
                del self.sigmas
            return moved

    stage, denoiser = denoise()
    denoiser.schedule = FlowMatchHidden
    send(stage, "bad", condition(2.0), steps=3, **option)
    send(stage, "good", condition(3.0), steps=3)
    chunks = stage.drain()
    assert type(failure(chunks, "bad")) is StageError
    torch.testing.assert_close(payloads(of(chunks, "good"), Latents)[-1].picture, drawn(1, 3.0))
    assert_nothing_left(stage)


def test_a_failed_batch_is_tried_again_row_by_row_once() -> None:
    stage, denoiser = denoise()
    denoiser.broken[2.0] = "forward"
    for value in (1.0, 2.0, 3.0):
        send(stage, str(value), condition(value), steps=2)
    stage.step()
    assert denoiser.forwards == [[1.0, 2.0, 3.0], [1.0], [2.0], [3.0]]
    stage.step()
    assert denoiser.forwards[4:] == [[1.0, 3.0]]


def test_a_single_row_that_fails_is_not_tried_again() -> None:
    stage, denoiser = denoise()
    denoiser.broken[2.0] = "forward"
    send(stage, "bad", condition(2.0))
    assert type(failure(stage.step(), "bad")) is StageError
    assert denoiser.forwards == [[2.0]]


def test_errors_of_ours_are_passed_on_as_they_are() -> None:
    for where in ("open", "forward", "advance", "result"):
        stage, denoiser = denoise()
        denoiser.broken[2.0], denoiser.error = where, InvalidRequestError("cannot be", param="steps")
        send(stage, "bad", condition(2.0))
        assert failure(stage.drain(), "bad") is denoiser.error


def test_a_request_of_several_pictures_fails_as_a_whole_and_once() -> None:
    for where in ("open", "forward", "advance", "result", "nan"):
        stage, denoiser = denoise()
        denoiser.broken[2.0] = where
        send(stage, "bad", condition(2.0, away=1.0), steps=2, n=3, preview_every=1)
        chunks = stage.drain()
        assert type(failure(chunks, "bad")) is StageError
        assert payloads(chunks, Latents) == []
        assert_nothing_left(stage)


def test_values_that_are_not_numbers_are_an_error_that_says_so() -> None:
    stage, denoiser = denoise()
    denoiser.broken[2.0] = "nan"
    send(stage, "bad", condition(2.0), steps=2)
    assert "not finite" in str(failure(stage.drain(), "bad"))


def test_a_denoiser_that_gives_too_few_predictions_is_asked_row_by_row() -> None:
    stage, denoiser = denoise()
    denoiser.too_few = True
    for value in (1.0, 3.0):
        send(stage, str(value), condition(value), steps=2)
    chunks = stage.drain()
    assert len(denoiser.forwards) == 6
    for value in (1.0, 3.0):
        torch.testing.assert_close(payloads(of(chunks, str(value)), Latents)[0].picture, drawn(1, value))


# -------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("width", "height", "budget"),
    [(1024, 1024, 1024), (2048, 16, 100), (16, 4096, 100), (64, 64, 5), (640, 480, 600), (16384, 16384, 1)],
)
def test_a_picture_over_the_budget_is_refused_with_the_numbers_and_what_would_fit(
    width: int, height: int, budget: int
) -> None:
    stage, denoiser = denoise(max_batch_tokens=budget)
    asked = denoiser.tokens(width, height, 1)
    assert asked > budget
    for refused in (
        lambda: send(stage, "r", condition(1.0, width=width, height=height)),
        lambda: stage.check_params(DiffusionParams(width=width, height=height)),
    ):
        with pytest.raises(CapacityError) as caught:
            refused()
        assert caught.value.param == "width"
        assert f"{width}x{height} is {asked} latent patches" in str(caught.value)
        assert f"budget of {budget}" in str(caught.value)
        found = re.search(r"about (\d+)x(\d+) would fit", str(caught.value))
        assert found is not None
        assert 0 < denoiser.tokens(int(found[1]), int(found[2]), 1) <= budget
    assert_nothing_left(stage)


def test_exactly_the_budget_is_taken() -> None:
    stage, _ = denoise(max_batch_tokens=16)
    stage.check_params(DiffusionParams(width=64, height=64))
    with pytest.raises(CapacityError, match="32x80 with 2 frames is 20 latent patches"):
        stage.check_params(DiffusionParams(width=32, height=80, num_frames=2))


def test_what_the_stage_cannot_take_leaves_it_unchanged() -> None:
    stage, _ = denoise()
    send(stage, "r", condition(1.0), steps=2)
    info = RequestInfo("s")
    with pytest.raises(InvalidRequestError, match="denoise"):
        stage.submit(StageInput(info, CodecParams(), condition(1.0)))
    with pytest.raises(StageError, match="denoise"):
        stage.submit(StageInput(info, DiffusionParams(), DiffusionInput("a cat")))
    with pytest.raises(InvalidRequestError, match="already"):
        send(stage, "r", condition(2.0))
    with pytest.raises(StageError, match="cannot be fed"):
        stage.feed("r", Latents(torch.zeros(1), 16, 16))
    with pytest.raises(InvalidRequestError, match="DiffusionParams"):
        stage.check_params(CodecParams())
    stage.feed("unknown", Latents(torch.zeros(1), 16, 16))
    assert stage.stats().waiting == 1
    assert payloads(stage.drain(), Progress) == [Progress(1, 2), Progress(2, 2)]


def test_the_urgent_go_first_where_there_is_no_room_for_all() -> None:
    stage, denoiser = denoise(max_running=1)
    send(stage, "calm", condition(1.0), steps=1, priority=1)
    send(stage, "urgent", condition(2.0), steps=1, priority=-1)
    stage.drain()
    assert denoiser.forwards == [[2.0], [1.0]]


def test_closing_the_stage_closes_the_denoiser() -> None:
    stage, denoiser = denoise()
    stage.close()
    assert denoiser.closed == 1


# ------------------------------------------------------------------------------------------------- encoding


class SmallEncoder(PromptEncoder):
    """Encodes a text as its length, in rows of one tensor as encoders give them. "bad" in a text raises."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.error: Exception = RuntimeError("a kernel failed")
        self.too_few = False
        self.closed = 0

    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        if payload.images:
            raise InvalidRequestError("takes no pictures", param="image")

    def jobs(self, payload: DiffusionInput, params: DiffusionParams) -> Sequence[EncodeJob]:
        options = (params.max_sequence_length,)
        jobs = [EncodeJob(payload.prompt, options=options)]
        if params.negative_prompt is not None:
            jobs.append(EncodeJob(params.negative_prompt, options=options))
        return jobs

    def encode(self, jobs: Sequence[EncodeJob]) -> list[Tensors]:
        self.batches.append([job.text for job in jobs])
        assert len({job.options for job in jobs}) == 1
        if any("bad" in job.text for job in jobs):
            raise self.error
        rows = torch.tensor([[float(len(job.text))] * 4 for job in jobs])
        return [{"text": row} for row in rows[: -1 if self.too_few and len(jobs) > 1 else None]]

    def condition(self, payload: DiffusionInput, params: DiffusionParams, encoded: Sequence[Tensors]) -> Condition:
        if payload.prompt == "unfit":
            raise self.error
        return Condition(encoded[0], encoded[1] if len(encoded) > 1 else None, {}, 64, 16)

    def close(self) -> None:
        self.closed += 1


ROW = 16
"""Bytes of one encoded text."""


def encode(**budget: Any) -> tuple[EncodeStage, SmallEncoder]:
    encoder = SmallEncoder()
    return EncodeStage("encode", encoder, DiffusionBudget(**budget)), encoder


def ask(stage: EncodeStage, name: str, text: str, priority: int = 0, **params: Any) -> None:
    send(stage, name, DiffusionInput(text), priority, **params)


def lengths(chunks: Sequence[StageChunk], name: str) -> tuple[float, float | None]:
    """What a request's prompt and negative prompt were encoded as."""
    (made,) = payloads(of(chunks, name), Condition)
    return float(made.positive["text"][0]), None if made.negative is None else float(made.negative["text"][0])


def test_a_prompt_becomes_a_condition_and_ends_there() -> None:
    stage, _ = encode()
    ask(stage, "r", "cat", negative_prompt="dog!")
    chunks = stage.step()
    assert [(type(chunk.payload), chunk.finish) for chunk in chunks] == [(type(None), None), (Condition, STOP)]
    assert lengths(chunks, "r") == (3.0, 4.0)
    assert not stage.has_work()
    assert stage.stats().waiting == 0


def test_texts_of_a_step_are_encoded_together_and_equal_ones_once() -> None:
    stage, encoder = encode()
    ask(stage, "r", "one", negative_prompt="")
    ask(stage, "s", "three", negative_prompt="")
    ask(stage, "t", "one")
    chunks = stage.step()
    assert encoder.batches == [["one", "", "three"]]
    assert [lengths(chunks, name) for name in "rst"] == [(3.0, 0.0), (5.0, 0.0), (3.0, None)]


def test_texts_with_other_options_are_encoded_apart() -> None:
    stage, encoder = encode()
    ask(stage, "r", "one", max_sequence_length=8)
    ask(stage, "s", "one", max_sequence_length=16)
    stage.drain()
    assert encoder.batches == [["one"], ["one"]]
    assert stage.stats().extra["cache_hits"] == 0


def test_a_step_takes_no_more_requests_than_the_batch_and_the_urgent_first() -> None:
    stage, encoder = encode(max_batch=2)
    for name, priority in (("a", 1), ("bb", 0), ("ccc", 0)):
        ask(stage, name, name, priority)
    stage.drain()
    assert encoder.batches == [["bb", "ccc"], ["a"]]


def test_a_prompt_that_comes_again_is_not_encoded_again() -> None:
    stage, encoder = encode()
    for name in ("r", "s"):
        ask(stage, name, "cat", negative_prompt="dog!")
        assert lengths(stage.step(), name) == (3.0, 4.0)
    assert encoder.batches == [["cat", "dog!"]]
    extra = stage.stats().extra
    assert (extra["cache_hits"], extra["cache_bytes"]) == (2, 2 * ROW)
    assert stage.stats().tokens == 2


def test_without_a_cache_it_is() -> None:
    stage, encoder = encode(prompt_cache=0)
    for name in ("r", "s"):
        ask(stage, name, "cat")
        assert lengths(stage.step(), name) == (3.0, None)
    assert encoder.batches == [["cat"], ["cat"]]
    assert stage.stats().extra["cache_bytes"] == 0


def test_the_cache_keeps_to_its_bytes_and_drops_what_was_used_longest_ago() -> None:
    stage, encoder = encode(prompt_cache=3 * ROW)
    for text in ("a", "bb", "ccc", "a", "dddd"):
        ask(stage, "r", text)
        stage.step()
        assert stage.stats().extra["cache_bytes"] <= 3 * ROW
    encoder.batches.clear()
    for text in ("a", "ccc", "dddd", "bb"):
        ask(stage, "r", text)
        stage.step()
    assert encoder.batches == [["bb"]]


def test_the_cache_holds_no_more_memory_than_it_counts() -> None:
    """A row of a batch is a view of all of it."""
    cache = PromptCache(1000)
    batch = torch.zeros(64, 4)
    cache.put(b"k", {"text": batch[3]})
    kept = cache.get(b"k")
    assert kept is not None
    assert kept["text"].untyped_storage().nbytes() == cache.bytes == ROW


def test_what_is_larger_than_the_cache_is_not_kept_and_drops_nothing() -> None:
    cache = PromptCache(2 * ROW)
    cache.put(b"small", {"text": torch.zeros(4)})
    cache.put(b"large", {"text": torch.zeros(9)})
    assert cache.get(b"large") is None
    assert cache.get(b"small") is not None
    cache.put(b"small", {"text": torch.ones(4)})
    assert cache.bytes == ROW
    assert (cache.hits, cache.misses) == (1, 1)


def test_jobs_that_differ_in_anything_have_other_keys() -> None:
    flat, tall = np.zeros((2, 3, 3), np.uint8), np.zeros((3, 2, 3), np.uint8)
    jobs = [
        EncodeJob("a"),
        EncodeJob("b"),
        EncodeJob(""),
        EncodeJob("a", options=(1,)),
        EncodeJob("a", options=("1",)),
        EncodeJob("a", images=(flat,)),
        EncodeJob("a", images=(tall,)),
        EncodeJob("a", images=(flat, flat)),
        EncodeJob("a", images=(flat + 1,)),
    ]
    keys = [job_key(job) for job in jobs]
    assert len(set(keys)) == len(jobs)
    assert job_key(EncodeJob("a", images=(flat.copy(),))) == keys[5]


@pytest.mark.parametrize("text", ["bad text", "unfit"], ids=["encode", "condition"])
def test_a_prompt_that_cannot_be_encoded_ends_its_own_request(text: str) -> None:
    stage, encoder = encode()
    ask(stage, "before", "one")
    ask(stage, "culprit", text)
    ask(stage, "after", "three")
    chunks = stage.step()
    error = failure(chunks, "culprit")
    assert type(error) is StageError
    assert "kernel" not in str(error)
    assert error.__cause__ is encoder.error
    assert (lengths(chunks, "before"), lengths(chunks, "after")) == ((3.0, None), (5.0, None))
    assert not stage.has_work()


def test_a_negative_prompt_that_cannot_be_encoded_ends_its_own_request() -> None:
    stage, encoder = encode()
    ask(stage, "culprit", "one", negative_prompt="bad")
    ask(stage, "good", "one")
    chunks = stage.step()
    assert type(failure(chunks, "culprit")) is StageError
    assert lengths(chunks, "good") == (3.0, None)
    assert encoder.batches == [["one", "bad"], ["one"], ["bad"]]


def test_a_failure_is_not_kept() -> None:
    stage, encoder = encode()
    ask(stage, "r", "bad")
    failure(stage.step(), "r")
    assert encoder.batches == [["bad"]]
    encoder.encode = lambda jobs: [{"text": torch.ones(4)}]  # type: ignore[method-assign]
    ask(stage, "r", "bad")
    assert lengths(stage.step(), "r") == (1.0, None)


def test_errors_of_ours_come_out_of_the_encoder_as_they_are() -> None:
    for text in ("bad", "unfit"):
        stage, encoder = encode()
        encoder.error = InvalidRequestError("is too long", param="prompt")
        ask(stage, "r", text)
        assert failure(stage.step(), "r") is encoder.error


def test_an_encoder_that_gives_too_few_results_is_asked_text_by_text() -> None:
    stage, encoder = encode()
    encoder.too_few = True
    ask(stage, "r", "one")
    ask(stage, "s", "three")
    chunks = stage.step()
    assert (lengths(chunks, "r"), lengths(chunks, "s")) == ((3.0, None), (5.0, None))


def test_an_aborted_prompt_is_not_encoded() -> None:
    stage, encoder = encode()
    ask(stage, "gone", "one")
    ask(stage, "stays", "three")
    stage.abort("gone")
    stage.abort("never here")
    assert of(stage.step(), "gone") == []
    assert encoder.batches == [["three"]]


def test_what_the_encoding_stage_cannot_take_leaves_it_unchanged() -> None:
    stage, encoder = encode()
    ask(stage, "r", "one")
    with pytest.raises(InvalidRequestError, match="no pictures"):
        send(stage, "s", DiffusionInput("one", (np.zeros((2, 2, 3), np.uint8),)))
    with pytest.raises(InvalidRequestError, match="already"):
        ask(stage, "r", "two")
    with pytest.raises(InvalidRequestError, match="encode"):
        stage.check(StageInput(RequestInfo("s"), CodecParams(), DiffusionInput("one")))
    with pytest.raises(StageError, match="encode"):
        stage.check(StageInput(RequestInfo("s"), DiffusionParams(), condition(1.0)))
    with pytest.raises(StageError, match="cannot be fed"):
        stage.feed("r", Latents(torch.zeros(1), 16, 16))
    stage.feed("unknown", Latents(torch.zeros(1), 16, 16))
    assert stage.stats().waiting == 1
    stage.step()
    stage.close()
    assert encoder.closed == 1


# ------------------------------------------------------------------------------------------------- decoding


class SmallDecoder(LatentDecoder):
    """Every pixel is the latent's first value. 13 raises."""

    modality = Modality.IMAGE

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.error: Exception = RuntimeError("a kernel failed")
        self.too_few = False
        self.closed = 0

    def decode(self, latents: Sequence[Tensor], *, width: int, height: int, num_frames: int) -> list[np.ndarray]:
        values = [int(item[0]) for item in latents]
        self.batches.append(values)
        if 13 in values:
            raise self.error
        frames = (num_frames,) if self.modality is Modality.VIDEO else ()
        made = [np.full((*frames, height, width, 3), value, np.uint8) for value in values]
        return made[:-1] if self.too_few and len(made) > 1 else made

    def close(self) -> None:
        self.closed += 1


def decode(**budget: Any) -> tuple[DecodeStage, SmallDecoder]:
    decoder = SmallDecoder()
    return DecodeStage("decode", decoder, DiffusionBudget(**budget)), decoder


def latents(value: int, index: int = 0, *, final: bool = True, preview: bool = False, **more: Any) -> Latents:
    size = {"width": 4, "height": 2, **more}
    return Latents(torch.full((3,), float(value)), index=index, seed=value, final=final, preview=preview, **size)


def pictures(chunks: Sequence[StageChunk]) -> list[tuple[int, int, bool]]:
    """(value, index, preview) of each picture."""
    return [(int(item.pixels[0, 0, 0]), item.index, item.preview) for item in payloads(chunks, ImageChunk)]


def assert_no_picture_left(stage: DecodeStage) -> None:
    stats = stage.stats()
    assert (stats.waiting, stats.running, stats.starved) == (0, 0, 0)
    assert not stage.has_work()
    assert not stage._requests
    assert len(stage._queue) == 0


def test_latents_become_a_picture_which_ends_the_request() -> None:
    stage, _ = decode()
    send(stage, "r", latents(7))
    chunks = stage.step()
    assert [(type(chunk.payload), chunk.finish) for chunk in chunks] == [(type(None), None), (ImageChunk, STOP)]
    (picture,) = payloads(chunks, ImageChunk)
    assert picture.pixels.shape == (2, 4, 3)
    assert (picture.index, picture.preview, picture.seed) == (0, False, 7)
    assert_no_picture_left(stage)


def test_n_pictures_are_decoded_together_in_order_and_the_last_ends_the_request() -> None:
    stage, decoder = decode()
    send(stage, "r", latents(1, 0, final=False), n=3)
    stage.feed("r", latents(2, 1, final=False))
    stage.feed("r", latents(3, 2))
    chunks = stage.step()
    assert decoder.batches == [[1, 2, 3]]
    assert pictures(chunks) == [(1, 0, False), (2, 1, False), (3, 2, False)]
    assert [chunk.finish for chunk in chunks] == [STARTED, None, None, STOP]
    assert_no_picture_left(stage)


def test_a_request_waits_for_its_next_picture_without_being_work() -> None:
    stage, _ = decode()
    send(stage, "r", latents(1, 0, final=False), n=2)
    first = stage.step()
    assert first[-1].finish is None
    assert not stage.has_work()
    assert (stage.stats().running, stage.stats().starved) == (1, 1)
    stage.feed("r", latents(2, 1))
    second = stage.step()
    assert [chunk.payload is None for chunk in second] == [False], "it has started already"
    assert second[-1].finish is STOP
    assert_no_picture_left(stage)


def test_an_overtaken_preview_is_dropped_undecoded() -> None:
    stage, decoder = decode()
    send(stage, "r", latents(1, preview=True, final=False))
    stage.feed("r", latents(2, preview=True, final=False))
    assert pictures(stage.step()) == [(2, 0, True)]
    stage.feed("r", latents(3, preview=True, final=False))
    stage.feed("r", latents(4))
    chunks = stage.drain()
    assert pictures(chunks) == [(4, 0, False)]
    assert chunks[-1].finish is STOP
    assert decoder.batches == [[2], [4]]
    assert_no_picture_left(stage)


def test_a_preview_is_not_overtaken_by_another_picture_or_request() -> None:
    stage, _ = decode()
    send(stage, "r", latents(1, 0, preview=True, final=False), n=2)
    stage.feed("r", latents(2, 1, preview=True, final=False))
    send(stage, "s", latents(3))
    chunks = stage.drain()
    assert sorted(pictures(chunks)) == [(1, 0, True), (2, 1, True), (3, 0, False)]


def test_pictures_that_are_done_go_before_previews() -> None:
    stage, decoder = decode(max_batch=1)
    send(stage, "r", latents(1, preview=True, final=False))
    send(stage, "s", latents(2))
    stage.drain()
    assert decoder.batches == [[2], [1]]


def test_latents_of_other_sizes_are_decoded_apart() -> None:
    stage, decoder = decode(max_batch=2)
    for name, value, width in (("r", 1, 4), ("s", 2, 8), ("t", 3, 4), ("u", 4, 4)):
        send(stage, name, latents(value, width=width))
    chunks = stage.drain()
    assert decoder.batches == [[1, 3], [2], [4]]
    assert [item.pixels.shape[1] for item in payloads(chunks, ImageChunk)] == [4, 4, 8, 4]


def test_a_picture_that_cannot_be_decoded_ends_its_own_request() -> None:
    stage, decoder = decode()
    for name, value in (("before", 1), ("culprit", 13), ("after", 2)):
        send(stage, name, latents(value))
    chunks = stage.step()
    error = failure(chunks, "culprit")
    assert type(error) is StageError
    assert "kernel" not in str(error)
    assert pictures(chunks) == [(1, 0, False), (2, 0, False)]
    assert decoder.batches == [[1, 13, 2], [1], [13], [2]]
    assert_no_picture_left(stage)


def test_one_of_n_pictures_that_cannot_be_decoded_ends_the_request_once() -> None:
    stage, _ = decode()
    send(stage, "r", latents(13, 0, final=False), n=2)
    stage.feed("r", latents(2, 1))
    chunks = stage.drain()
    failure(chunks, "r")
    assert pictures(chunks) == []
    assert_no_picture_left(stage)


def test_a_preview_that_cannot_be_decoded_is_left_out() -> None:
    stage, _ = decode()
    send(stage, "r", latents(13, preview=True, final=False))
    assert all(chunk.error is None and chunk.finish is None for chunk in stage.step())
    stage.feed("r", latents(2))
    chunks = stage.step()
    assert pictures(chunks) == [(2, 0, False)]
    assert chunks[-1].finish is STOP
    assert_no_picture_left(stage)


def test_errors_of_ours_come_out_of_the_decoder_as_they_are() -> None:
    stage, decoder = decode()
    decoder.error = CapacityError("too large to decode")
    send(stage, "r", latents(13))
    assert failure(stage.step(), "r") is decoder.error


def test_a_decoder_that_gives_too_few_pictures_is_asked_one_by_one() -> None:
    stage, decoder = decode()
    decoder.too_few = True
    for name, value in (("r", 1), ("s", 2)):
        send(stage, name, latents(value))
    assert pictures(stage.step()) == [(1, 0, False), (2, 0, False)]


@pytest.mark.parametrize(("asked", "fps"), [(None, 16.0), (8.0, 8.0)])
def test_videos_have_the_frame_rate_that_was_asked_for(asked: float | None, fps: float) -> None:
    stage, decoder = decode()
    decoder.modality = Modality.VIDEO
    send(stage, "r", latents(5, num_frames=3), fps=asked)
    (video,) = payloads(stage.step(), VideoChunk)
    assert video.frames.shape == (3, 2, 4, 3)
    assert (video.fps, video.seed) == (fps, 5)


def test_an_aborted_request_is_not_decoded() -> None:
    stage, decoder = decode()
    send(stage, "gone", latents(1))
    send(stage, "stays", latents(2))
    stage.abort("gone")
    stage.feed("gone", latents(3))
    assert of(stage.drain(), "gone") == []
    assert decoder.batches == [[2]]
    assert_no_picture_left(stage)


def test_what_the_decoding_stage_cannot_take_leaves_it_unchanged() -> None:
    stage, decoder = decode()
    send(stage, "r", latents(1, final=False), n=2)
    with pytest.raises(InvalidRequestError, match="already"):
        send(stage, "r", latents(2))
    with pytest.raises(InvalidRequestError, match="decode"):
        stage.check(StageInput(RequestInfo("s"), CodecParams(), latents(1)))
    with pytest.raises(StageError, match="decode"):
        stage.check(StageInput(RequestInfo("s"), DiffusionParams(), condition(1.0)))
    with pytest.raises(StageError, match="CodecFrames"):
        stage.feed("r", CodecFrames((1,)))
    assert pictures(stage.step()) == [(1, 0, False)]
    stage.close()
    assert decoder.closed == 1


def test_groups_are_asked_of_the_component() -> None:
    """A family may say that rows of different texts share a forward, or that latents must not."""

    class Choosy(SmallDecoder):
        def group(self, latents: Tensor) -> Hashable:
            return float(latents[0])

    decoder = Choosy()
    stage = DecodeStage("decode", decoder, DiffusionBudget())
    for name, value in (("r", 1), ("s", 2), ("t", 1)):
        send(stage, name, latents(value))
    stage.drain()
    assert decoder.batches == [[1, 1], [2]]


@pytest.mark.parametrize("make", [denoise, encode, decode])
def test_a_step_with_nothing_to_do_does_nothing(make: Callable[[], tuple[Any, Any]]) -> None:
    stage, _ = make()
    assert not stage.has_work()
    assert stage.step() == []


def test_a_condition_moves_to_the_device_whole() -> None:
    """An encoder in another process may have sent it by the host."""
    one = torch.zeros(2)
    guided = Condition({"a": one}, {"a": one}, {"b": one}, 8, 8)
    for condition in (guided, replace(guided, negative=None)):
        moved = _to_device(condition, torch.device("meta"))
        tensors = [*moved.positive.values(), *(moved.negative or {}).values(), *moved.shared.values()]
        assert {tensor.device.type for tensor in tensors} == {"meta"}
        assert (moved.negative is None, moved.width) == (condition.negative is None, 8)
