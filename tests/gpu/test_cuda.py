"""The pipelines on a GPU against the same on the CPU, in float32: equal tokens and codes, nearly equal sound."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omnistage.config import OmniEngineArgs
from omnistage.core.family import BridgeResult
from omnistage.core.params import CodecParams, SamplingParams, SpeechQuality, StageParams
from omnistage.core.types import (
    AudioChunk,
    CodecFrames,
    CodecInput,
    FinishReason,
    OmniTokensPrompt,
    RequestInfo,
    StageChunk,
    StageInput,
    TokenChunk,
)
from omnistage.engines.ar import graphs
from omnistage.engines.ar.sampling.sampler import Sampler
from omnistage.engines.ar.stage import ARStage
from omnistage.models._qwen_omni.bridges import talker2codec
from omnistage.models.causal_lm import tiny as tiny_lm
from omnistage.models.qwen2_5_omni import tiny as tiny_omni
from omnistage.omni import Omni
from omnistage.pipeline.build import build_parts
from omnistage.pipeline.intake import RequestOptions
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DEVICE = "cuda"
BOTH = ["text", "audio"]
WAVE_TOLERANCE = 1e-2
# Few graphs: capturing them is most of the time that these tests take.
SMALL = ("max_model_len=1024", "kv_blocks=256", "graph_batch_sizes=[1,2,4,8]")
TIGHT = ("max_batch_tokens=48", "prefill_chunk=32", "kv_blocks=18", "prefix_caching=false")
MODES = {
    "triton with graphs": ("attention=triton", "cuda_graphs=true"),
    "triton without graphs": ("attention=triton", "cuda_graphs=false"),
    "sdpa": ("attention=sdpa", "cuda_graphs=false"),
}


def overrides(stages: Sequence[str], options: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{stage}.{option}" for stage in stages for option in options)


def assert_empty(omni: Omni) -> None:
    omni.orchestrator.check_idle()
    for stage in omni.orchestrator.stages.values():
        if isinstance(stage, ARStage):
            stage.check_integrity()
            assert stage.scheduler.pool.free_blocks == stage.scheduler.pool.num_blocks


# -------------------------------------------------------------------------------------------------- causal LM


def prompts() -> list[OmniTokensPrompt]:
    rng = np.random.default_rng(0)
    return [OmniTokensPrompt(tuple(rng.integers(0, 800, n).tolist())) for n in (3, 17, 64, 130, 30, 9, 200)]


GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lm") / "model"
    tiny_lm.write(folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def lm_expected(lm: Path) -> list[list[int]]:
    with Omni(lm, device="cpu", dtype="float32", overrides=overrides(["thinker"], SMALL), progress=False) as omni:
        return [output.token_ids for output in omni.generate(prompts(), GREEDY, progress=False)]


STEPS = {
    "triton with graphs, plain steps": ("attention=triton", "run_ahead=false", "merge_linears=false"),
    "triton with graphs, compiled": ("attention=triton", "compile=true"),
    "sdpa, plain steps": ("attention=sdpa", "cuda_graphs=false", "run_ahead=false"),
}


@pytest.mark.parametrize("mode", [*MODES, *STEPS])
def test_a_causal_lm_writes_what_it_writes_on_the_cpu(lm: Path, lm_expected: list[list[int]], mode: str) -> None:
    given = overrides(["thinker"], [*SMALL, *(MODES | STEPS)[mode]])
    with Omni(lm, device=DEVICE, dtype="float32", overrides=given, progress=False) as omni:
        stage = omni.orchestrator.stages["thinker"]
        assert isinstance(stage, ARStage)
        assert (stage.runner.graphs is not None) == mode.startswith("triton with graphs")
        for _ in range(2):  # the second time from the prefix cache
            outputs = omni.generate(prompts(), GREEDY, progress=False)
            assert [output.token_ids for output in outputs] == lm_expected
        assert_empty(omni)


@pytest.mark.parametrize("option", ["compile=false", "compile=true"])
def test_prompts_in_captured_steps_change_nothing(lm: Path, lm_expected: list[list[int]], option: str) -> None:
    """Steps of up to 64 tokens: pieces of prompts, several at once, beside generated tokens."""
    given = overrides(["thinker"], [*SMALL, "attention=triton", "graph_prefill_tokens=[16,64]", "max_batch_tokens=64"])
    given = (*given, *overrides(["thinker"], [option]))
    with Omni(lm, device=DEVICE, dtype="float32", overrides=given, progress=False) as omni:
        runner = omni.orchestrator.stages["thinker"].runner
        before = runner.prefill_graphs.replays
        outputs = omni.generate(prompts(), GREEDY, progress=False)
        assert [output.token_ids for output in outputs] == lm_expected
        assert runner.prefill_graphs.replays - before > 5
        assert_empty(omni)


def test_nothing_is_compiled_once_a_stage_is_warm(lm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is compiled while requests wait stops all of them for most of a second."""
    from triton import knobs

    compiled: list[object] = []
    given = overrides(["thinker"], [*SMALL, "attention=triton"])
    with Omni(lm, device=DEVICE, dtype="float32", overrides=given, progress=False) as omni:
        hook = lambda **details: compiled.append(details["fn"].name)  # noqa: E731
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
        for count in (1, 2, 3, 4, 5, 7):
            for more in ({}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}, {"repetition_penalty": 1.2}):
                params = SamplingParams(max_tokens=3, ignore_eos=True, seed=1, **more)
                omni.generate(prompts()[:count], params, progress=False)
    assert compiled == []


