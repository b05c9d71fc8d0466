"""How memory is shared out among stages, and what is said where it is not enough."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from omnistage.cli import app
from omnistage.config import ARStageConfig, OmniEngineArgs, ResolvedConfig, resolve
from omnistage.core.errors import CapacityError
from omnistage.core.family import LoadContext
from omnistage.core.memory import resident_memory
from omnistage.core.stage_memory import GIB, StageMemory
from omnistage.engines.ar import memory as ar_memory
from omnistage.engines.ar.memory import ARNeeds
from omnistage.engines.peak_memory import META, peak_bytes, weight_bytes
from omnistage.models import loading, stored
from omnistage.models.causal_lm import component
from omnistage.models.loading import straight_to
from omnistage.models.registry import REGISTRY
from omnistage.omni import Omni
from omnistage.pipeline import build
from omnistage.placement import devices, measure
from omnistage.placement.memory_plan import CUDA_CONTEXT, MemoryPlan, PlannedStage, _Planner
from omnistage.placement.needs import AutoregressiveNeeds, StageNeeds, weights_on_disk
from tests.hang_guard import HANG_SECONDS

MIB = 2**20


# ------------------------------------------------------------------------------------------- without data


def test_a_peak_counts_what_is_alive_at_once() -> None:
    x = torch.empty(256, 1024, device=META)  # 1 MiB

    def run() -> torch.Tensor:
        y = x + 1
        z = y * 2
        del y
        return z.view(-1)[:10] + 1  # a view keeps the whole

    assert peak_bytes(run) == 2 * MIB
    assert peak_bytes(lambda: x.view(-1)) == 0
    assert peak_bytes(lambda: x.add_(1)) == 0


def test_attention_takes_its_result_alone() -> None:
    x = torch.empty(1, 4, 2048, 64, device=META)
    assert peak_bytes(lambda: torch.nn.functional.scaled_dot_product_attention(x, x, x)) == x.nbytes


def test_a_mask_without_data_selects_everything() -> None:
    x, mask = torch.empty(64, 32, device=META), torch.empty(64, dtype=torch.bool, device=META)
    assert peak_bytes(lambda: x[mask]) == x.nbytes


def test_shared_weights_count_once() -> None:
    first = torch.nn.Linear(8, 8, bias=False, device=META)
    second = torch.nn.Linear(8, 8, bias=False, device=META)
    second.weight = first.weight
    assert weight_bytes([first, second, first]) == 8 * 8 * 4
    gc.collect()


def test_a_step_is_planned_from_two_layers_of_each_kind_and_takes_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = REGISTRY.family("causal_lm").tiny
    assert tiny is not None
    tiny(tmp_path, seed=0)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 9}))
    resolved = resolve(OmniEngineArgs(model=str(tmp_path), device="cpu"), registry=REGISTRY)
    stage = resolved.config.pipeline.stages["thinker"]
    assert isinstance(stage, ARStageConfig)
    planned = component.load(LoadContext(resolved.model, "thinker", stage, META, torch.float32))
    runs: list[int] = []
    for layer in planned.decoder.layers:
        layer.register_forward_hook(lambda *_: runs.append(1))
    few = ar_memory.ar_needs(planned, stage.budget, cuda=True)
    assert len(runs) == 3 * 2  # a step with the most tokens, and the largest captured ones without and with prompts
    assert len(planned.decoder.layers) == 9
    monkeypatch.setattr(ar_memory, "_few_layers", nullcontext)
    assert ar_memory.ar_needs(planned, stage.budget, cuda=True) == few
    assert len(runs) == 3 * 2 + 3 * 9


def test_programs_of_decode_steps_on_the_cpu_are_counted(tmp_path: Path) -> None:
    tiny = REGISTRY.family("causal_lm").tiny
    assert tiny is not None
    tiny(tmp_path, seed=0)
    resolved = resolve(OmniEngineArgs(model=str(tmp_path), device="cpu"), registry=REGISTRY)
    stage = resolved.config.pipeline.stages["thinker"]
    assert isinstance(stage, ARStageConfig)
    planned = component.load(LoadContext(resolved.model, "thinker", stage, META, torch.float32))
    off = stage.budget.model_copy(update={"torchscript": False})
    graphs = {
        each.torchscript: ar_memory.ar_needs(planned, each, cuda=False).memory.graphs for each in (stage.budget, off)
    }
    assert graphs == {True: planned.spec.num_layers * 4 * 2**20, False: 0}
    planned.pure_forward = False  # not traced
    assert ar_memory.ar_needs(planned, stage.budget, cuda=False).memory.graphs == 0


def test_headers_give_the_sizes_of_weights(tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    tensors = {"a": torch.zeros(3, 5, dtype=torch.float32), "b": torch.zeros(7, dtype=torch.int64)}
    save_file(tensors, tmp_path / "unet" / "model.safetensors")
    save_file(tensors, tmp_path / "unet" / "model.fp16.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    assert weights_on_disk(tmp_path, 2) == 15 * 2 + 7 * 8


# ------------------------------------------------------------------------------------------------ sharing


@dataclass(frozen=True)
class Drawing(StageNeeds):
    """1 GiB of weights, and 1 GiB for each request."""

    def at(self, concurrency: int, context: int) -> StageMemory:
        return StageMemory(GIB, activations=concurrency * GIB)

    def settings(self, memory: StageMemory, concurrency: int, *, reduced: bool) -> dict[str, int]:
        return {"max_batch": concurrency} if reduced else {}


def talking(name: str = "thinker", *, weights: int = 2 * GIB, device: str = "cuda", **more: int) -> AutoregressiveNeeds:
    """A stage with a KV cache of 1 MiB a block of 16 tokens, and sequences of at most 16,384."""
    needs = replace(ARNeeds(StageMemory(weights), 0, MIB, 16, 16_384, 64 * 1024, None), **more)
    return AutoregressiveNeeds(name, device, "bfloat16", needs, None if device == "cuda" else GIB)


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> ResolvedConfig:
    folder = tmp_path_factory.mktemp("lm")
    tiny = REGISTRY.family("causal_lm").tiny
    assert tiny is not None
    tiny(folder, seed=0)
    return resolve(OmniEngineArgs(model=str(folder), device="cpu"), registry=REGISTRY)


def plan_of(resolved: ResolvedConfig, needs: Sequence[StageNeeds], available: int | None) -> MemoryPlan:
    return _Planner(resolved, needs, {each.device: available for each in needs}).plan(resolved.config.deployment)


def test_the_kv_cache_is_as_large_as_the_load_and_not_as_the_device(resolved: ResolvedConfig) -> None:
    plan = plan_of(resolved, [talking()], 139 * GIB)
    assert plan.fits
    assert (plan.concurrency, plan.context) == (16, 8192)
    stage = plan.stages["thinker"]
    assert stage.kv_tokens == 16 * 8192
    assert stage.settings == {"kv_memory": 8 * GIB}
    assert plan.devices[0].bytes_needed < 12 * GIB


def test_fewer_requests_fit_a_smaller_device(resolved: ResolvedConfig) -> None:
    plan = plan_of(resolved, [talking()], 7 * GIB)
    assert plan.fits
    assert plan.concurrency == 7  # half a GiB each, beside 2 GiB of weights, the driver's share and the reserve
    assert plan.stages["thinker"].kv_tokens == 7 * 8192


def test_no_more_requests_are_planned_for_than_may_run(resolved: ResolvedConfig) -> None:
    config = resolved.config
    deployment = config.deployment.model_copy(update={"concurrency": 10**9, "context": 1024})
    many = replace(resolved, config=config.model_copy(update={"deployment": deployment}))
    assert plan_of(many, [talking()], 139 * GIB).concurrency == 64
    assert plan_of(many, [talking()], 7 * GIB).concurrency == 63
    assert plan_of(many, [Drawing("denoiser", "cuda", "bfloat16")], 24 * GIB).concurrency == 21


def test_a_lone_request_may_be_as_long_as_the_model_allows_where_there_is_room(resolved: ResolvedConfig) -> None:
    config = resolved.config
    deployment = config.deployment.model_copy(update={"concurrency": 1, "context": 1024})
    short = replace(resolved, config=config.model_copy(update={"deployment": deployment}))
    assert plan_of(short, [talking()], 24 * GIB).stages["thinker"].max_length == 16_384
    assert plan_of(short, [talking()], int(3.3 * GIB)).stages["thinker"].max_length == 1024


def test_where_no_request_of_the_length_fits_a_shorter_one_may(resolved: ResolvedConfig) -> None:
    plan = plan_of(resolved, [talking()], int(3.25 * GIB))
    assert plan.fits
    assert (plan.concurrency, plan.context) == (1, 2048)


def test_a_configured_cache_is_left_as_it_is(resolved: ResolvedConfig) -> None:
    plan = plan_of(resolved, [talking(fixed_blocks=32)], 24 * GIB)
    assert plan.stages["thinker"].kv_tokens == 512
    assert not plan.stages["thinker"].settings


def test_larger_batches_are_cut_to_what_fits(resolved: ResolvedConfig) -> None:
    stages: list[StageNeeds] = [Drawing("denoise", "cuda", "bfloat16"), Drawing("decode", "cuda", "bfloat16")]
    plan = plan_of(resolved, stages, 12 * GIB)
    assert plan.concurrency == 4
    assert plan.stages["decode"].settings == {"max_batch": 4}
    assert not plan_of(resolved, stages, 60 * GIB).stages["decode"].settings


def test_host_memory_has_a_small_cache_and_no_driver(resolved: ResolvedConfig) -> None:
    plan = plan_of(resolved, [talking(device="cpu")], 24 * GIB)
    assert plan.devices[0].bytes_needed == 3 * GIB
    assert plan.stages["thinker"].kv_tokens == 16 * 1024


def test_what_does_not_fit_is_refused_with_what_would_help(resolved: ResolvedConfig) -> None:
    stages = [talking("thinker", weights=16 * GIB), talking("talker", weights=9 * GIB)]
    plan = plan_of(resolved, stages, 24 * GIB)
    assert not plan.fits
    assert any("talker.device=cpu" in line for line in plan.advice)
    assert any("at least 28 GiB" in line for line in plan.advice)
    assert any("over 2 such GPUs" in line for line in plan.advice)
    with pytest.raises(CapacityError, match=r"needs 27\.\d GiB on cuda, of which 25\.0 GiB are weights"):
        plan.check()


def test_an_unknown_device_is_not_judged(resolved: ResolvedConfig) -> None:
    assert plan_of(resolved, [talking()], None).fits


# ----------------------------------------------------------------------------------------------- loading


def test_a_model_that_cannot_fit_is_refused_before_a_weight_is_read(
    resolved: ResolvedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_PLANNED_SHARE", 0)
    monkeypatch.setattr(build, "available_memory", lambda *_: 100_000)
    monkeypatch.setattr(build, "load_component", lambda *_, **__: pytest.fail("a component was loaded"))
    with pytest.raises(CapacityError, match=r"does not fit: .*use a machine with"):
        Omni(resolved.model.folder, device="cpu", progress=False)


def test_a_model_is_loaded_by_its_plan(resolved: ResolvedConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_PLANNED_SHARE", 0)
    seen: list[tuple[str, float]] = []
    overrides = ("deployment.concurrency=2", "deployment.context=64")
    report = lambda doing, done: seen.append((doing, done))  # noqa: E731
    with Omni(resolved.model.folder, device="cpu", overrides=overrides, progress=report) as omni:
        assert omni.stats().stages["thinker"].extra["blocks"] == 2 * 64 / 16
    assert seen[0] == ("thinker: weights", 0.0)
    assert seen[-1] == ("thinker: loaded", 1.0)


def test_a_limit_of_a_gpu_counts_what_this_process_has_taken(
    resolved: ResolvedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (100 * GIB, 139 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 6 * GIB)
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _device: shares.append(share))
    deployment = resolved.config.deployment
    limited = deployment.model_copy(update={"gpu_memory": 24 * GIB})
    assert devices.available_memory("cuda", deployment) == 100 * GIB + CUDA_CONTEXT
    assert devices.available_memory("cuda", limited) == 18 * GIB
    devices.limit_process(torch.device("cuda"), deployment)
    devices.limit_process(torch.device("cpu"), limited)
    assert not shares
    devices.limit_process(torch.device("cuda"), limited)
    assert shares == [(24 * GIB - CUDA_CONTEXT) / (139 * GIB)]


# ----------------------------------------------------------------------------------------------- command


def test_the_command_prints_the_plan(resolved: ResolvedConfig) -> None:
    folder = str(resolved.model.folder)
    shown = CliRunner().invoke(app, ["plan", folder, "--gpu-memory", "4GiB", "--concurrency", "4"])
    assert shown.exit_code == 0, shown.output
    assert "thinker" in shown.output
    assert "CUDA context" in shown.output
    assert "fits: 4 requests at once of 2,048 tokens each" in shown.output  # which is all that the model takes
    as_json = CliRunner().invoke(app, ["plan", folder, "--gpu-memory", "4GiB", "--context", "512", "--json"])
    data = json.loads(as_json.output)
    assert data["fits"] is True
    assert data["context"] == 512
    assert data["devices"][0]["stages"][0]["memory"]["weights"] == 968_512 // 2  # bfloat16


def test_the_command_fails_where_nothing_fits(resolved: ResolvedConfig, tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    shown = CliRunner().invoke(
        app, ["plan", str(resolved.model.folder), "--gpu-memory", "1GiB", "--plot", str(picture)]
    )
    assert shown.exit_code == 1
    assert "does not fit" in shown.output
    assert "use a GPU with at least 2 GiB" in shown.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_weights_go_straight_to_their_device_and_are_the_same(
    resolved: ResolvedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert straight_to(torch.device("cpu")) == {}
    assert straight_to(torch.device("cuda", 1)) == {"device_map": {"": torch.device("cuda", 1)}}
    stage = resolved.config.pipeline.stages["thinker"]
    context = LoadContext(resolved.model, "thinker", stage, torch.device("cpu"), torch.float32)
    plain = component.load(context).model.state_dict()
    monkeypatch.setattr(loading, "straight_to", lambda device: {"device_map": {"": device}})
    reads: list[object] = []
    read = stored._read
    monkeypatch.setattr(stored, "_read", lambda source: reads.append(source) or read(source))
    straight = component.load(context).model.state_dict()
    assert len(reads) >= len({tensor.data_ptr() for tensor in plain.values()}) - 1
    assert plain.keys() == straight.keys()
    assert all(torch.equal(straight[name], tensor) for name, tensor in plain.items())


def test_progress_follows_what_the_device_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    held, reported = iter([100, 100 + GIB, 100 + 9 * GIB]), threading.Event()
    seen: list[float] = []

    def report(doing: str, done: float) -> None:
        seen.append(done)
        if len(seen) == 2:
            reported.set()

    monkeypatch.setattr(measure, "_allocated_bytes", lambda _device: next(held, 100))
    monkeypatch.setattr(measure, "_LOOK_SECONDS", 0.001)
    planned = PlannedStage("thinker", "cuda", "bfloat16", StageMemory(4 * GIB), False, None, None, {})
    with measure.LoadingProgress(planned, report):
        assert reported.wait(HANG_SECONDS)
    assert seen[:2] == [0.25 * measure.WEIGHTS_SHARE, measure.WEIGHTS_SHARE]


# ------------------------------------------------------------------------------------------- memory of a KV cache


def test_a_kv_cache_takes_host_memory_as_it_is_written() -> None:
    before = resident_memory()
    if before is None:
        pytest.skip("the system does not say what a process takes")
    cache = ar_memory.zeros((16, 2**20, 4), torch.device("cpu"), torch.float32)
    assert resident_memory() - before < cache.nbytes // 4  # type: ignore[operator]
    cache[3, :1000] = 1.0
    assert cache.sum() == 4000.0
    assert cache.data_ptr() % 64 == 0
    assert cache.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_kv_cache_has_the_shape_and_type_that_it_is_asked_for(dtype: torch.dtype) -> None:
    for shape in ((3, 5), (2, 8, 1, 16), (0, 4)):
        cache = ar_memory.zeros(shape, torch.device("cpu"), dtype)
        assert (tuple(cache.shape), cache.dtype) == (shape, dtype)
        assert not cache.any()
