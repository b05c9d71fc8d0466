"""Token2wav against transformers, and streaming against the whole utterance."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from omnistage.compat import prepare_torchvision

prepare_torchvision(required=False)

from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig  # noqa: E402
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel  # noqa: E402

from benchmarks.gpu.torch_calls import TorchCalls  # noqa: E402
from omnistage.core.errors import CheckpointError, InvalidRequestError  # noqa: E402
from omnistage.core.params import CodecParams, SpeechQuality  # noqa: E402
from omnistage.core.types import AudioChunk, CodecFrames, CodecInput, RequestInfo, StageInput  # noqa: E402
from omnistage.engines.codec import CodecStage, Window  # noqa: E402
from omnistage.engines.codec.flow import SOLVERS, time_grid  # noqa: E402
from omnistage.engines.graphs import GraphCache, allow_tf32, bucket  # noqa: E402
from omnistage.models.qwen2_5_omni.blocks import BlockBatch, WindowRows  # noqa: E402
from omnistage.models.qwen2_5_omni.token2wav import Token2Wav  # noqa: E402
from omnistage.models.qwen2_5_omni.vocoder import bigvgan, vocoder_context  # noqa: E402
from tests.graph_harness import FakeCapture  # noqa: E402

REAL_VOCODER: dict[str, object] = {"upsample_initial_channel": 64}
SMALL_VOCODER: dict[str, object] = {
    "upsample_initial_channel": 16,
    "upsample_rates": [5, 2],
    "upsample_kernel_sizes": [11, 4],
    "resblock_kernel_sizes": [3, 5],
    "resblock_dilation_sizes": [[1, 3, 5], [1, 2, 3]],
}
DIT: dict[str, object] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "ff_mult": 2,
    "emb_dim": 32,
    "look_ahead_layers": [1],
    "look_backward_layers": [0, 2],
    "num_embeds": 64,
    "enc_emb_dim": 16,
    "enc_dim": 12,
    "enc_channels": [16, 16, 16, 16, 48],
    "enc_attention_channels": 8,
    "enc_se_channels": 8,
    "max_position_embeddings": 1024,
}
SAMPLES_PER_CODE = 20


def build(seed: int = 0, vocoder: dict[str, object] = SMALL_VOCODER, **dit: object) -> Qwen2_5OmniToken2WavModel:
    """A small random model whose layers keep their signal's size, so that every block depends on its neighbours."""
    config = Qwen2_5OmniToken2WavConfig(dit_config={**DIT, **dit}, bigvgan_config=dict(vocoder))
    model = Qwen2_5OmniToken2WavModel(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            fan_in = weight.shape[0] * 2 if ".ups." in name else weight[0].numel()
            deviation = fan_in**-0.5 if weight.dim() > 1 else 0.05
            if "codec_embed" in name:
                deviation = 1.0
            if "conv_post" in name:
                deviation *= 0.05  # keeps the waveform clear of the clamp
            weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)
    return model


def voices() -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(99)
    return {
        name: {
            "cond": torch.randn(1, 16, generator=generator),
            "ref_mel": torch.randn(1, frames, 80, generator=generator),
            "bos_token": torch.tensor(1),
        }
        for name, frames in (("Chelsie", 50), ("Ethan", 77))
    }


def codes_of(count: int, seed: int = 1) -> tuple[int, ...]:
    return tuple(torch.randint(0, 65, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


@pytest.fixture(scope="module")
def model() -> Qwen2_5OmniToken2WavModel:
    return build()


@pytest.fixture(scope="module")
def component(model: Qwen2_5OmniToken2WavModel) -> Token2Wav:
    return Token2Wav(model, voices())


def reference(
    model: Qwen2_5OmniToken2WavModel, noise: torch.Tensor, codes: Sequence[int], voice: str, params: CodecParams
) -> np.ndarray:
    speaker = voices()[voice]
    with torch.no_grad(), mock.patch("torch.randn", return_value=noise):
        wave = model(
            torch.tensor([codes]),
            speaker["cond"],
            speaker["ref_mel"],
            num_steps=params.num_steps,
            guidance_scale=params.guidance_scale,
            sway_coefficient=params.sway,
        )
    return np.asarray(wave.numpy())


def whole(component: Token2Wav, *requests: tuple[tuple[int, ...], str | None, CodecParams]) -> list[np.ndarray]:
    windows = [Window(component.open("r", p, voice), codes, 0, len(codes), True) for codes, voice, p in requests]
    return component.decode(windows)


def budget(lookahead: int = 2, chunk: int = 8, **changes: int) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "max_batch": 8,
            "max_batch_blocks": 64,
            "max_hold_seconds": 0.0,
            "max_running": 64,
            "first_chunk_blocks": 1,
            "max_chunk_blocks": chunk,
            "lookahead_blocks": lookahead,
            **changes,
        }
    )


