"""Qwen3-Omni on a GPU against the same on the CPU, in float32: equal tokens and codes, nearly equal sound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omnistage.config import OmniEngineArgs
from omnistage.core.family import BridgeResult
from omnistage.core.params import CodecParams, SamplingParams, StageParams
from omnistage.core.types import Code, CodecFrames, CodecInput, RequestInfo, StageChunk
from omnistage.engines.ar.stage import ARStage
from omnistage.models._qwen_omni.bridges import talker2codec
from omnistage.models._qwen_omni.verify import Answer, make_cases
from omnistage.models.qwen3_omni_moe import tiny
from omnistage.omni import Omni
from omnistage.pipeline.build import build_parts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

BOTH = ["text", "audio"]
WAVE_TOLERANCE = 1e-2
CASES = make_cases(8, seed=1)
SMALL = ("max_model_len=2048", "kv_blocks=512", "graph_batch_sizes=[1,2,4,8]")
MODES: dict[str, tuple[str, ...]] = {
    "as it runs by default": (),
    "sampled and predicted after the step": ("sample_in_graph=false",),
    "compiled": ("compile=true",),
    "without graphs": ("cuda_graphs=false",),
    "sdpa, read before the next step": ("attention=sdpa", "cuda_graphs=false", "run_ahead=false"),
    "more than one replay": ("graph_batch_sizes=[2]",),
    "prompts in captured steps": ("max_batch_tokens=64", "graph_prefill_tokens=[16,64]", "prefix_caching=false"),
    "small steps, preempted": ("max_batch_tokens=48", "prefill_chunk=32", "prefix_caching=false", "kv_blocks=64"),
}


def greedy(index: int) -> dict[str, StageParams]:
    case = CASES[index]
    return {
        "thinker": SamplingParams(temperature=0.0, max_tokens=case.max_tokens, ignore_eos=True),
        "talker": SamplingParams(temperature=0.0, max_tokens=case.max_codes, repetition_penalty=1.05),
        "code2wav": CodecParams(streaming=False),
    }


def sampled(index: int) -> dict[str, StageParams]:
    talker = SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05, seed=index, max_tokens=20)
    return {**greedy(index), "talker": talker}


def answers(
    folder: Path, device: str, options: Sequence[str] = (), make: Any = greedy, dtype: str = "float32"
) -> list[Answer]:
    """All chats in one batch."""
    given = tuple(f"{stage}.{option}" for stage in ("thinker", "talker") for option in (*SMALL, *options))
    args = OmniEngineArgs(model=str(folder), device=device, dtype=dtype, overrides=given)  # type: ignore[arg-type]
    parts, codes = build_parts(args, progress=False), dict[str, list[Code]]()

    def note(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
        state, inputs = talker2codec(request, state, chunk)
        for value in inputs:
            if isinstance(value, CodecInput | CodecFrames):
                codes.setdefault(request.request_id, []).extend(value.codes)
        return state, inputs

    bridges = {**parts.bridges, "code2wav": note}
    with Omni.from_parts(parts.graph, parts.stages, bridges, parts.defaults, parts.processor) as omni:
        outputs = omni.chat(
            [case.as_sent() for case in CASES],
            [make(index) for index in range(len(CASES))],
            modalities=BOTH,
            use_audio_in_video=True,
            progress=False,
        )
        found = []
        for output in outputs:
            assert output.error is None
            assert output.audio is not None
            found.append(Answer(output.token_ids, codes[output.request_id], output.audio.samples))
        omni.orchestrator.check_idle()
        for stage in omni.orchestrator.stages.values():
            if isinstance(stage, ARStage):
                stage.check_integrity()
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("q3") / "model"
    tiny.write(folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[Answer]:
    return answers(checkpoint, "cpu")


@pytest.mark.parametrize("mode", MODES)
def test_tokens_codes_and_sound_are_those_of_the_cpu(checkpoint: Path, expected: list[Answer], mode: str) -> None:
    for own, other in zip(answers(checkpoint, "cuda", MODES[mode]), expected, strict=True):
        assert own.token_ids == other.token_ids
        assert own.codes == other.codes
        assert own.waveform.shape == other.waveform.shape
        assert np.abs(own.waveform - other.waveform).max() < WAVE_TOLERANCE


def test_sampled_frames_do_not_depend_on_where_they_are_sampled(checkpoint: Path) -> None:
    first, *others = (
        [answer.codes for answer in answers(checkpoint, "cuda", options, sampled)]
        for options in ((), ("sample_in_graph=false",), ("cuda_graphs=false",), ("graph_batch_sizes=[2]",))
    )
    assert len({tuple(codes) for codes in first}) == len(CASES)
    for other in others:
        assert other == first


def test_bfloat16_runs_with_its_experts_in_captured_steps(checkpoint: Path) -> None:
    """`grouped_mm` has a kernel for it, and nothing in a step waits for the device."""
    found = answers(checkpoint, "cuda", ("experts=grouped_mm",), dtype="bfloat16")
    assert all(len(answer.codes) == case.max_codes for answer, case in zip(found, CASES, strict=True))