def test_small_steps_and_preemption_change_nothing(lm: Path, lm_expected: list[list[int]]) -> None:
    given = overrides(["thinker"], [*SMALL, *TIGHT])
    with Omni(lm, device=DEVICE, dtype="float32", overrides=given, progress=False) as omni:
        outputs = omni.generate(prompts(), GREEDY, progress=False)
        assert [output.token_ids for output in outputs] == lm_expected
        assert omni.stats().stages["thinker"].preemptions > 0
        assert_empty(omni)


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_long_requests_capture_nothing_after_the_start(
    lm: Path, lm_expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Whether each length has a step of its own, or there was no time and all long ones run in the largest batch."""
    monkeypatch.setattr(graphs, "_LENGTHS", (16, 64))
    monkeypatch.setattr(graphs, "_OPTIONAL_SECONDS", seconds)

    def capture(*args: object, **options: object) -> None:
        raise AssertionError("a step was captured while requests ran")

    given = overrides(["thinker"], [*SMALL, "attention=triton"])
    with Omni(lm, device=DEVICE, dtype="float32", overrides=given, progress=False) as omni:
        stage = omni.orchestrator.stages["thinker"]
        assert isinstance(stage, ARStage)
        assert stage.runner.graphs is not None
        assert len(stage.runner.graphs.shapes) == (12 if seconds else 5)
        monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", capture)
        outputs = omni.generate(prompts(), GREEDY, progress=False)
        assert [output.token_ids for output in outputs] == lm_expected
        for prompt, expected in zip(prompts(), lm_expected, strict=True):
            [alone] = omni.generate(prompt, GREEDY, progress=False)
            assert alone.token_ids == expected
        assert_empty(omni)


def test_a_seed_draws_the_same_tokens_in_any_batch(lm: Path) -> None:
    params = [SamplingParams(seed=i, top_k=40, top_p=0.9, max_tokens=12, ignore_eos=True) for i in range(7)]
    given = overrides(["thinker"], SMALL)
    with Omni(lm, device=DEVICE, dtype="float32", overrides=given, progress=False) as omni:
        together = omni.generate(prompts(), params, progress=False)
        alone = [omni.generate(p, own, progress=False)[0] for p, own in zip(prompts(), params, strict=True)]
        assert [o.token_ids for o in together] == [o.token_ids for o in alone]


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "min_p": 0.05, "logprobs": 2},
    {"top_k": 40, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"top_p": 0.8, "frequency_penalty": 0.5, "logit_bias": {5: 2.0}, "suppress_token_ids": (7, 8)},
    {"min_tokens": 9, "ignore_eos": False, "stop_token_ids": tuple(range(100)), "max_tokens": 40},
]
OWN = [SamplingParams.parse({"seed": i, "max_tokens": 24, "ignore_eos": True, **p}) for i, p in enumerate(SAMPLED)]


@pytest.mark.parametrize("options", [(), TIGHT, ("graph_batch_sizes=[2]",), ("run_ahead=false",)], ids=str)
def test_captured_steps_sample_what_is_sampled_after_them(lm: Path, options: tuple[str, ...]) -> None:
    """In any batch, after preemption, and where a batch takes more than one replay."""
    found = []
    for flag in ("true", "false"):
        given = overrides(["thinker"], [*SMALL, *options, f"sample_in_graph={flag}"])
        with Omni(lm, device=DEVICE, dtype="float32", overrides=given, progress=False) as omni:
            stage = omni.orchestrator.stages["thinker"]
            assert isinstance(stage, ARStage)
            assert stage.runner.sample_in_graph == (flag == "true")
            outputs = omni.generate(prompts(), OWN, progress=False)
            assert all(output.error is None for output in outputs)
            found.append([output.token_ids for output in outputs])
            if options == TIGHT:
                assert omni.stats().stages["thinker"].preemptions > 0
            assert_empty(omni)
    assert found[0] == found[1]


def test_a_batch_that_is_sampled_after_its_step_changes_nothing_for_the_others(
    lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request joins, as one with a grammar does, and ends: before and after it, steps sample themselves."""
    build, refused = Sampler.block, 0

    def block(self: Sampler, keys: Sequence[str]) -> Any:
        nonlocal refused
        if any(self._states[key].params.seed == 99 for key in keys):
            refused += 1
            return None
        return build(self, keys)

    monkeypatch.setattr(Sampler, "block", block)
    joins = SamplingParams(seed=99, max_tokens=6, ignore_eos=True)
    with Omni(lm, device=DEVICE, dtype="float32", overrides=overrides(["thinker"], SMALL), progress=False) as omni:
        expected = [output.token_ids for output in omni.generate(prompts(), OWN, progress=False)]
        assert not refused
        together = omni.generate([*prompts()[:3], *prompts()], [*OWN[:1], joins, joins, *OWN], progress=False)
        assert refused
        assert [output.token_ids for output in together[3:]] == expected


# ----------------------------------------------------------------------------------------------- Qwen2.5-Omni


def picture(seed: int, height: int = 84, width: int = 112) -> dict[str, object]:
    return {"type": "image", "image": np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)}


