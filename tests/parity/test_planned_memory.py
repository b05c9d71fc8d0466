"""The memory plan against what the same models take when they are loaded and run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from omnistage.config import ARBudget, OmniEngineArgs, resolve
from omnistage.core.family import LoadContext
from omnistage.core.params import DiffusionParams, SpeechQuality
from omnistage.core.types import Condition, MediaSpan, Modality
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.memory import ar_needs
from omnistage.engines.ar.stage import ARStage
from omnistage.engines.codec.causal import CausalDecoder
from omnistage.engines.codec.flow import SOLVERS
from omnistage.engines.diffusion.component import Denoiser, Row
from omnistage.engines.peak_memory import META, weight_bytes
from omnistage.models._diffusers.base import VaeDecoder
from omnistage.models.qwen2_5_omni.components import Thinker
from omnistage.models.qwen2_5_omni.token2wav import Token2Wav
from omnistage.models.registry import REGISTRY
from omnistage.pipeline.build import load_component, plan_memory
from tests.graph_harness import HostTensors

pytest.importorskip("diffusers")

CPU = torch.device("cpu")
MODELS = [
    ("causal_lm", None),
    ("qwen2_5_omni", None),
    ("qwen3_omni_moe", "instruct"),
    ("csm", None),
    ("glm_image", None),
    ("stable_diffusion", "xl_controlnet"),
    ("stable_diffusion_3", None),
    ("z_image", None),
    ("flux", "dev"),
    ("flux", "fill"),
    ("flux2", "base"),
    ("flux2", "dev"),
    ("qwen_image", "image"),
    ("wan", "i2v_clip"),
    ("ltx", "v0_9_1"),
    ("hunyuan_video", None),
]


def allocated(run: Callable[[], object]) -> int:
    """The peak that torch's allocator for the CPU sees, by the profiler's events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        with torch.inference_mode():
            result = run()
        del result
    results = profile.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak


def networks(component: object) -> Sequence[nn.Module]:
    if isinstance(component, Denoiser):
        return component.transformers
    if isinstance(component, Token2Wav):
        return component._dit, component._vocoder
    if isinstance(component, CausalDecoder):
        return (component.network,)
    modules: Sequence[nn.Module] = component.modules  # type: ignore[attr-defined]
    return modules


@pytest.mark.parametrize(("family", "variant"), MODELS, ids=[name for name, _ in MODELS])
def test_planned_weights_are_those_that_are_loaded(
    family: str, variant: str | None, checkpoint_of: Callable[..., Path]
) -> None:
    overrides = ("decode.tiling_pixels=4000",) if family in ("wan", "ltx", "hunyuan_video") else ()
    args = OmniEngineArgs(model=str(checkpoint_of(family, variant)), device="cpu", overrides=overrides)
    resolved = resolve(args, registry=REGISTRY)
    plan = plan_memory(resolved)
    for name, stage in resolved.config.pipeline.stages.items():
        planned = plan.stages[name]
        component = load_component(LoadContext(resolved.model, name, stage, CPU, torch.float32))
        assert planned.memory.weights == weight_bytes(networks(component)), name
        assert planned.memory.activations > 0, name
        assert not planned.estimated


def test_no_byte_of_a_weight_is_read(checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint_of("qwen2_5_omni")
    whole = plan_memory(resolve(OmniEngineArgs(model=str(folder), device="cpu"), registry=REGISTRY))
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    small = plan_memory(resolve(OmniEngineArgs(model=str(tmp_path), device="cpu"), registry=REGISTRY))
    assert {n: s.memory for n, s in small.stages.items()} == {n: s.memory for n, s in whole.stages.items()}


def component_of(folder: Path, stage: str, device: torch.device) -> object:
    resolved = resolve(OmniEngineArgs(model=str(folder), device="cpu"), registry=REGISTRY)
    settings = resolved.config.pipeline.stages[stage]
    return load_component(LoadContext(resolved.model, stage, settings, device, torch.float32))


def filled(condition: Condition) -> Condition:
    """The same shapes with data."""
    tensors = {name: torch.randn(each.shape) for name, each in condition.positive.items()}
    return replace(condition, positive=tensors)


@pytest.mark.parametrize("family", ["flux", "stable_diffusion", "stable_diffusion_3", "z_image", "qwen_image"])
def test_a_denoising_step_takes_what_is_planned(family: str, checkpoint_of: Callable[..., Path]) -> None:
    folder, size = checkpoint_of(family), (256, 256, 1)
    planned, loaded = (component_of(folder, "denoise", device) for device in (META, CPU))
    assert isinstance(planned, Denoiser)
    assert isinstance(loaded, Denoiser)
    lane = loaded.open(filled(planned.planned_condition(*size)), DiffusionParams(), torch.Generator())
    measured = allocated(lambda: loaded.forward([Row(lane, "positive")] * 2))
    assert planned.step_bytes(2, *size) == pytest.approx(measured, rel=0.02)


def test_decoding_latents_takes_what_is_planned(checkpoint_of: Callable[..., Path]) -> None:
    folder, size = checkpoint_of("flux"), (256, 256, 1)
    planned, loaded = (component_of(folder, "decode", device) for device in (META, CPU))
    assert isinstance(planned, VaeDecoder)
    assert isinstance(loaded, VaeDecoder)
    latents = torch.randn(2, *loaded.latent_shape(*size))
    assert planned.decode_bytes(2, *size) == pytest.approx(allocated(lambda: loaded.vae.decode(latents)), rel=0.02)


def test_large_pictures_are_planned_as_tiles(checkpoint_of: Callable[..., Path]) -> None:
    decoder = component_of(checkpoint_of("flux"), "decode", META)
    assert isinstance(decoder, VaeDecoder)
    assert decoder.decode_bytes(1, 4096, 4096, 1) < decoder.decode_bytes(1, 1024, 1024, 1) * 4


def test_a_prefill_takes_what_is_planned(checkpoint_of: Callable[..., Path]) -> None:
    folder = checkpoint_of("qwen2_5_omni")
    planned, loaded = (component_of(folder, "thinker", device) for device in (META, CPU))
    assert isinstance(planned, ARComponent)
    assert isinstance(loaded, ARComponent)
    budget = ARBudget(max_batch_tokens=1024, kv_blocks=80)
    stage = ARStage("thinker", loaded, budget)
    measured = allocated(stage.warm_up)
    assert ar_needs(planned, budget, cuda=False).memory.activations == pytest.approx(measured, rel=0.02)
    stage.check_integrity()
    assert not stage.has_work()
    assert stage.stats().extra["blocks_free"] == 80


def test_a_picture_takes_what_is_planned(checkpoint_of: Callable[..., Path]) -> None:
    thinker = component_of(checkpoint_of("qwen2_5_omni"), "thinker", CPU)
    assert isinstance(thinker, Thinker)
    config = thinker.model.config.vision_config
    width, side = 3 * config.temporal_patch_size * config.patch_size**2, 64
    pixels = torch.randn(side * side, width)
    inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}
    tokens = side * side // config.spatial_merge_size**2
    span = MediaSpan(Modality.IMAGE, b"picture", torch.arange(tokens), inputs)
    measured = allocated(lambda: thinker.encode(span)) + pixels.nbytes  # on the CPU they are not copied
    assert thinker.media_bytes(tokens) == pytest.approx(measured, rel=0.1)