def stream(
    component: Token2Wav,
    limits: SimpleNamespace,
    utterances: dict[str, tuple[int, ...]],
    feed: int,
    params: CodecParams = CodecParams(),  # noqa: B008  (frozen)
) -> dict[str, list[np.ndarray]]:
    """Feed `feed` codes at a time to each request, running what is ready in between."""
    stage = CodecStage("t2w", component, limits)
    out: dict[str, list[np.ndarray]] = {name: [] for name in utterances}

    def drain() -> None:
        for chunk in stage.drain():
            assert chunk.error is None
            if isinstance(chunk.payload, AudioChunk):
                out[chunk.request_id].append(chunk.payload.samples)

    for i, name in enumerate(utterances):
        voice = ("Chelsie", "Ethan")[i % 2]
        own = params.model_copy(update={"seed": 7 + i})
        stage.submit(StageInput(RequestInfo(name, voice=voice), own, CodecInput()))
    for at in range(0, max(map(len, utterances.values())), feed):
        for name, codes in utterances.items():
            if at < len(codes):
                stage.feed(name, CodecFrames(codes[at : at + feed], final=at + feed >= len(codes)))
        drain()
    return out


def snr(got: np.ndarray, want: np.ndarray) -> float:
    return float(10 * np.log10(np.square(want).sum() / max(np.square(got - want).sum(), 1e-30)))


@pytest.mark.parametrize("count", [1, 12, 40])
@pytest.mark.parametrize(
    "params",
    [
        CodecParams(seed=3),
        CodecParams(seed=3, guidance_scale=0.0, num_steps=4),
        CodecParams(seed=3, num_steps=1, sway=0.5),
    ],
    ids=["default", "unguided", "one-point"],
)
def test_a_whole_utterance_equals_transformers(
    model: Qwen2_5OmniToken2WavModel, component: Token2Wav, count: int, params: CodecParams
) -> None:
    codes = codes_of(count)
    want = reference(model, component.noise_for(3, count * 2), codes, "Ethan", params)
    (got,) = whole(component, (codes, "Ethan", params))
    assert got.shape == (count * SAMPLES_PER_CODE,)
    assert got.dtype == np.float32
    assert want.std() > 0.01
    assert np.abs(want).max() < 1
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_real_vocoder_gives_480_samples_a_code_and_equals_transformers() -> None:
    model = build(vocoder=REAL_VOCODER)
    component = Token2Wav(model, voices(), default_voice="Ethan")
    assert component.vocoder_context == (34, 34)
    assert component.samples_per_code == 480
    codes, params = codes_of(53), CodecParams(seed=3, num_steps=2)
    want = reference(model, component.noise_for(3, 106), codes, "Ethan", params)
    (got,) = whole(component, (codes, None, params))
    np.testing.assert_allclose(got, want, atol=1e-5)
    parts = stream(component, budget(), {"r": codes}, feed=12)["r"]
    assert sum(part.size for part in parts) == 53 * 480


def test_the_model_itself_is_left_alone(model: Qwen2_5OmniToken2WavModel, component: Token2Wav) -> None:
    encoder = model.code2wav_dit_model.input_embed.spk_encoder
    assert type(encoder).__name__ == "ECAPA_TimeDelayNet"
    weight = model.code2wav_dit_model.proj_out.weight
    assert component._dit.proj_out.weight is weight