def say(text: str, *parts: dict[str, object]) -> list[dict[str, object]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


CHATS = [
    say("Hello, who are you?"),
    say("What is in this picture?", picture(1)),
    say("Compare them.", picture(2), picture(3, 56, 140)),
    say("Thank you."),
]


def speech(tokens: int, codes: int, **codec: Any) -> dict[str, StageParams]:
    return {
        "thinker": SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        "talker": SamplingParams(temperature=0.0, max_tokens=codes, min_tokens=codes, repetition_penalty=1.05),
        "token2wav": CodecParams(**{"streaming": False, "seed": 5, **codec}),
    }


PARAMS = [speech(6 + 3 * i, 20 + 7 * i) for i in range(len(CHATS))]


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    codes: list[int]
    samples: np.ndarray


class Model:
    """The pipeline on a device, with the codes between talker and token2wav noted."""

    def __init__(self, folder: Path, device: str, options: Sequence[str] = (), dtype: str = "float32") -> None:
        given = (*overrides(["thinker", "talker"], [*SMALL, *options]), "token2wav.precision=float32")
        if "cuda_graphs=false" in options:
            given = (*given, "token2wav.cuda_graphs=false")
        args = OmniEngineArgs(model=str(folder), device=device, dtype=dtype, overrides=given)  # type: ignore[arg-type]
        parts = build_parts(args, progress=False)
        self._codes: dict[str, list[int]] = {}
        bridges = {**parts.bridges, "token2wav": self._note}
        self.omni = Omni.from_parts(parts.graph, parts.stages, bridges, parts.defaults, parts.processor)

    def _note(self, request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
        if isinstance(chunk.payload, TokenChunk):
            self._codes.setdefault(request.request_id, []).extend(chunk.payload.token_ids)
        return talker2codec(request, state, chunk)

    def answer(self, output: OmniRequestOutput) -> Answer:
        assert output.error is None
        assert output.audio is not None
        return Answer(output.token_ids, self._codes[output.request_id], output.audio.samples)

    def answers(self, chats: Sequence[Any], params: Sequence[Any]) -> list[Answer]:
        outputs = self.omni.chat(list(chats), list(params), modalities=BOTH, progress=False)
        return [self.answer(output) for output in outputs]

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.omni.close()


def assert_alike(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for own, other in zip(found, expected, strict=True):
        assert own.token_ids == other.token_ids
        assert own.codes == other.codes
        assert own.samples.shape == other.samples.shape
        assert np.abs(own.samples - other.samples).max() < WAVE_TOLERANCE


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("omni") / "model"
    tiny_omni.write(folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[Answer]:
    with Model(checkpoint, "cpu") as model:
        return model.answers(CHATS, PARAMS)


@pytest.fixture(scope="module")
def on_gpu(checkpoint: Path) -> Iterator[Model]:
    """As it runs by default: triton and graphs."""
    with Model(checkpoint, DEVICE) as model:
        yield model


@pytest.mark.parametrize("mode", MODES)
def test_text_images_and_speech_are_those_of_the_cpu(checkpoint: Path, expected: list[Answer], mode: str) -> None:
    with Model(checkpoint, DEVICE, MODES[mode]) as model:
        assert_alike(model.answers(CHATS, PARAMS), expected)
        assert_empty(model.omni)
    assert len({tuple(answer.codes[:14]) for answer in expected}) == len(expected)
    assert all(np.abs(answer.samples).max() > 0.01 for answer in expected)


def test_each_alone_is_what_all_get_together(on_gpu: Model, expected: list[Answer]) -> None:
    alone = [on_gpu.answers([chat], [own])[0] for chat, own in zip(CHATS, PARAMS, strict=True)]
    assert_alike(alone, expected)
    assert_empty(on_gpu.omni)


def test_streamed_speech_is_the_whole_utterance(on_gpu: Model) -> None:
    waves = [on_gpu.answers(CHATS[:1], [speech(40, 90, streaming=mode)])[0].samples for mode in (True, False)]
    streamed, whole = waves
    assert len(streamed) == len(whole) == 90 * 480
    noise = float(np.square(streamed - whole, dtype=np.float64).sum())
    snr = 10 * np.log10(float(np.square(whole, dtype=np.float64).sum()) / max(noise, 1e-12))
    print(f"\nstreamed against whole on the GPU: {snr:.1f} dB")
    assert snr > 30
    assert_empty(on_gpu.omni)


def test_an_abort_in_a_mixed_batch_leaves_the_others_alone(on_gpu: Model, expected: list[Answer]) -> None:
    """One request is aborted after its first word; text alone, speech and pictures go on beside it."""
    omni, begun, ended = on_gpu.omni, threading.Event(), threading.Event()
    items: list[OutputChunk] = []

    def listen(item: OutputChunk) -> None:
        items.append(item)
        begun.set()
        if item.final is not None:
            ended.set()

    doomed = omni._plan(CHATS[1], speech(900, 900), RequestOptions(modalities=BOTH), "doomed")
    omni.orchestrator.start(doomed, listen)
    assert begun.wait(60)
    found: list[Answer] = []
    worker = threading.Thread(target=lambda: found.extend(on_gpu.answers(CHATS, PARAMS)))
    worker.start()
    [text] = omni.generate(["Just text"], GREEDY, progress=False)
    assert omni.abort("doomed")
    worker.join(120)
    assert ended.wait(60)
    final = items[-1].final
    assert final is not None
    assert final.finish_reason is FinishReason.ABORT
    assert text.error is None
    assert text.audio is None
    assert len(text.token_ids) == 24
    assert_alike(found, expected)
    assert_empty(omni)


def test_a_stage_that_fails_on_the_device_recovers(
    on_gpu: Model, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    component: Any = on_gpu.omni.orchestrator.stages["thinker"].component  # type: ignore[attr-defined]
    encode: Callable[..., torch.Tensor] = component.encode
    monkeypatch.setattr(component, "encode", lambda span: encode(span)[:-1])
    [broken] = on_gpu.omni.chat([say("Look", picture(77))], [PARAMS[0]], modalities=BOTH, progress=False)
    assert broken.error is not None
    monkeypatch.setattr(component, "encode", encode)
    assert_alike(on_gpu.answers(CHATS, PARAMS), expected)
    assert_empty(on_gpu.omni)


def test_bfloat16_runs_and_speaks(checkpoint: Path) -> None:
    """Its tokens are not those of float32; that it writes, speaks and gives no NaN is what can be said."""
    with Model(checkpoint, DEVICE, dtype="auto") as model:
        found = model.answers(CHATS[:2], PARAMS[:2])
        assert [len(a.token_ids) for a in found] == [6, 9]
        assert all(np.isfinite(a.samples).all() and np.abs(a.samples).max() > 0.01 for a in found)
        assert_empty(model.omni)


# -------------------------------------------------------------------------------------------- streamed speech


def spoken(folder: Path, *options: str, quality: SpeechQuality = "full") -> tuple[list[np.ndarray], int]:
    """Utterances of different lengths, streamed at once; and how many graphs were captured after the warm-up."""
    names = (
        "token2wav.max_chunk_blocks=4",
        "token2wav.max_hold_seconds=0",
        f"token2wav.quality={quality}",
        *options,
    )
    args = OmniEngineArgs(model=str(folder), device="cuda", dtype="float32", overrides=names)
    parts = build_parts(args, progress=False)
    stage = parts.stages["token2wav"]
    try:
        stage.warm_up()
        cache = stage.component._graphs  # type: ignore[attr-defined]
        before = cache.captures
        lengths = (40, 101, 150, 64)
        for i in range(len(lengths)):
            stage.submit(StageInput(RequestInfo(str(i)), CodecParams(seed=i, quality=quality), CodecInput()))
        sound: dict[str, list[np.ndarray]] = {str(i): [] for i in range(len(lengths))}
        for at in range(0, max(lengths), 12):
            for i, length in enumerate(lengths):
                if at < length:
                    codes = tuple((7 * n + i) % 60 for n in range(at, min(at + 12, length)))
                    stage.feed(str(i), CodecFrames(codes, final=at + 12 >= length))
            for chunk in stage.drain():
                assert chunk.error is None
                if isinstance(chunk.payload, AudioChunk):
                    sound[chunk.request_id].append(chunk.payload.samples)
        return [np.concatenate(part) for part in sound.values()], cache.captures - before
    finally:
        for other in parts.stages.values():
            other.close()


@pytest.mark.parametrize("quality", ["full", "balanced", "fast"])
def test_streamed_speech_with_graphs_is_that_without_and_captures_nothing_late(
    checkpoint: Path, quality: SpeechQuality
) -> None:
    exact = "token2wav.precision=float32"
    graphed, late = spoken(checkpoint, exact, quality=quality)
    plain, none = spoken(checkpoint, exact, "token2wav.cuda_graphs=false", quality=quality)
    assert none == 0
    assert late == 0
    for own, other in zip(graphed, plain, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-3)


def test_streamed_speech_in_half_precision_is_near(checkpoint: Path) -> None:
    half, _ = spoken(checkpoint, "token2wav.precision=float16")
    exact, _ = spoken(checkpoint, "token2wav.precision=float32")
    for own, other in zip(half, exact, strict=True):
        assert np.square(own - other).sum() < 1e-3 * np.square(other).sum()
