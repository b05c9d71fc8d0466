"""The same pipelines in one process and in several: identical tokens, sound and pictures; speech begins early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from omnistage.core.errors import ConfigError, PromptTooLongError
from omnistage.core.params import DiffusionParams, SamplingParams
from omnistage.core.types import FinishReason
from omnistage.models.stable_diffusion_3 import tiny
from omnistage.omni import Omni
from omnistage.pipeline.build import EngineParts
from omnistage.pipeline.outputs import OmniRequestOutput
from omnistage.server.observe.metrics import RequestMetrics, render
from tests.e2e.harness import SMALL_POOLS, greedy, say, tokens_of

BOTH = ["text", "audio"]
GROUPS = (
    "deployment.placement.head.stages=[thinker]",
    "deployment.placement.voice.stages=[talker, token2wav]",
)


@pytest.fixture(scope="module")
def placed(checkpoint: Path) -> Iterator[Omni]:
    """The thinker in one process, the talker and the vocoder in another."""
    overrides = (*SMALL_POOLS, *GROUPS, "token2wav.max_hold_seconds=0")
    with Omni(checkpoint, device="cpu", dtype="float32", overrides=overrides, progress=False) as omni:
        yield omni
        omni.orchestrator.check_idle()


def logprobs_of(output: OmniRequestOutput) -> list[float]:
    return [
        token.logprob
        for each in output.outputs
        for position in each.logprobs or ()
        for token in (position.chosen, *position.top)
    ]


def assert_same(ours: OmniRequestOutput, theirs: OmniRequestOutput) -> None:
    assert [each.token_ids for each in ours.outputs] == [each.token_ids for each in theirs.outputs]
    assert [each.text for each in ours.outputs] == [each.text for each in theirs.outputs]
    # Which of the answers share a step depends on the clock, and the last bits of a product on what shares its batch.
    np.testing.assert_allclose(logprobs_of(ours), logprobs_of(theirs), rtol=0, atol=1e-5)
    assert ours.finish_reason is theirs.finish_reason
    assert (ours.audio is None) == (theirs.audio is None)
    if ours.audio is not None and theirs.audio is not None:
        np.testing.assert_array_equal(ours.audio.samples, theirs.audio.samples)
    usage = (ours.usage.prompt_tokens, ours.usage.stage_tokens, ours.usage.prompt_media)
    assert usage == (theirs.usage.prompt_tokens, theirs.usage.stage_tokens, theirs.usage.prompt_media)


def test_speech_is_the_same_in_processes(omni: Omni, placed: Omni) -> None:
    def both(*args: object, **kwargs: object) -> list[int]:
        with tokens_of(placed, "talker") as codes, tokens_of(omni, "talker") as expected:
            assert_same(placed.chat(*args, progress=False, **kwargs), omni.chat(*args, progress=False, **kwargs))
        assert codes == expected
        return codes

    pixels = np.random.default_rng(3).integers(0, 255, (56, 84, 3), dtype=np.uint8)
    assert len(both(say("Hello"), greedy(), modalities=BOTH)) == 20
    both(say("What is this?", {"type": "image", "image": pixels}), greedy(), modalities=BOTH)
    sampled = SamplingParams(seed=5, max_tokens=8, n=3, logprobs=2, ignore_eos=True)
    both(say("Hello"), {"thinker": sampled}, modalities=["text"])


def test_speech_begins_before_the_last_word(placed: Omni) -> None:
    items = list(placed.stream_chat(say("Tell me a long story."), greedy(800, 60), modalities=BOTH))
    first_sound = next(index for index, item in enumerate(items) if item.audio is not None and len(item.audio.samples))
    last_word = max(index for index, item in enumerate(items) if item.text)
    assert first_sound < last_word


def test_what_a_stage_refuses_is_refused_before_the_request_starts(placed: Omni) -> None:
    with pytest.raises(PromptTooLongError):
        placed.generate("word " * 40_000, progress=False)
    assert placed.stats().inflight == 0


def test_an_abort_ends_a_request_in_the_processes(placed: Omni) -> None:
    stream = placed.stream_chat(say("Tell me a long story."), greedy(400, 400), modalities=BOTH)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    output = placed.chat(say("Hello"), greedy(), modalities=BOTH, progress=False)
    assert output.finish_reason is FinishReason.LENGTH
    replicas = placed.replicas()
    assert {(replica.group, replica.number) for replica in replicas} == {("head", 0), ("voice", 0)}
    assert all(replica.requests > 0 and replica.failures == 0 for replica in replicas)
    assert placed.stats().replicas == tuple(replicas)
    model = SimpleNamespace(omni=placed)
    service = SimpleNamespace(models={"m": model}, audit_file=None, metrics=RequestMetrics())
    metrics = render(service).decode()  # type: ignore[arg-type]
    assert 'omnistage_stage_step_seconds_count{model="m",stage="talker"} 0.0' not in metrics
    assert 'omnistage_replica_up{group="voice",model="m",replica="0"} 1.0' in metrics
    requests = next(replica.requests for replica in replicas if replica.group == "voice")
    assert f'omnistage_replica_requests_total{{group="voice",model="m",replica="0"}} {requests}.0' in metrics


def test_pictures_are_the_same_in_two_processes(tmp_path: Path) -> None:
    folder = tmp_path / "sd3"
    tiny.write(folder, seed=5)

    def draw(*overrides: str) -> tuple[list[np.ndarray], list[int], list[int]]:
        params = DiffusionParams(width=64, height=64, steps=4, seed=3, n=2, preview_every=2)
        with Omni(folder, device="cpu", dtype="float32", overrides=overrides, progress=False) as omni:
            outputs = omni.generate(["a red square", "a blue circle"], {"denoise": params}, progress=False)
            omni.orchestrator.check_idle()
            requests = [replica.requests for replica in omni.replicas()]
        counts = [count for output in outputs for count in (output.usage.steps, output.usage.images)]
        return [image.pixels for output in outputs for image in output.images], counts, requests

    here, counts, _ = draw()
    group = ("stages=[denoise, decode]", "replicas=2")
    there, same_counts, requests = draw(*(f"deployment.placement.drawing.{key}" for key in group))
    assert len(here) == 4
    np.testing.assert_allclose(here, there, atol=1)  # each alone in its batch there, so rounded otherwise
    assert counts == same_counts
    assert requests == [1, 1]


def test_a_group_that_cannot_be_built_says_why_and_leaves_no_process(load: Callable[..., EngineParts]) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(ConfigError, match="cuda:99 was requested") as failure:
        load("deployment.placement.voice.stages=[token2wav]", "deployment.placement.voice.devices=[cuda:99]")
    assert failure.value.param == "pipeline.stages.token2wav.device"
    assert {child.pid for child in psutil.Process().children()} <= before
