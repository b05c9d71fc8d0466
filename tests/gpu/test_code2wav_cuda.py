"""Qwen3-Omni's code2wav on a GPU, streamed through graphs and Triton's activations, against transformers' forward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from omnistage.core.params import CodecParams
from omnistage.engines.codec import Window
from omnistage.engines.codec.snake import FusedSnake, fused_snakes
from omnistage.models.qwen3_omni_moe.code2wav import Code2Wav
from tests.code2wav_harness import Frames, Qwen3OmniMoeCode2Wav, build, random_frames, reference, stream

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SIZES = {"hidden_size": 128, "intermediate_size": 256, "decoder_dim": 192, "upsample_rates": (8, 5, 4, 3)}
WINDOWS = (2, 2, 4, 8)


@pytest.fixture(scope="module")
def model() -> Qwen3OmniMoeCode2Wav:
    return build(device="cuda", **SIZES)


@pytest.fixture(scope="module")
def component(model: Qwen3OmniMoeCode2Wav) -> Iterator[Code2Wav]:
    component = Code2Wav(model)
    component.warm_up(WINDOWS, 0, 64)
    yield component
    component.close()


def relative_error(wave: np.ndarray, expected: np.ndarray) -> float:
    assert wave.shape == expected.shape
    return float(np.abs(wave - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 999), (64, 1536, 8), (2, 96, 61_440)])
def test_the_activation_equals_the_module(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    snake = next(m for m in build().modules() if type(m).__name__.endswith("SnakeBeta"))
    with torch.device("cuda"), torch.inference_mode():
        module = type(snake)(shape[1])
        module.alpha.normal_(std=0.3)
        module.beta.normal_(std=0.3)
        x = torch.randn(shape, dtype=dtype)
        expected = module(x.float())
        bound = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(FusedSnake(module)(x).float(), expected, rtol=bound, atol=bound)


def test_all_activations_are_fused_and_the_model_stays_as_it_is(
    model: Qwen3OmniMoeCode2Wav, component: Code2Wav
) -> None:
    count = len(fused_snakes(model.modules()))
    assert sum(isinstance(module, FusedSnake) for module in component.network.modules()) == count > 0
    assert not any(isinstance(module, FusedSnake) for module in model.modules())


@pytest.mark.parametrize("cuts", [[], [2, 2, 4, 8, 8], [2] * 20, [1, 3, 5, 7]], ids=str)
def test_streamed_windows_equal_the_whole_forward(
    model: Qwen3OmniMoeCode2Wav, component: Code2Wav, cuts: list[int]
) -> None:
    frames = random_frames(model, 50)
    assert relative_error(stream(component, frames, cuts), reference(model, frames)) < 1e-4


def together(component: Code2Wav, utterances: list[Frames]) -> list[np.ndarray]:
    """All in step, windows of 2, 2, 4, 8, 8, ... frames."""
    states = [component.open(str(i), CodecParams(), None) for i in range(len(utterances))]
    waves: list[list[np.ndarray]] = [[] for _ in utterances]
    done, turn = 0, 0
    while any(len(frames) > done for frames in utterances):
        size = (*WINDOWS, 8)[min(turn, 4)]
        live = [i for i, frames in enumerate(utterances) if len(frames) > done]
        windows = []
        for i in live:
            part = utterances[i][done : done + size]
            windows.append(Window(states[i], part, 0, len(part), done + size >= len(utterances[i])))
        for i, wave in zip(live, component.decode(windows), strict=True):
            waves[i].append(wave)
        done, turn = done + size, turn + 1
    return [np.concatenate(parts) for parts in waves]


def test_company_changes_nothing_but_rounding_and_nothing_is_captured_late(
    model: Qwen3OmniMoeCode2Wav, component: Code2Wav
) -> None:
    captures = component._graphs.captures
    assert captures > 0
    utterances = [random_frames(model, 3 + 5 * i, seed=i) for i in range(11)]
    waves = together(component, utterances)
    for frames, wave in zip(utterances, waves, strict=True):
        assert relative_error(wave, reference(model, frames)) < 1e-4
        assert relative_error(wave, together(component, [frames])[0]) < 1e-4
    assert component._graphs.captures == captures
    for first, second in zip(waves, together(component, utterances), strict=True):
        assert np.array_equal(first, second)  # the same company, the same samples


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 0.03), (torch.bfloat16, 0.2)])
def test_half_precision_is_near(model: Qwen3OmniMoeCode2Wav, dtype: torch.dtype, bound: float) -> None:
    """The random layers amplify rounding: what is held here is that nothing overflows or is misplaced."""
    frames = random_frames(model, 40)
    expected = reference(model, frames)
    component = Code2Wav(build(dtype, "cuda", **SIZES))
    component.warm_up(WINDOWS, 0, 64)
    wave = stream(component, frames, [2, 2, 4, 8])
    assert np.square(wave - expected).mean() < bound**2 * np.square(expected).mean()
    component.close()


def test_the_plan_covers_what_is_taken(model: Qwen3OmniMoeCode2Wav) -> None:
    with torch.device("meta"):
        planned = Code2Wav(type(model)(model.config), target=torch.device("cuda")).memory(8, 8)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    component = Code2Wav(model)
    component.warm_up(WINDOWS, 0, 64)
    together(component, [random_frames(model, 40, seed=i) for i in range(8)])
    taken = torch.cuda.memory_reserved() - before
    component.close()
    assert taken <= planned.graphs + planned.activations + (256 << 20)  # libraries have their workspaces
