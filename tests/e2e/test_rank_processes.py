"""A language model over two ranks, each a process: the same answers, and a rank that dies is replaced."""

from __future__ import annotations

import base64
import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from omnistage.core.errors import StageLostError
from omnistage.core.params import SamplingParams
from omnistage.core.stage import StageState
from omnistage.core.types import FinishReason
from omnistage.engines.ar.parallel import ParallelStage
from omnistage.models.causal_lm import tiny
from omnistage.models.registry import REGISTRY
from omnistage.omni import Omni
from omnistage.pipeline import supervision
from omnistage.pipeline.outputs import OmniRequestOutput
from omnistage.pipeline.ranks import HANG_SECONDS, Ranks
from omnistage.placement.worker_process import LocalProcess
from tests.e2e.harness import SMALL_POOLS, SPEECH_MODELS
from tests.unit.placement_harness import eventually

pytestmark = pytest.mark.timeout(300)

PROMPTS = ["Hello", "one two three four five six seven", "x", "the quick brown fox jumps over the lazy dog"]
SETTINGS = ("thinker.kv_blocks=24", "thinker.prefill_chunk=16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny.write(path)
    return path


def start(folder: Path, *settings: str) -> Omni:
    overrides = (*SETTINGS, *settings)
    return Omni(folder, device="cpu", dtype="float32", overrides=overrides, progress=False)


@pytest.fixture(scope="module")
def omni(folder: Path) -> Iterator[Omni]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervision, "REBUILD_PAUSES", (0.0,))
        with start(folder, "thinker.tensor_parallel=2") as omni:
            yield omni
            pids = ranks_of(omni).pids()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def ranks_of(omni: Omni) -> Ranks:
    stage = omni.orchestrator._loops["thinker"].stage
    assert isinstance(stage, ParallelStage)
    assert isinstance(stage._ranks, Ranks)
    return stage._ranks


def answers(omni: Omni) -> list[tuple[object, ...]]:
    params = SamplingParams(max_tokens=16, temperature=0.7, seed=3, logprobs=1, ignore_eos=True)
    outputs = [output.outputs[0] for output in omni.generate(PROMPTS, params, progress=False)]
    return [(each.token_ids, each.text, [round(p.chosen.logprob, 3) for p in each.logprobs]) for each in outputs]


def test_answers_are_those_of_one_process(omni: Omni, folder: Path) -> None:
    with start(folder) as alone:
        expected = answers(alone)
    assert answers(omni) == expected


def test_pictures_and_speech_over_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    """Rank 0 encodes the picture, whose rows go to deeper layers of all ranks, and predicts what a frame holds more."""
    speech = SPEECH_MODELS["qwen3_omni_moe"]
    tiny_model = REGISTRY.family(speech.family).tiny
    assert tiny_model is not None
    tiny_model(tmp_path / "model", seed=7)
    picture = io.BytesIO()
    Image.radial_gradient("L").resize((56, 56)).convert("RGB").save(picture, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    messages = [{"role": "user", "content": parts}]

    def answer(*settings: str) -> OmniRequestOutput:
        with start(tmp_path / "model", *SMALL_POOLS[1:], *settings) as omni:
            return omni.chat(messages, speech.greedy(), modalities=["text", "audio"])

    ours = answer("thinker.tensor_parallel=2", "talker.tensor_parallel=2")
    expected = answer()
    assert ours.token_ids == expected.token_ids
    assert ours.audio is not None
    assert expected.audio is not None
    np.testing.assert_allclose(ours.audio.samples, expected.audio.samples, atol=1e-4)


@pytest.mark.parametrize(
    ("fault", "said"),
    [(signal.SIGKILL, r"has ended \(signal 9, as when"), (signal.SIGSTOP, "has not responded for 2")],
)
def test_requests_end_with_a_rank_that_dies_or_hangs_and_the_stage_is_rebuilt(
    omni: Omni, fault: signal.Signals, said: str
) -> None:
    before, ranks, rebuilds = answers(omni), ranks_of(omni), omni.health()["thinker"].rebuilds
    stream = omni.stream_chat([{"role": "user", "content": "Tell me"}], SamplingParams(max_tokens=900, ignore_eos=True))
    next(stream)
    os.kill(ranks.pids()[0], fault)
    with pytest.raises(StageLostError, match=f"rank 1 of stage 'thinker' {said}"):
        for _ in stream:
            pass
    eventually(lambda: omni.health()["thinker"].rebuilds == rebuilds + 1)
    assert omni.health()["thinker"].state is StageState.UP
    assert ranks_of(omni).pids() != ranks.pids()
    assert answers(omni) == before
    assert FinishReason.ERROR in omni.stats().finished


SLOW_RANK = f"""
import sys, time
from omnistage.engines.ar.parallel import FollowingComponent
from omnistage.pipeline import rank

run, steps = FollowingComponent.run, []

def run_slowly(self, step):
    steps.append(step)
    time.sleep({2 * HANG_SECONDS} if len(steps) == 9 else 0.0)
    run(self, step)

FollowingComponent.run = run_slowly
rank.main(sys.argv[1:])
"""


def test_a_rank_that_is_slow_but_gives_signs_of_life_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omnistage.pipeline.ranks._COMMAND", ("-c", SLOW_RANK))
    with start(folder, "thinker.tensor_parallel=2") as omni:
        (output,) = omni.generate(["Hello"], SamplingParams(max_tokens=16, ignore_eos=True), progress=False)
        assert output.finish_reason is FinishReason.LENGTH
        assert omni.health()["thinker"].rebuilds == 0
        assert output.trace is not None
        thinker = output.trace.stages["thinker"]
        assert thinker.first_chunk is not None
        assert thinker.last_chunk is not None
        assert thinker.last_chunk - thinker.first_chunk > HANG_SECONDS


def test_a_rank_ends_with_its_parent() -> None:
    """Whatever ends the parent closes its end of the socket."""
    process = LocalProcess(("-m", "omnistage.pipeline.rank"))
    process.socket.close()
    assert process.wait(60) == 0
