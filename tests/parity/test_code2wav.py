"""Qwen3-Omni's code2wav: streamed in any windows and any company, it equals transformers' forward over it all."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from omnistage.cli.model_runner import OmniRunner
from omnistage.config import CodecBudget
from omnistage.core.errors import CheckpointError, InvalidRequestError, LimitExceededError
from omnistage.core.params import CodecParams
from omnistage.core.types import AudioChunk, Code, CodecFrames, CodecInput, FinishReason, RequestInfo, StageInput
from omnistage.engines.codec import CodecStage, Window, causal
from omnistage.engines.graphs import GraphCache
from omnistage.models.qwen3_omni_moe.code2wav import Code2Wav
from tests.code2wav_harness import (
    SMALL,
    Frames,
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeCode2WavConfig,
    build,
    error,
    random_frames,
    reference,
    stream,
)
from tests.graph_harness import FakeCapture, HostTensors

EXACT = 1e-7
"""Samples are float32: in a float64 network only their own rounding is left."""
CLOSE = 5e-6
"""Of float32, whose rounding the random layers amplify a little."""


@pytest.fixture(scope="module")
def model() -> Qwen3OmniMoeCode2Wav:
    return build(torch.float64)


@pytest.fixture(scope="module")
def component(model: Qwen3OmniMoeCode2Wav) -> Code2Wav:
    return Code2Wav(model, voices=("Ethan",))


def with_graphs(model: Qwen3OmniMoeCode2Wav, sizes: tuple[int, ...] = (2, 2, 4, 8)) -> Code2Wav:
    """Warmed up for windows of these sizes, with captures that a CPU can replay."""
    component = Code2Wav(model)
    component._graphs = GraphCache(enabled=True, capture=FakeCapture())
    component.warm_up(sizes, 0, 64)
    return component


CUTS: dict[str, list[int]] = {
    "whole": [],
    "frame by frame": [1] * 49,
    "doubling": [2, 2, 4, 8, 16],
    "one, then all": [1],
    "all, then one": [49],
    "uneven": [3, 7, 1, 20],
    "longer than the attention's window": [9, 11],
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=list(CUTS))
def test_streamed_windows_equal_the_whole_forward(
    model: Qwen3OmniMoeCode2Wav, component: Code2Wav, cuts: list[int]
) -> None:
    frames = random_frames(model, 50)
    assert error(stream(component, frames, cuts), reference(model, frames)) < EXACT


@pytest.mark.parametrize("count", [1, 2, 3, 7, 71, 150])
def test_utterances_of_any_length(model: Qwen3OmniMoeCode2Wav, component: Code2Wav, count: int) -> None:
    frames, chance = random_frames(model, count, seed=count), random.Random(count)
    cuts: list[int] = []
    while (left := count - sum(cuts)) > 1 and len(cuts) < 10:
        cuts.append(chance.randint(1, min(left - 1, 20)))
    assert error(stream(component, frames, cuts), reference(model, frames)) < EXACT


def test_float32_differs_by_rounding_alone() -> None:
    model = build()
    component, frames = Code2Wav(model), random_frames(model, 60)
    expected = reference(model, frames)
    assert expected.std() > 0.05
    for cuts in CUTS.values():
        assert error(stream(component, frames, cuts), expected) < CLOSE


def test_what_a_request_sounds_like_does_not_depend_on_its_company(
    model: Qwen3OmniMoeCode2Wav, component: Code2Wav
) -> None:
    """Five requests at five places, with windows of all sizes in one batch; one joins late, others end early."""
    lengths, sizes = (50, 23, 8, 31, 1), random.Random(0)
    utterances = [random_frames(model, length, seed=i) for i, length in enumerate(lengths)]
    states = [component.open(str(i), CodecParams(), None) for i in range(5)]
    done, waves = [0] * 5, [[np.zeros(0, np.float32)] for _ in range(5)]
    turn = 0
    while unfinished := [i for i in range(5) if done[i] < lengths[i] and (i != 3 or turn > 2)]:
        windows = []
        for i in unfinished:
            count = min(sizes.choice((1, 2, 5, 9)), lengths[i] - done[i])
            part = utterances[i][done[i] : done[i] + count]
            done[i] += count
            windows.append(Window(states[i], part, 0, count, done[i] == lengths[i]))
        for i, wave in zip(unfinished, component.decode(windows), strict=True):
            waves[i].append(wave)
        turn += 1
    for frames, parts in zip(utterances, waves, strict=True):
        assert error(np.concatenate(parts), reference(model, frames)) < EXACT


def test_long_windows_run_in_pieces(
    model: Qwen3OmniMoeCode2Wav, component: Code2Wav, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal, "_MAX_PIECE", 16)
    monkeypatch.setattr(causal, "MAX_FRAMES", 32)  # two pieces of 16 in a forward
    shapes: list[tuple[int, ...]] = []
    hook = component.network.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    utterances = [random_frames(model, count, seed=count) for count in (50, 40, 33)]
    states = [component.open(str(i), CodecParams(), None) for i in range(3)]
    windows = [Window(s, f, 0, len(f), True) for s, f in zip(states, utterances, strict=True)]
    waves = component.decode(windows)
    hook.remove()
    assert max(rows * frames for rows, _, frames in shapes) == 32
    for frames, wave in zip(utterances, waves, strict=True):
        assert error(wave, reference(model, frames)) < EXACT


# ---------------------------------------------------------------------------------------------------- graphs


def test_warm_up_captures_all_that_requests_run(model: Qwen3OmniMoeCode2Wav) -> None:
    component = with_graphs(model)
    captures = component._graphs.captures
    assert captures == 7 + 6 + 5 + 7  # up to 64, 32 and 16 rows of 2, 4 and 8 frames; first windows of 2
    utterances = [random_frames(model, count, seed=count) for count in (1, 2, 3, 16, 21, 37, 60)]
    stage = CodecStage("code2wav", component, budget())
    waves = run(stage, [(frames, CodecParams(streaming=i != 4)) for i, frames in enumerate(utterances)])
    for frames, wave in zip(utterances, waves, strict=True):
        assert error(wave, reference(model, frames)) < EXACT
    assert component._graphs.captures == captures
    assert component._graphs.replays > captures


def test_without_graphs_warm_up_decodes_a_window(component: Code2Wav) -> None:
    CodecStage("code2wav", component, budget()).warm_up()


def test_windows_that_no_graph_was_captured_for_are_not_padded(model: Qwen3OmniMoeCode2Wav) -> None:
    component, frames = with_graphs(model), random_frames(model, 40)
    assert error(stream(component, frames, [3, 5, 11, 1, 2]), reference(model, frames)) < EXACT


# ----------------------------------------------------------------------------------------------------- stage


def budget(**changes: int) -> CodecBudget:
    return CodecBudget(**{"first_chunk_blocks": 2, "max_chunk_blocks": 8, "max_hold_seconds": 0.0, **changes})


def run(stage: CodecStage, requests: list[tuple[Frames, CodecParams]]) -> list[np.ndarray]:
    for i, (frames, params) in enumerate(requests):
        stage.submit(StageInput(RequestInfo(str(i)), params, CodecInput(frames[:3], final=len(frames) <= 3)))
    waves: dict[str, list[np.ndarray]] = {str(i): [] for i in range(len(requests))}
    finished = {}
    rest = {str(i): frames[3:] for i, (frames, _) in enumerate(requests)}
    while len(finished) < len(requests):
        for request_id, frames in rest.items():
            if frames:
                stage.feed(request_id, CodecFrames(frames[:5], final=len(frames) <= 5))
                rest[request_id] = frames[5:]
        for chunk in stage.step():
            if isinstance(chunk.payload, AudioChunk):
                waves[chunk.request_id].append(chunk.payload.samples)
            if chunk.finish is not None:
                finished[chunk.request_id] = chunk.finish
    assert all(finish is FinishReason.STOP for finish in finished.values())
    return [np.concatenate(parts) for parts in waves.values()]


def test_the_stage_gives_sound_from_the_first_frames(model: Qwen3OmniMoeCode2Wav, component: Code2Wav) -> None:
    stage, frames = CodecStage("code2wav", component, budget()), random_frames(model, 20)
    stage.submit(StageInput(RequestInfo("r", voice="Ethan"), CodecParams(), CodecInput(frames[:2])))
    (first,) = [c.payload.samples for c in stage.step() if isinstance(c.payload, AudioChunk)]
    assert first.size == component.samples(2)
    assert error(first, reference(model, frames)[: first.size]) < EXACT
    stage.abort("r")


@pytest.mark.parametrize("streaming", [True, False])
def test_the_stage_equals_the_forward(model: Qwen3OmniMoeCode2Wav, component: Code2Wav, streaming: bool) -> None:
    utterances = [random_frames(model, count, seed=count) for count in (1, 4, 30, 55)]
    stage = CodecStage("code2wav", component, budget())
    waves = run(stage, [(frames, CodecParams(streaming=streaming)) for frames in utterances])
    for frames, wave in zip(utterances, waves, strict=True):
        assert error(wave, reference(model, frames)) < EXACT


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (((1, 2, 3),), "a frame has 4 codes, not \\(1, 2, 3\\)"),
        (((1, 2, 3, 4, 5),), "a frame has 4 codes"),
        ((7,), "a frame has 4 codes, not 7"),
        (((1, 2, 3, 64),), "code 64 is outside the codebook \\[0, 64\\)"),
        (((1, -1, 3, 4),), "code -1 is outside"),
    ],
)
def test_codes_that_do_not_fit_are_refused_by_name(component: Code2Wav, codes: tuple[Code, ...], message: str) -> None:
    stage = CodecStage("code2wav", component, budget())
    with pytest.raises(InvalidRequestError, match=message):
        stage.submit(StageInput(RequestInfo("a"), CodecParams(), CodecInput(codes)))
    stage.submit(StageInput(RequestInfo("b"), CodecParams(), CodecInput()))
    with pytest.raises(InvalidRequestError, match=message):
        stage.feed("b", CodecFrames(codes))


def test_utterances_past_the_position_table_are_refused(component: Code2Wav) -> None:
    stage = CodecStage("code2wav", component, budget())
    with pytest.raises(LimitExceededError, match="has 401 codes and may have 400"):
        stage.submit(StageInput(RequestInfo("a"), CodecParams(), CodecInput(((0,) * 4,) * 401)))


def test_a_batch_that_fails_leaves_its_requests_as_they_were(
    model: Qwen3OmniMoeCode2Wav, component: Code2Wav, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames, state = random_frames(model, 12), component.open("r", CodecParams(), None)
    (head,) = component.decode([Window(state, frames[:4], 0, 4, False)])
    tail = Window(state, frames[4:], 0, 8, True)
    monkeypatch.setattr(component.network.decoder[-1], "forward", _fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        component.decode([tail])
    monkeypatch.undo()
    (rest,) = component.decode([tail])
    assert error(np.concatenate((head, rest)), reference(model, frames)) < EXACT


def _fail(*_: object) -> None:
    raise RuntimeError("out of memory")


# ------------------------------------------------------------------------------------------------- the model


def test_the_given_model_stays_as_it_is(model: Qwen3OmniMoeCode2Wav) -> None:
    frames = random_frames(model, 10)
    before, implementation = reference(model, frames), model.config._attn_implementation
    component = Code2Wav(model)
    assert np.array_equal(reference(model, frames), before)
    assert model.config._attn_implementation == implementation
    shared = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in component.network.parameters()} == shared


def test_real_shapes_are_555_samples_behind_and_need_one_frame() -> None:
    with torch.device("meta"):
        real = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig())
    component = Code2Wav(real)
    assert [component.samples(count) for count in (1, 2, 100)] == [1365, 3285, 192_000 - 555]
    assert component.layout.first_blocks == 1
    assert component.layout.num_codebooks == 16
    assert component.layout.code_seconds == pytest.approx(0.08)


def test_a_decoder_that_needs_two_frames_for_a_sample_gives_none_for_one() -> None:
    model = build(torch.float64, upsampling_ratios=(), upsample_rates=(2, 2))
    component = Code2Wav(model)
    assert component.layout.first_blocks == 2
    assert stream(component, random_frames(model, 1), []).size == 0
    frames = random_frames(model, 9)
    assert error(stream(component, frames, [2, 3]), reference(model, frames)) < EXACT


def test_other_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    monkeypatch.setattr(type(model.config), "layer_types", property(lambda _: ["full_attention"] * 3))
    with pytest.raises(CheckpointError, match="all must be sliding_attention"):
        Code2Wav(model)


def test_the_reference_decodes_chunks_of_long_utterances_with_gaps(model: Qwen3OmniMoeCode2Wav) -> None:
    """Why streaming is held against `forward`: `chunked_decode` drops samples at the end of each chunk."""
    frames, component = random_frames(model, 40), Code2Wav(model)
    codes = torch.tensor(frames).T[None]
    with torch.no_grad():
        whole, chunked = model.chunked_decode(codes, 40), model.chunked_decode(codes, 20)
    assert error(whole[0, 0].numpy(), reference(model, frames)) == 0
    assert whole.shape[-1] == component.samples(40)
    assert chunked.shape[-1] == 2 * component.samples(20) < component.samples(40)


# ------------------------------------------------------------------------------------------------------ plan


def planned(target: str) -> Code2Wav:
    with torch.device("meta"):
        return Code2Wav(Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**SMALL)), target=torch.device(target))


def test_the_plan_counts_weights_activations_and_what_requests_keep() -> None:
    component = planned("cpu")
    one, two = component.memory(1, 8), component.memory(2, 8)
    assert one.weights == sum(p.numel() * 4 for p in component.network.parameters()) + 4 * 8 + 8 * 4
    assert 0 < one.activations < two.activations <= 2 * one.activations
    assert one.graphs == 0
    assert component.request_bytes == 4 * component._contexts.size


def test_the_plan_counts_graphs_where_they_will_be_captured() -> None:
    memory = planned("cuda").memory(1, 8)
    assert memory.graphs > planned("cpu").memory(16, 8).activations
    assert memory.graphs == planned("cuda").memory(2, 8).graphs


@pytest.mark.parametrize("first", [True, False])
def test_nothing_of_the_host_is_read_in_a_forward_that_is_captured(first: bool) -> None:
    component = planned("cuda")
    codes = torch.zeros(2, 4, 6, dtype=torch.int64, device="meta")
    rows = torch.empty(2, component._contexts.size, device="meta")
    with torch.inference_mode(), HostTensors() as host:
        wave, kept = component._function(first)(codes, rows, codes[:, 0, 0])
    assert host.found == []
    assert wave.shape[1] == (component.samples(6) if first else 6 * component.frame_samples)
    assert kept.shape == rows.shape


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("auto", torch.float32), ("tf32", torch.float32), ("float32", torch.float32), ("float16", torch.float16)],
)
def test_the_stage_computes_in_the_precision_that_is_asked_for(
    precision: str, dtype: torch.dtype, checkpoint_of: Callable[..., Path]
) -> None:
    runner = OmniRunner(checkpoint_of("qwen3_omni_moe"), (f"code2wav.precision={precision}",))
    component = runner.load_component("code2wav")
    assert isinstance(component, Code2Wav)
    assert {parameter.dtype for parameter in component.network.parameters()} == {dtype}
