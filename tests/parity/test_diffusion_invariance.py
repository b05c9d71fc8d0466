"""What a request's picture is does not depend on who shares its batch, when it came, or how much room there is.

On a small random Stable Diffusion 3, its three components on stages with budgets of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from omnistage.cli.model_runner import OmniRunner
from omnistage.config.schema import DiffusionBudget
from omnistage.core.params import DiffusionParams
from omnistage.core.types import (
    Condition,
    DiffusionInput,
    FinishReason,
    ImageChunk,
    Latents,
    Modality,
    RequestInfo,
    StageChunk,
    StageInput,
)
from omnistage.engines.diffusion.component import Denoiser, LatentDecoder, PromptEncoder
from omnistage.engines.diffusion.decode import DecodeStage
from omnistage.engines.diffusion.encode import EncodeStage
from omnistage.engines.diffusion.stage import DenoiseStage
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import load_components
from omnistage.models.stable_diffusion_3 import tiny

SLOW_MACHINE = [HealthCheck.too_slow]
IMAGE, MASK = picture(32, 32, seed=5), np.tile(np.repeat(np.array([0, 255], np.uint8), 16), (32, 1))
LATENTS_WITHIN = 2e-5

Parts = tuple[PromptEncoder, Denoiser, LatentDecoder]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    tiny.write(folder, seed=3)
    return load_components(OmniRunner(folder))


# ------------------------------------------------------------------------------------------- what is asked


@dataclass(frozen=True)
class Asked:
    """A request and, beside it, what must not matter: when it comes and goes, how urgent it is, what it shows."""

    prompt: str
    params: DiffusionParams
    image: bool = False
    mask: bool = False
    arrival: int = field(default=0, compare=False)
    priority: int = field(default=0, compare=False)
    aborted_at: int | None = field(default=None, compare=False)
    preview_every: int = field(default=0, compare=False)

    def one(self, index: int) -> Asked:
        """Picture `index` of it as a request of its own."""
        assert self.params.seed is not None
        own = {**self.params.model_dump(exclude_unset=True), "n": 1, "seed": self.params.seed + index}
        return Asked(self.prompt, DiffusionParams.parse(own), self.image, self.mask)

    def key(self) -> tuple[object, ...]:
        return self.prompt, self.params.model_dump_json(), self.image, self.mask

    def payload(self) -> DiffusionInput:
        return DiffusionInput(self.prompt, (IMAGE,) if self.image else (), MASK if self.mask else None)


SIZES = st.sampled_from([(32, 32), (32, 32), (16, 32), (48, 16)])
GUIDANCE = st.sampled_from([{"guidance": 1.0}, {"guidance": 4.0}, {"guidance": 4.0, "negative_prompt": "blurry"}])
STOPPING = st.sampled_from([{}, {}, {"early_stop": 0.9}])


@st.composite
def asked(draw: st.DrawFn, aborts: bool = True) -> Asked:
    width, height = draw(SIZES)
    painting = draw(st.sampled_from(["", "", "", "image", "mask"]))
    params = {
        "width": width,
        "height": height,
        "steps": draw(st.integers(2, 4) if painting else st.integers(1, 4)),
        "seed": draw(st.integers(0, 2)),
        "n": draw(st.sampled_from([1, 1, 2])),
        "max_sequence_length": draw(st.sampled_from([8, 8, 16])),
        **draw(GUIDANCE),
        **({"strength": 0.7} if painting else draw(STOPPING)),
    }
    arrival = draw(st.integers(0, 5))
    stays = draw(st.none() | st.none() | st.integers(0, 5)) if aborts else None
    return Asked(
        draw(st.sampled_from(["a cat", "a lighthouse at dusk"])),
        DiffusionParams.parse(params),
        bool(painting),
        painting == "mask",
        arrival=arrival,
        priority=draw(st.integers(-1, 1)),
        aborted_at=None if stays is None else arrival + stays,
        preview_every=draw(st.sampled_from([0, 0, 1, 2])),
    )


BUDGETS = st.builds(
    DiffusionBudget,
    max_batch_tokens=st.sampled_from([4, 6, 9, 17, 65_536]),
    max_batch=st.integers(1, 6) | st.just(16),
    max_running=st.integers(1, 4) | st.just(16),
    ageing_steps=st.sampled_from([1, 4, 16]),
    prompt_cache=st.sampled_from([0, 20_000, 256 * 2**20]),
)


# ------------------------------------------------------------------------------------------ what is answered


@dataclass
class Drawn:
    """The pictures of one request: latents and pixels by index."""

    latents: dict[int, Latents] = field(default_factory=dict)
    pixels: dict[int, np.ndarray] = field(default_factory=dict)
    ended: bool = False


class Studio:
    """The three stages over one budget; requests come and go between their turns."""

    def __init__(self, parts: Parts, budget: DiffusionBudget | None = None) -> None:
        encoder, denoiser, decoder = parts
        budget = budget or DiffusionBudget(prompt_cache=0)
        self.encode = EncodeStage("encode", encoder, budget)
        self.denoise = DenoiseStage("denoise", denoiser, budget)
        self.decode = DecodeStage("decode", decoder, budget)
        self.stages = (self.encode, self.denoise, self.decode)

    def serve(self, requests: list[Asked]) -> dict[str, Drawn]:
        drawn = {str(number): Drawn() for number in range(len(requests))}
        inputs = {name: self._input(name, request) for name, request in zip(drawn, requests, strict=True)}
        gone: set[str] = set()
        last = max(max(request.arrival, request.aborted_at or 0) for request in requests)
        for turn in range(1000):
            for name, request in zip(drawn, requests, strict=True):
                if request.arrival == turn:
                    self.encode.submit(inputs[name])
                if request.aborted_at == turn:
                    gone.add(name)
                    for stage in self.stages:
                        stage.abort(name)
            if turn > last and not any(stage.has_work() for stage in self.stages):
                break
            for stage in self.stages:
                for chunk in stage.step() if stage.has_work() else ():
                    assert chunk.request_id not in gone, "a chunk after the abort"
                    self._take(chunk, drawn[chunk.request_id], inputs[chunk.request_id])
        else:
            raise AssertionError("requests were left after 1000 turns")
        for stage in self.stages:
            stats = stage.stats()
            assert (stats.waiting, stats.running, stats.starved) == (0, 0, 0)
        for name, result in drawn.items():
            assert result.ended or name in gone
        return drawn

    def _input(self, name: str, request: Asked) -> StageInput:
        info = RequestInfo(name, frozenset({Modality.IMAGE}), request.priority)
        params = request.params.merged(DiffusionParams(preview_every=request.preview_every))
        return StageInput(info, params, request.payload())

    def _take(self, chunk: StageChunk, drawn: Drawn, first: StageInput) -> None:
        payload = chunk.payload
        assert chunk.error is None, chunk.error
        assert not drawn.ended, "a chunk after the last one"
        if isinstance(payload, Condition):
            self.denoise.submit(StageInput(first.info, first.params, payload))
        elif isinstance(payload, Latents):
            if not payload.preview:
                assert payload.index not in drawn.latents
                drawn.latents[payload.index] = payload
            if chunk.request_id in self.decode._requests:
                self.decode.feed(chunk.request_id, payload)
            else:
                self.decode.submit(StageInput(first.info, first.params, payload))
        elif isinstance(payload, ImageChunk):
            if not payload.preview:
                drawn.pixels[payload.index] = payload.pixels
            drawn.ended = chunk.finish is FinishReason.STOP


_known: dict[tuple[object, ...], Drawn] = {}


def alone(parts: Parts, request: Asked) -> Drawn:
    """A request of one picture from roomy stages of its own, which remember nothing."""
    if request.key() not in _known:
        _known[request.key()] = Studio(parts).serve([request])["0"]
    return _known[request.key()]


def assert_same(got: Drawn, parts: Parts, request: Asked) -> None:
    """Each picture is as when it is asked for alone."""
    assert set(got.pixels) == set(got.latents) == set(range(request.params.n))
    for index in range(request.params.n):
        assert_same_picture(got, index, alone(parts, request.one(index)))


def assert_same_picture(got: Drawn, index: int, expected: Drawn) -> None:
    want = expected.latents[0]
    assert got.latents[index].seed == want.seed
    torch.testing.assert_close(got.latents[index].picture, want.picture, atol=LATENTS_WITHIN, rtol=0)
    difference = got.pixels[index].astype(int) - expected.pixels[0].astype(int)
    assert np.abs(difference).max() <= 1


@settings(max_examples=50, deadline=None, suppress_health_check=SLOW_MACHINE)
@given(requests=st.lists(asked(), min_size=1, max_size=5), budget=BUDGETS)
def test_pictures_do_not_depend_on_company_time_or_room(
    parts: Parts, requests: list[Asked], budget: DiffusionBudget
) -> None:
    studio = Studio(parts, budget)
    drawn = studio.serve(requests)
    extra = studio.denoise.stats().extra
    note(f"{extra['forwards']} forwards of {extra['rows']} rows in all")
    for number, request in enumerate(requests):
        got = drawn[str(number)]
        if got.ended:
            assert_same(got, parts, request)
        else:
            # Aborted on the way: what came before is right all the same.
            assert request.aborted_at is not None
            for index in got.pixels:
                assert_same_picture(got, index, alone(parts, request.one(index)))


@settings(max_examples=6, deadline=None, suppress_health_check=SLOW_MACHINE)
@given(requests=st.lists(asked(aborts=False), min_size=2, max_size=3), budget=BUDGETS)
def test_a_second_round_draws_the_same(parts: Parts, requests: list[Asked], budget: DiffusionBudget) -> None:
    """Whatever the prompt cache kept of the first."""
    studio = Studio(parts, budget)
    for _ in range(2):
        drawn = studio.serve(requests)
        for number, request in enumerate(requests):
            assert_same(drawn[str(number)], parts, request)


# -------------------------------------------------------------------- the property above, on cases that are known


def plain(prompt: str = "a cat", **params: object) -> DiffusionParams:
    values = {"width": 32, "height": 32, "steps": 4, "guidance": 4.0, "seed": 11, "max_sequence_length": 8}
    return DiffusionParams.parse({**values, **params})


def test_pictures_differ_where_they_should(parts: Parts) -> None:
    """Or the comparisons in this file would say nothing."""
    base = alone(parts, Asked("a cat", plain()))
    others = [
        Asked("a lighthouse at dusk", plain()),
        Asked("a cat", plain(seed=12)),
        Asked("a cat", plain(steps=3)),
        Asked("a cat", plain(guidance=1.0)),
        Asked("a cat", plain(negative_prompt="blurry")),
        Asked("a cat", plain(), image=True),
    ]
    for other in others:
        with pytest.raises(AssertionError):
            assert_same_picture(alone(parts, other), 0, base)
        difference = base.pixels[0].astype(int) - alone(parts, other).pixels[0].astype(int)
        assert np.abs(difference).max() > 1, other


def test_one_that_joins_midway_shares_forwards_and_changes_nothing(parts: Parts) -> None:
    studio = Studio(parts)
    requests = [
        Asked("a cat", plain(steps=6)),
        Asked("a lighthouse at dusk", plain(seed=3), arrival=2),
        Asked("a cat", plain(seed=4, guidance=1.0), arrival=3),
    ]
    drawn = studio.serve(requests)
    for number, request in enumerate(requests):
        assert_same(drawn[str(number)], parts, request)
    assert studio.denoise.stats().extra["forwards"] == 7
    assert studio.denoise.stats().extra["rows"] == 6 * 2 + 4 * 2 + 4


def test_a_neighbour_that_is_aborted_midway_changes_nothing(parts: Parts) -> None:
    requests = [Asked("a cat", plain()), Asked("a lighthouse at dusk", plain(seed=3, n=2), aborted_at=2)]
    studio = Studio(parts)
    drawn = studio.serve(requests)
    assert_same(drawn["0"], parts, requests[0])
    assert drawn["1"].pixels == {}
    # The encoder's turn and the first two steps were shared.
    assert studio.denoise.stats().extra["rows"] == 2 * 6 + 2 * 2


@pytest.mark.parametrize(
    "budget",
    [{"max_batch": 1}, {"max_batch_tokens": 4}, {"max_running": 1}, {"max_batch": 3, "max_running": 2}],
    ids=str,
)
def test_less_room_draws_the_same(parts: Parts, budget: dict[str, int]) -> None:
    requests = [
        Asked("a cat", plain(n=2)),
        Asked("a lighthouse at dusk", plain(seed=3)),
        Asked("a cat", plain(width=16)),
    ]
    roomy, tight = Studio(parts), Studio(parts, DiffusionBudget(**budget))
    for drawn in (roomy.serve(requests), tight.serve(requests)):
        for number, request in enumerate(requests):
            assert_same(drawn[str(number)], parts, request)
    assert tight.denoise.stats().extra["forwards"] > roomy.denoise.stats().extra["forwards"]


def test_the_prompt_cache_changes_nothing_but_the_work(parts: Parts) -> None:
    request = Asked("a cat", plain(negative_prompt="blurry"))
    encoded = []
    for budget in (DiffusionBudget(), DiffusionBudget(prompt_cache=0)):
        studio = Studio(parts, budget)
        for _ in range(2):
            assert_same(studio.serve([request])["0"], parts, request)
        encoded.append(studio.encode.stats().tokens)
    assert encoded == [2, 4]


def test_picture_i_of_n_is_that_of_seed_plus_i(parts: Parts) -> None:
    for request in (Asked("a cat", plain(n=3, seed=20)), Asked("a cat", plain(n=2, strength=0.5), image=True)):
        drawn = Studio(parts).serve([request])["0"]
        assert [drawn.latents[i].seed for i in range(request.params.n)] == [
            (request.params.seed or 0) + i for i in range(request.params.n)
        ]
        assert_same(drawn, parts, request)


def test_previews_change_nothing(parts: Parts) -> None:
    request = Asked("a cat", plain(), preview_every=1)
    assert_same(Studio(parts).serve([request])["0"], parts, request)
