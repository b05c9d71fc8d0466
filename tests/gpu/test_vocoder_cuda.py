"""BigVGAN with its activations as one kernel each against transformers' modules, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from omnistage.compat import prepare_torchvision

prepare_torchvision(required=False)

from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling  # noqa: E402

from omnistage.engines.graphs import GraphCache  # noqa: E402
from omnistage.models import _tiny_common as common  # noqa: E402
from omnistage.models.qwen2_5_omni import tiny  # noqa: E402
from omnistage.models.qwen2_5_omni.vocoder import FusedActivation, bigvgan, fuse_activations  # noqa: E402

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def vocoder() -> modeling.Qwen2_5OmniToken2WavBigVGANModel:
    config = tiny.config_for(0.0)
    with torch.device("cuda"):
        model = modeling.Qwen2_5OmniToken2WavBigVGANModel(config.token2wav_config.bigvgan_config).eval()
    rule = tiny.weight_rule(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            name = f"token2wav.code2wav_bigvgan_model.{name}"
            parameter.copy_(common.initial(name, parameter.shape, rule, 0, parameter.device))
    return model


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("length", [1, 2, 5, 16, 17, 127, 1200, 2047, 2048, 2049, 57_600])
@pytest.mark.parametrize(("batch", "channels"), [(1, 24), (3, 5)])
def test_the_kernel_equals_the_modules(batch: int, channels: int, length: int) -> None:
    torch.manual_seed(length)
    with torch.device("cuda"), torch.inference_mode():
        module = modeling.Qwen2_5OmniAntiAliasedActivation1d(modeling.Qwen2_5OmniSnakeBeta(channels))
        # Steeper waves would make more of the filters' rounding, which differs.
        module.act.alpha.normal_(std=0.2)
        module.act.beta.normal_(std=0.2)
        x = torch.randn(batch, channels, length)
        torch.testing.assert_close(FusedActivation(module)(x), module(x), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("frames", [1, 7, 58, 240])
def test_the_whole_vocoder_equals_the_modules(vocoder: modeling.Qwen2_5OmniToken2WavBigVGANModel, frames: int) -> None:
    fused = fuse_activations(vocoder)
    assert sum(isinstance(module, FusedActivation) for module in fused.modules()) == 6 * len(fused.resblocks) + 1
    assert not any(isinstance(module, FusedActivation) for module in vocoder.modules())
    spectrogram = torch.randn(2, 80, frames, device="cuda")
    graphs = GraphCache(enabled=True)
    with torch.inference_mode():
        expected = bigvgan(vocoder, spectrogram)
        assert relative_error(bigvgan(fused, spectrogram), expected) < 1e-4
        for _ in range(2):  # captured, then replayed
            (wave,) = graphs("bigvgan", lambda s: (bigvgan(fused, s),), spectrogram)
            assert relative_error(wave, expected) < 1e-4
        assert graphs.enabled
        assert graphs.captures == 1


def test_a_request_gets_the_same_samples_in_any_batch() -> None:
    torch.manual_seed(0)
    with torch.device("cuda"), torch.inference_mode():
        module = modeling.Qwen2_5OmniAntiAliasedActivation1d(modeling.Qwen2_5OmniSnakeBeta(24))
        fused, x = FusedActivation(module), torch.randn(5, 24, 999)
        assert torch.equal(fused(x)[2:3], fused(x[2:3]))