def test_a_batch_of_voices_equals_each_alone(component: Token2Wav) -> None:
    requests = [(codes_of(30, i), ("Chelsie", "Ethan", None)[i], CodecParams(seed=i, num_steps=5)) for i in range(3)]
    together = whole(component, *requests)
    for got, request in zip(together, requests, strict=True):
        np.testing.assert_allclose(got, whole(component, request)[0], atol=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("count", [96, 101])
def test_streaming_is_close_to_the_whole_and_has_no_clicks(seed: int, count: int) -> None:
    model = build(seed)
    component = Token2Wav(model, voices())
    codes = codes_of(count, seed)
    (want,) = whole(component, (codes, "Chelsie", CodecParams(seed=7)))
    parts = stream(component, budget(lookahead=2, chunk=2), {"r": codes}, feed=12)["r"]
    got = np.concatenate(parts)
    assert got.size == count * SAMPLES_PER_CODE
    assert len(parts) >= 4
    assert snr(got, want) > 30
    jumps = np.abs(np.diff(got - want))
    borders = np.cumsum([part.size for part in parts])[:-1] - 1
    assert jumps[borders].max() <= np.delete(jumps, borders).max()
    assert jumps[borders].mean() <= 4 * jumps.mean() + 1e-6


def test_more_lookahead_comes_closer(component: Token2Wav) -> None:
    codes = codes_of(84)
    (want,) = whole(component, (codes, "Chelsie", CodecParams(seed=7)))
    ratios = [
        snr(np.concatenate(stream(component, budget(n, chunk=1), {"r": codes}, feed=12)["r"]), want) for n in (0, 1, 2)
    ]
    assert ratios[0] + 6 < ratios[1]
    assert ratios[1] + 6 < ratios[2]


def test_enough_lookahead_is_exact(component: Token2Wav) -> None:
    """Two points are four evaluations, each of which sees one block ahead: pinned left context loses nothing."""
    codes, params = codes_of(120), CodecParams(seed=7, num_steps=2)
    (want,) = whole(component, (codes, "Chelsie", params))
    stage = CodecStage("t2w", component, budget(lookahead=4, chunk=1))
    stage.submit(StageInput(RequestInfo("r", voice="Chelsie"), params, CodecInput(codes, final=True)))
    parts = [c.payload.samples for c in stage.drain() if isinstance(c.payload, AudioChunk)]
    assert len(parts) > 3
    np.testing.assert_allclose(np.concatenate(parts), want, atol=1e-5)


def test_the_vocoder_never_sees_a_border() -> None:
    """Without attention across blocks nothing is approximate, so held-back vocoding must equal the whole."""
    component = Token2Wav(build(look_ahead_layers=[], look_backward_layers=[]), voices())
    assert component.layout.max_lookahead_blocks == 0
    codes = codes_of(101)
    params = CodecParams(seed=7)
    (want,) = whole(component, (codes, "Chelsie", params))
    for feed in (1, 12, 101):
        parts = stream(component, budget(), {"r": codes}, feed=feed)["r"]
        np.testing.assert_allclose(np.concatenate(parts), want, atol=1e-5)


def test_codes_that_end_on_a_chunk_border_are_flushed() -> None:
    component = Token2Wav(build(look_ahead_layers=[]), voices())
    codes = codes_of(48)
    (want,) = whole(component, (codes, "Chelsie", CodecParams(seed=7)))
    stage = CodecStage("t2w", component, budget())
    stage.submit(StageInput(RequestInfo("r", voice="Chelsie"), CodecParams(seed=7), CodecInput(codes)))
    chunks = stage.drain()
    stage.feed("r", CodecFrames((), final=True))
    chunks += stage.drain()
    parts = [c.payload.samples for c in chunks if isinstance(c.payload, AudioChunk)]
    np.testing.assert_allclose(np.concatenate(parts), want, atol=1e-5)


def test_arrival_changes_nothing_where_the_chunks_are_the_same(component: Token2Wav) -> None:
    codes = {"r": codes_of(75)}
    one = stream(component, budget(chunk=1), codes, feed=1)["r"]
    four = stream(component, budget(chunk=1), codes, feed=4)["r"]
    np.testing.assert_allclose(np.concatenate(one), np.concatenate(four), atol=1e-5)
    again = stream(component, budget(chunk=1), codes, feed=1)["r"]
    np.testing.assert_array_equal(np.concatenate(one), np.concatenate(again))


def test_batch_composition_does_not_matter(component: Token2Wav) -> None:
    codes = {"a": codes_of(60, 1), "b": codes_of(60, 2), "c": codes_of(77, 3)}
    together = stream(component, budget(chunk=1), codes, feed=12)
    alone = stream(component, budget(chunk=1, max_batch=1), codes, feed=12)
    for name in codes:
        np.testing.assert_allclose(np.concatenate(together[name]), np.concatenate(alone[name]), atol=1e-5)


def test_requests_at_different_places_share_a_forward(component: Token2Wav, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnistage.engines.codec.scheduler.MAX_BATCH_SECONDS", float("inf"))  # on any machine
    stage = CodecStage("t2w", component, budget(chunk=1))
    codes = codes_of(144)
    (want,) = whole(component, (codes, "Chelsie", CodecParams(seed=5, num_steps=3)))
    params = CodecParams(seed=5, num_steps=3)
    parts: dict[str, list[np.ndarray]] = {"early": [], "late": []}
    for name in parts:
        stage.submit(StageInput(RequestInfo(name, voice="Chelsie"), params, CodecInput(codes, final=True)))
        for _ in range(4):
            for chunk in stage.step():
                if isinstance(chunk.payload, AudioChunk):
                    parts[chunk.request_id].append(chunk.payload.samples)
    for chunk in stage.drain():
        if isinstance(chunk.payload, AudioChunk):
            parts[chunk.request_id].append(chunk.payload.samples)
    stats = stage.stats()
    assert stats.extra["windows"] > stats.steps
    np.testing.assert_allclose(np.concatenate(parts["early"]), np.concatenate(parts["late"]), atol=1e-5)
    assert snr(np.concatenate(parts["early"]), want) > 30


def test_an_early_vocoder_speaks_sooner_at_a_small_cost(model: Qwen2_5OmniToken2WavModel) -> None:
    early = Token2Wav(model, voices(), early_vocoder=True)
    assert early.layout.first_blocks == 1
    codes = codes_of(84)
    (want,) = whole(early, (codes, "Chelsie", CodecParams(seed=7)))
    parts = stream(early, budget(chunk=2), {"r": codes}, feed=12)["r"]
    assert parts[0].size == 12 * SAMPLES_PER_CODE
    assert sum(part.size for part in parts) == want.size
    assert snr(np.concatenate(parts), want) > 30


def test_cheaper_solvers_are_near_the_full_one_and_stream_alike(component: Token2Wav) -> None:
    codes = codes_of(84)
    (full,) = whole(component, (codes, "Chelsie", CodecParams(seed=7)))
    for quality, least in (("balanced", 15), ("fast", 10)):
        params = CodecParams(seed=7, quality=quality)
        (want,) = whole(component, (codes, "Chelsie", params))
        assert least < snr(want, full) < 60
        stage = CodecStage("t2w", component, budget())
        stage.submit(StageInput(RequestInfo("r", voice="Chelsie"), params, CodecInput(codes, final=True)))
        parts = [c.payload.samples for c in stage.drain() if isinstance(c.payload, AudioChunk)]
        assert len(parts) > 2
        assert snr(np.concatenate(parts), want) > 30


def test_padded_batches_of_mixed_windows_change_nothing(model: Qwen2_5OmniToken2WavModel) -> None:
    """Sizes of captured graphs, without the graphs: one request at its beginning, one at its end, one in between."""
    codes = {"a": codes_of(60, 1), "b": codes_of(77, 2), "c": codes_of(101, 3)}
    plain, padded = Token2Wav(model, voices()), Token2Wav(model, voices())
    padded._graphs.enabled = True
    want = stream(plain, budget(max_batch=1), codes, feed=12)
    got = stream(padded, budget(), codes, feed=12)
    for name in codes:
        np.testing.assert_allclose(np.concatenate(got[name]), np.concatenate(want[name]), atol=1e-5)


@pytest.mark.parametrize(
    "params",
    [CodecParams(), CodecParams(guidance_scale=0.0, num_steps=4, quality="balanced")],
    ids=["default", "other"],
)
def test_the_warm_up_captures_what_requests_run(
    model: Qwen2_5OmniToken2WavModel, params: CodecParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    component = Token2Wav(model, voices(), early_vocoder=True, params=params)
    keys: set[object] = set()

    def note(
        key: object,
        function: Callable[..., tuple[torch.Tensor, ...]],
        *inputs: torch.Tensor,
        constants: tuple[torch.Tensor, ...] = (),
    ) -> object:
        keys.add(key)
        return function(*inputs, *constants)

    with mock.patch.object(component, "_graphs", mock.Mock(side_effect=note, enabled=True)):
        limits = budget(chunk=2, max_batch=4, max_batch_blocks=12)
        CodecStage("t2w", component, limits).warm_up()
        before = set(keys)
        monkeypatch.setattr("omnistage.models.qwen2_5_omni.flow_solver.modulation", None)  # all times are known by now
        codes = {name: codes_of(70 + i, i) for i, name in enumerate("abcde")}
        stream(component, limits, codes, feed=12, params=params)
    assert keys == before
    assert len(before) < 40


def test_pace_and_load_change_no_sample(component: Token2Wav) -> None:
    """Without look-ahead, where it is easy to hear how an utterance was cut."""
    codes = {"a": codes_of(90, 1), "b": codes_of(40, 2)}
    want = stream(component, budget(lookahead=0), {"a": codes["a"]}, feed=110)["a"]
    for feed in (1, 30):
        got = stream(component, budget(lookahead=0), codes, feed=feed)["a"]
        np.testing.assert_allclose(np.concatenate(got), np.concatenate(want), atol=1e-5)


def _whole(component: Token2Wav) -> np.ndarray:
    codes = tuple(range(40))
    state = component.open("a", CodecParams(seed=3, streaming=False), None)
    return component.decode([Window(state, codes, 0, len(codes), True)])[0]


def test_half_precision_is_close_and_leaves_the_model_alone(model: Qwen2_5OmniToken2WavModel) -> None:
    exact = _whole(Token2Wav(model, voices(), precision="float32"))
    half = _whole(Token2Wav(model, voices(), precision="float16"))
    noise = float(np.square(half - exact).sum())
    assert 0 < noise < 1e-4 * float(np.square(exact).sum())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_window_that_overflows_in_half_precision_is_solved_again_in_full(model: Qwen2_5OmniToken2WavModel) -> None:
    exact = _whole(Token2Wav(model, voices(), precision="float32"))
    component = Token2Wav(model, voices(), precision="float16")
    evaluate = component._flow._evaluate

    def pair(component: Token2Wav) -> list[np.ndarray]:
        states = [component.open("r", CodecParams(seed=i), None) for i in range(2)]
        return component.decode([Window(state, tuple(range(40)), 0, 40, True) for state in states])[1:]

    (expected,) = pair(component)

    def overflow(half: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        plain, guidance, kept = evaluate(half, *tensors)
        return plain.index_fill(0, torch.arange(4), torch.inf) if half else plain, guidance, kept

    with mock.patch.object(component._flow, "_evaluate", overflow):
        np.testing.assert_array_equal(_whole(component), exact)
        (second,) = pair(component)
    # What shares its batch is solved as it would be without it: in half precision.
    np.testing.assert_array_equal(second, expected)


def test_the_receptive_field_is_what_a_frame_reaches() -> None:
    """NaN spreads to whatever depends on it, however small the weight in between."""
    vocoder = build().code2wav_bigvgan_model
    left, right = vocoder_context(vocoder)
    at, frames = right + left, 2 * (left + right) + 1
    mel = torch.randn(1, 80, frames, generator=torch.Generator().manual_seed(0))
    mel[:, :, at] = torch.nan
    with torch.no_grad():
        reached = vocoder(mel).isnan().reshape(frames, -1).any(dim=1).nonzero()[:, 0]
    # Samples of a frame depend on `right` frames after it: a change at `at` reaches back by `right`, on by `left`.
    assert reached.min() == at - right
    assert reached.max() == at + left


def test_the_vocoder_without_its_copy_equals_transformers(model: Qwen2_5OmniToken2WavModel) -> None:
    vocoder = model.code2wav_bigvgan_model
    mel = torch.randn(2, 80, 30)
    with torch.no_grad():
        assert torch.equal(bigvgan(vocoder, vocoder.process_mel_spectrogram(mel)), vocoder(mel))


def test_noise_is_the_same_however_it_is_drawn(component: Token2Wav) -> None:
    long = component.noise_for(4, 200)
    assert long.shape == (1, 200, 80)
    assert torch.equal(long[:, :77], component.noise_for(4, 77))
    assert not torch.equal(long, component.noise_for(5, 200))
    assert component.noise_for(4, 0).shape == (1, 0, 80)


def test_unseeded_requests_differ(component: Token2Wav) -> None:
    codes, params = codes_of(12), CodecParams(num_steps=2)
    first, second = whole(component, (codes, None, params), (codes, None, params))
    assert np.abs(first - second).max() > 1e-3


def test_the_solver_agrees_with_transformers() -> None:
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import RungeKutta4ODESolver

    x, points = torch.randn(2, 5, 3), time_grid(6, -1.0)
    want = RungeKutta4ODESolver(lambda t, v: torch.sin(v * (1 + t)) + v.mean(dim=1, keepdim=True), x).integrate(points)
    solver = SOLVERS["full"]
    for start, end in itertools.pairwise(points):
        times = solver.times(start, end)

        def field(
            x: torch.Tensor, i: int, guided: bool, times: Sequence[float] = times
        ) -> tuple[torch.Tensor, torch.Tensor]:
            assert guided
            return torch.sin(x * (1 + times[i])), x.mean(dim=1, keepdim=True)

        x = solver.advance(field, x, end - start)
    torch.testing.assert_close(x, want[-1], atol=1e-6, rtol=0)


def test_mistakes_are_refused(model: Qwen2_5OmniToken2WavModel, component: Token2Wav) -> None:
    with pytest.raises(CheckpointError, match="no speakers"):
        Token2Wav(model, {})
    with pytest.raises(CheckpointError, match="ref_mel"):
        Token2Wav(model, {"x": {"cond": torch.zeros(1, 16)}})
    with pytest.raises(CheckpointError, match="default voice"):
        Token2Wav(model, voices(), default_voice="Nobody")
    with pytest.raises(CheckpointError, match="multiple"):
        Token2Wav(build(block_size=25), voices())
    with pytest.raises(CheckpointError, match="upsample kernel"):
        Token2Wav(build(vocoder={**SMALL_VOCODER, "upsample_kernel_sizes": [10, 4]}), voices())
    with pytest.raises(TypeError):
        component.decode([Window("not a state", (1,), 0, 1, True)])
    states = [component.open("r", CodecParams(num_steps=steps), None) for steps in (2, 3)]
    with pytest.raises(ValueError, match="equal parameters"):
        component.decode([Window(state, (1,), 0, 1, True) for state in states])
    stage = CodecStage("t2w", component, budget())
    with pytest.raises(InvalidRequestError, match="Chelsie, Ethan"):
        stage.check(StageInput(RequestInfo("r", voice="Eve"), CodecParams(), CodecInput()))
    with pytest.raises(InvalidRequestError, match="codebook"):
        stage.check(StageInput(RequestInfo("r"), CodecParams(), CodecInput((65,))))
    component.close()


def test_graphs_are_plain_calls_off_cuda_and_tf32_is_restored() -> None:
    cache = GraphCache(enabled=True)
    assert torch.equal(cache("key", lambda x: (-x,), torch.ones(2))[0], -torch.ones(2))
    cache.clear()
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8)] == [1, 2, 4, 4, 8, 8]
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    with allow_tf32(True), allow_tf32(True):
        assert matmul.allow_tf32
    assert matmul.allow_tf32 == before
    with allow_tf32(False):
        assert matmul.allow_tf32 == before


def test_a_replay_leaves_the_switch_for_tf32_alone() -> None:
    """Layers that another stage has compiled are compiled again, for seconds, when they see it changed."""
    seen: list[bool] = []

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        return (-x,)

    captured = GraphCache(enabled=True, tf32=True, capture=FakeCapture())
    for _ in range(2):
        captured("key", function, torch.ones(2))
    assert seen == [True, True, False, False]  # a run, its capture, and two replays, which call it here
    seen.clear()
    plain = GraphCache(enabled=False, tf32=True)
    plain("key", function, torch.ones(2))
    assert seen == [True]
    assert not torch.backends.cuda.matmul.allow_tf32
    switch = torch.backends.cuda.matmul
    with mock.patch.object(type(switch), "__setattr__", side_effect=AssertionError("the switch was changed")):
        cache = GraphCache(enabled=True, capture=FakeCapture())
        cache("key", function, torch.ones(2))


def test_what_a_window_keeps_takes_no_more_than_its_share() -> None:
    """A request that waits for its codes must not hold what all of its batch kept."""
    one = torch.zeros(1, 1)
    windows = [WindowRows((0, 0), torch.zeros(4, 5), one, one, None, emit_blocks=1) for _ in range(3)]
    batch = BlockBatch(windows, 2, 2, torch.device("cpu"), padded=False)
    together = torch.randn(3, 9, 4, 2, 2, 4, 8)
    for i, solution in enumerate(batch.solutions(torch.zeros(3, 4, 5), {True: together})):
        assert solution.context is not None
        share = solution.context[True]
        assert torch.equal(share, together[i])
        assert share.untyped_storage().nbytes() == share.nbytes


# ------------------------------------------------------------------------------------------------- CUDA graphs


def captured(model: Qwen2_5OmniToken2WavModel, **options: Any) -> tuple[Token2Wav, Token2Wav]:
    """One component whose calls are captured and replayed, by the fake, and one that makes the same calls plainly."""
    graphed, plain = Token2Wav(model, voices(), **options), Token2Wav(model, voices(), **options)
    graphed._graphs = GraphCache(enabled=True, capture=FakeCapture())
    plain._graphs.enabled = True  # padded alike
    return graphed, plain


@pytest.mark.parametrize("quality", ["full", "balanced", "fast"])
@pytest.mark.parametrize("scale", [0.5, 0.0])
def test_an_interval_that_is_captured_once_serves_all_intervals_and_batches(
    model: Qwen2_5OmniToken2WavModel, quality: SpeechQuality, scale: float
) -> None:
    graphed, plain = captured(model)
    codes = {"a": codes_of(60, 1), "b": codes_of(77, 2), "c": codes_of(40, 3)}
    params = CodecParams(quality=quality, guidance_scale=scale, num_steps=5)
    waves = [stream(component, budget(), codes, feed=12, params=params) for component in (graphed, plain)]
    for name in codes:
        # By the clock windows may share other batches, and products are rounded by the size of a batch.
        np.testing.assert_allclose(np.concatenate(waves[0][name]), np.concatenate(waves[1][name]), rtol=0, atol=2e-6)
    assert graphed._graphs.replays > 3 * graphed._graphs.captures


def test_intervals_in_half_precision_are_captured_too(model: Qwen2_5OmniToken2WavModel) -> None:
    graphed, plain = captured(model, precision="float16")
    np.testing.assert_array_equal(_whole(graphed), _whole(plain))
    assert graphed._graphs.replays == 9


def test_a_batch_is_a_replay_for_each_interval_and_few_calls_besides(model: Qwen2_5OmniToken2WavModel) -> None:
    """Each call gives the interpreter away. Where each evaluation was a graph, there were 628 and 37 replays."""
    graphed, _ = captured(model)
    states = [graphed.open(str(i), CodecParams(seed=i), None) for i in range(4)]
    windows = [Window(state, codes_of(36, i), 0, 12, False) for i, state in enumerate(states)]
    for _ in range(4):  # windows have left context, and the vocoder its own; then nothing is captured any more
        before = graphed._graphs.replays
        with TorchCalls() as calls:
            graphed.decode(windows)
    replays = graphed._graphs.replays - before
    assert replays == 9 + 1  # the vocoder's
    assert calls.count < 220


def test_a_shape_that_cannot_be_captured_runs_plainly_and_the_others_do_not(
    model: Qwen2_5OmniToken2WavModel, caplog: pytest.LogCaptureFixture
) -> None:
    graphed, plain = captured(model)
    graphed._graphs = GraphCache(enabled=True, capture=FakeCapture(failures=1))
    np.testing.assert_array_equal(_whole(graphed), _whole(plain))
    np.testing.assert_array_equal(_whole(graphed), _whole(plain))
    assert graphed._graphs.captures == 0
    codes = {"a": codes_of(60, 1)}
    waves = [stream(component, budget(), codes, feed=12) for component in (graphed, plain)]
    np.testing.assert_array_equal(np.concatenate(waves[0]["a"]), np.concatenate(waves[1]["a"]))
    assert graphed._graphs.captures > 0
    assert len(caplog.records) == 1