def speech_of(folder: Path, device: torch.device, target: str, **budget: object) -> Token2Wav:
    resolved = resolve(OmniEngineArgs(model=str(folder), device="cpu"), registry=REGISTRY)
    stage = resolved.config.pipeline.stages["token2wav"]
    stage = stage.model_copy(update={"budget": stage.budget.model_copy(update=budget)})
    context = LoadContext(resolved.model, "token2wav", stage, device, torch.float32, target=torch.device(target))
    component = load_component(context)
    assert isinstance(component, Token2Wav)
    return component


def test_an_interval_of_the_speech_solver_takes_what_is_planned(checkpoint_of: Callable[..., Path]) -> None:
    folder = checkpoint_of("qwen2_5_omni")
    planned, loaded = (speech_of(folder, device, "cpu") for device in (META, CPU))
    inputs, constants = planned._flow._planned_inputs(SOLVERS["full"], 48, 4)
    data = [torch.zeros(each.shape, dtype=each.dtype) for each in (*inputs, *constants)]
    measured = allocated(lambda: loaded._flow.advance(SOLVERS["full"], False, *data))
    assert planned._flow.interval_bytes("full", 48, 4) == pytest.approx(measured, rel=0.1)


def test_speech_is_planned_as_it_runs_on_its_device(checkpoint_of: Callable[..., Path]) -> None:
    """On CUDA: a copy in half precision, fused kernels, graphs; nowhere does BigVGAN take more than 8 windows."""
    folder = checkpoint_of("qwen2_5_omni")
    cpu, cuda, plain = (
        speech_of(folder, META, "cpu"),
        speech_of(folder, META, "cuda"),
        speech_of(folder, META, "cuda", cuda_graphs=False, kernels="torch", precision="float32"),
    )
    codes = 4 * cpu.layout.block_codes
    halves = sum(p.nbytes for p in cuda._flow.networks[1].parameters() if p.dtype == torch.float16)
    assert halves > 0
    # The fused activations have factors, and no filters.
    assert cuda.memory(1, codes).weights - cpu.memory(1, codes).weights == pytest.approx(halves, rel=0.1)
    assert cuda.memory(1, codes).graphs > 0
    assert plain.memory(1, codes).graphs == cpu.memory(1, codes).graphs == 0
    assert cuda._vocoder_bytes(2, 96) < cpu._vocoder_bytes(2, 96)
    assert cuda._flow.interval_bytes("full", 24, 8) < plain._flow.interval_bytes("full", 24, 8)
    kept = 2 * cpu.request_bytes
    for component in (cuda, plain):
        assert component.memory(64, codes).activations - component.memory(32, codes).activations >= 32 * kept
    assert cuda.memory(64, codes).activations == 64 * kept


@pytest.mark.parametrize("quality", ["full", "balanced", "fast"])
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_nothing_of_the_host_is_read_in_an_interval_that_is_captured(
    quality: SpeechQuality, target: str, checkpoint_of: Callable[..., Path]
) -> None:
    flow, solver = speech_of(checkpoint_of("qwen2_5_omni"), META, target)._flow, SOLVERS[quality]
    inputs, constants = flow._planned_inputs(solver, 6, 2)
    with torch.inference_mode(), HostTensors() as host:
        flow.advance(solver, flow.has_half, *inputs, *constants)
    assert host.found == []
