"""Adapters that cannot be used are refused by name; the library's bounds; who gets a slot."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from omnistage.cli.model_runner import OmniRunner
from omnistage.config import OmniEngineArgs, RemoteStageConfig, resolve
from omnistage.config.schema import ARBudget
from omnistage.core.errors import AdapterError, ConfigError, InvalidRequestError, OmniError
from omnistage.core.params import AdapterWeight, SamplingParams
from omnistage.core.types import ARInput, FinishReason, RequestInfo, StageInput
from omnistage.engines.adapters.files import read_adapter
from omnistage.engines.adapters.library import AdapterLibrary, AdapterLimits, AdapterSource
from omnistage.engines.adapters.peft_format import read_peft
from omnistage.engines.ar.block_pool import BlockPool
from omnistage.engines.ar.scheduler import Scheduler, SequenceState
from omnistage.engines.ar.stage import ARStage
from omnistage.engines.remote.wire import check_params
from omnistage.models.causal_lm import tiny
from omnistage.models.registry import REGISTRY
from omnistage.pipeline.build import plan_memory

LAYER = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


def tensors_of(layer: str = LAYER, rank: int = 2, inputs: int = 64, outputs: int = 64, fill: float = 0.1) -> Tensors:
    return {
        f"base_model.model.{layer}.lora_A.weight": torch.full((rank, inputs), fill),
        f"base_model.model.{layer}.lora_B.weight": torch.full((outputs, rank), fill),
    }


def write(folder: Path, tensors: Tensors | None = None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors_of() if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny.write(folder)
    return folder


@pytest.fixture(scope="module")
def stage(model: Path, tmp_path_factory: pytest.TempPathFactory) -> ARStage:
    """With two places of rank 2."""
    first = write(tmp_path_factory.mktemp("adapters") / "first")
    limits = AdapterLimits(2, 2, 24_000, True)
    library = AdapterLibrary("thinker", {"first": AdapterSource(first)}, limits)
    component = OmniRunner(model).load_component("thinker")
    return ARStage("thinker", component, ARBudget(kv_blocks=64, run_ahead=False), library)  # type: ignore[arg-type]


def bad_files(folder: Path) -> dict[str, Callable[[], object]]:
    """What can be wrong with an adapter's folder, by the words of the error."""
    path = folder / "adapter_model.safetensors"

    def truncate() -> None:
        write(folder)
        path.write_bytes(path.read_bytes()[:-200])

    def pickled() -> None:
        write(folder)
        path.rename(folder / "adapter_model.bin")

    def without_config() -> None:
        write(folder)
        (folder / "adapter_config.json").unlink()

    def pipe() -> None:
        import os

        write(folder)
        path.unlink()
        os.mkfifo(path)

    good, other = tensors_of(), tensors_of("model.layers.99.self_attn.q_proj")
    key_a, key_b = good
    return {
        "is not a folder": lambda: None,
        "not a readable safetensors": truncate,
        "pickled weights are not read": pickled,
        "adapter_config.json is missing": without_config,
        "is not a regular file": pipe,
        "not valid JSON": lambda: (write(folder), (folder / "adapter_config.json").write_text("{")),
        "holds a list": lambda: (write(folder), (folder / "adapter_config.json").write_text("[]")),
        "larger than": lambda: write(folder, {**good, "x": torch.zeros(10_000)}),
        "peft_type is 'IA3'": lambda: write(folder, peft_type="IA3"),
        "sets use_dora": lambda: write(folder, use_dora=True),
        "sets modules_to_save": lambda: write(folder, modules_to_save=["lm_head"]),
        "bias is 'all'": lambda: write(folder, bias="all"),
        "sets target_parameters": lambda: write(folder, target_parameters=["experts.gate"]),
        "sets a_new_idea": lambda: write(folder, a_new_idea={"x": 1}),
        "init_lora_weights is 'pissa": lambda: write(folder, init_lora_weights="pissa_niter_4"),
        "r of model.layers.0": lambda: write(folder, r=0),
        "lora_alpha is 'four'": lambda: write(folder, lora_alpha="four"),
        "its rank is 3": lambda: write(folder, r=3),
        "not a plain name": lambda: write(folder, rank_pattern={"(a+)+$": 2}),
        "lora_A alone": lambda: write(folder, {key_a: good[key_a]}),
        "is not a LoRA weight": lambda: write(folder, {**good, "base_model.model.lm_head.weight": torch.zeros(2)}),
        "changes an embedding": lambda: write(
            folder, {**good, "base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(2)}
        ),
        "layers.99.self_attn.q_proj is not a linear layer": lambda: write(folder, {**good, **other}),
        "lm_head is not a linear layer": lambda: write(folder, tensors_of("lm_head", outputs=1024)),
        "audio_tower.layers.0.self_attn.q_proj is not a linear layer": lambda: write(
            folder, tensors_of("audio_tower.layers.0.self_attn.q_proj")
        ),
        "talker.model.layers.0.self_attn.q_proj is not a linear": lambda: write(folder, tensors_of("talker." + LAYER)),
        "names a layer that another key names": lambda: write(folder, {**good, **tensors_of("thinker." + LAYER)}),
        "trained on another base": lambda: write(folder, tensors_of(inputs=96)),
        "not finite": lambda: write(folder, {**good, key_b: torch.full((64, 2), float("nan"))}),
        "are not floating-point": lambda: write(folder, {key: t.to(torch.int8) for key, t in good.items()}),
        "has rank 5, over the 2": lambda: write(folder, tensors_of(rank=5), r=5),
    }


@pytest.mark.parametrize("message", list(bad_files(Path())))
def test_a_bad_adapter_is_refused_by_name_and_changes_nothing(stage: ARStage, tmp_path: Path, message: str) -> None:
    folder, library = tmp_path / "bad", stage.adapters
    bad_files(folder)[message]()
    assert library is not None
    with pytest.raises(AdapterError, match="adapter 'bad': ") as failure:
        library.load("bad", AdapterSource(folder))
    assert message in failure.value.message
    assert set(library.names()) == {"first"}


def selected(library: AdapterLibrary, *names: str) -> set[bytes]:
    return set(library.select(tuple(AdapterWeight(name=name) for name in names)).digests)


def test_host_memory_is_bounded_and_what_left_it_comes_back(stage: ARStage, tmp_path: Path) -> None:
    assert stage.adapters is not None
    library = AdapterLibrary("thinker", {}, AdapterLimits(2, 2, 2500, True))  # of 1024 bytes each
    library.open(stage.adapters._read)  # type: ignore[arg-type]
    names = [f"n{i}" for i in range(5)]
    for i, name in enumerate(names):
        library.load(name, AdapterSource(write(tmp_path / name, tensors_of(fill=0.1 * (i + 2)))))
        assert library.held_bytes == min(i + 1, 2) * 1024
    assert len({frozenset(selected(library, name)) for name in names}) == 5
    write(tmp_path / "n1", tensors_of(fill=9.0))
    with pytest.raises(AdapterError, match="have changed since it was loaded"):
        selected(library, "n1")
    for name in names:
        library.unload(name)
    assert library.held_bytes == 0


def test_a_request_whose_files_change_while_it_waits_ends_alone(stage: ARStage, tmp_path: Path) -> None:
    library = stage.adapters
    assert library is not None
    library.load("gone", AdapterSource(write(tmp_path / "gone", tensors_of(fill=0.7))))
    for name in ("gone", "first"):
        params = SamplingParams.parse({"max_tokens": 3, "temperature": 0.0, "lora": name, "ignore_eos": True})
        stage.check_params(params)
        stage.submit(StageInput(RequestInfo(name), params, ARInput((5, 6, 7))))
    library._cache.clear()
    write(tmp_path / "gone", tensors_of(fill=0.8))
    ends = {}
    while stage.has_work():
        for chunk in stage.step():
            if chunk.finish is not None:
                ends[chunk.request_id] = chunk.finish, chunk.error
        stage.check_integrity()
    assert ends["first"][0] is FinishReason.LENGTH
    assert ends["gone"][0] is FinishReason.ERROR
    assert "have changed" in str(ends["gone"][1])
    library.unload("gone")


def test_the_same_content_is_the_same_adapter_and_a_scale_is_not(stage: ARStage, tmp_path: Path) -> None:
    library = stage.adapters
    assert library is not None
    folder = write(tmp_path / "again")
    library.load("copy", AdapterSource(folder))
    library.load("half", AdapterSource(folder, 0.5))
    assert selected(library, "copy") == selected(library, "first") != selected(library, "half")
    one = library.select((AdapterWeight(name="first"),)).salt
    assert one == library.select((AdapterWeight(name="copy"),)).salt
    assert one != library.select((AdapterWeight(name="first", weight=0.5),)).salt
    library.unload("copy")
    assert library.pairs(library._adapters["first"])
    library.unload("half")


def test_an_adapter_that_overflows_in_its_rows_leaves_others_alone(stage: ARStage, tmp_path: Path) -> None:
    library = stage.adapters
    assert library is not None

    def tokens(*wanted: str | None) -> list[list[int]]:
        found: dict[str, list[int]] = {}
        for index, name in enumerate(wanted):
            params = SamplingParams.parse({"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, "lora": name or ()})
            stage.submit(StageInput(RequestInfo(f"{index}"), params, ARInput((5, 6, 7, 8))))
            found[f"{index}"] = []
        while stage.has_work():
            for chunk in stage.step():
                if chunk.payload is not None:
                    found[chunk.request_id] += chunk.payload.token_ids  # type: ignore[union-attr]
        return list(found.values())

    library.load("huge", AdapterSource(write(tmp_path / "huge", tensors_of(fill=1e38))))
    alone = tokens("first", None)
    assert tokens("first", None, "huge")[:2] == alone
    library.unload("huge")


def test_adapters_beyond_the_slots_are_refused_where_one_request_needs_them(stage: ARStage, tmp_path: Path) -> None:
    library = stage.adapters
    assert library is not None
    for i in range(2):
        library.load(f"m{i}", AdapterSource(write(tmp_path / f"m{i}", tensors_of(fill=0.3 + i))))
    with pytest.raises(AdapterError, match=r"raise deployment\.adapter_slots"):
        selected(library, "first", "m0", "m1")
    for i in range(2):
        library.unload(f"m{i}")


def test_patterns_are_found_as_peft_finds_them(tmp_path: Path) -> None:
    patterns = {"q_proj": 8, r"layers\.0\.self_attn\.q_proj": 16, "proj": 1}
    files = read_adapter(write(tmp_path, alpha_pattern=patterns), 1 << 20)
    pair = read_peft(files, 1.0)[LAYER]
    torch.testing.assert_close(pair.up, torch.full((64, 2), 0.1) * 8 / 2)
    files = read_adapter(write(tmp_path, alpha_pattern={"j": 8}, use_rslora=True), 1 << 20)
    torch.testing.assert_close(read_peft(files, 3.0)[LAYER].up, torch.full((64, 2), 0.1) * 4 / 2**0.5 * 3)


# ------------------------------------------------------------------------------------------------- scheduling


def state(key: str, *adapters: str, length: int = 4) -> SequenceState:
    return SequenceState(key, 0.0, [1] * length, length, adapters=frozenset(name.encode() for name in adapters))


def scheduler_of(slots: int) -> Scheduler:
    return Scheduler(BlockPool(64, 4), max_batch_tokens=64, max_running=16, adapter_slots=slots)


def started(scheduler: Scheduler) -> list[str]:
    output = scheduler.schedule()
    scheduler.commit(output)
    for item in output.batch:
        if item.sample:
            scheduler.append(item.key, 1)
    return [item.key for item in output.batch]


def test_requests_wait_for_a_slot_and_those_without_adapters_pass_them() -> None:
    scheduler = scheduler_of(2)
    for each in (state("a", "x"), state("b", "y"), state("c", "z"), state("d", "x"), state("e")):
        scheduler.add(each)
    assert started(scheduler) == ["a", "b", "e"]  # d behind c: with x in use for ever c would wait for ever
    scheduler.remove("b")
    assert set(started(scheduler)) == {"a", "c", "d", "e"}
    scheduler.check()


def test_a_request_with_several_adapters_gets_all_of_them_at_once() -> None:
    scheduler = scheduler_of(2)
    for each in (state("a", "x"), state("b", "y", "z"), state("c", "x", "y")):
        scheduler.add(each)
    assert started(scheduler) == ["a"]
    scheduler.remove("a")
    assert started(scheduler) == ["b"]
    scheduler.remove("b")
    assert started(scheduler) == ["c"]


# ---------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["deployment.adapters.a.folder=x", "deployment.adapters.a.stage=nobody"], "there is no stage 'nobody'"),
        (["deployment.adapters.a=x", "pipeline.stages.thinker.tensor_parallel=2"], "runs on several ranks"),
        (["deployment.adapters.a.scale=1"], "folder"),
        (["deployment.adapter_slots=0", "deployment.adapters.a=x"], "adapter_slots"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(model: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as failure:
        resolve(OmniEngineArgs(model=str(model), overrides=tuple(overrides)), registry=REGISTRY)
    assert message in str(failure.value)


def test_adapters_of_the_command_line_are_those_of_the_configuration(model: Path) -> None:
    args = OmniEngineArgs(model=str(model), adapters=("a=x", "b=y=z"), adapter_folders=("f",))
    deployment = resolve(args, registry=REGISTRY).config.deployment
    assert {name: (each.folder, each.stage) for name, each in deployment.adapters.items()} == {
        "a": ("x", "thinker"),
        "b": ("y=z", "thinker"),
    }
    assert deployment.adapter_folders == ("f",)
    with pytest.raises(OmniError, match="NAME=FOLDER"):
        resolve(OmniEngineArgs(model=str(model), adapters=("a",)), registry=REGISTRY)


def test_nothing_is_installed_where_no_adapters_are_configured(model: Path) -> None:
    component: Any = OmniRunner(model).load_component("thinker")
    stage = ARStage("thinker", component, ARBudget(kv_blocks=8))
    modules: Mapping[str, torch.nn.Module] = dict(component.decoder.named_modules())
    assert stage.runner.adapters is None
    assert not any(module._forward_hooks or hasattr(module, "adapter_up") for module in modules.values())
    with pytest.raises(AdapterError, match="stage 'thinker' has no adapters"):
        stage.check_params(SamplingParams.parse({"lora": "a"}))


def test_the_memory_plan_has_room_for_the_configured_adapters(model: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "wide", r=6, rank_pattern={"q_proj": 24})
    plain, adapted = (
        plan_memory(
            resolve(OmniEngineArgs(model=str(model), device="cpu", adapters=adapters), registry=REGISTRY)
        ).stages["thinker"]
        for adapters in ((), (f"a={folder}",))
    )
    widths = 3 * (64 + 64 + 2 * (64 + 32) + 64 + 64 + 3 * (64 + 128))  # q, k and v, o, the MLP, of three layers
    assert adapted.memory.weights - plain.memory.weights == widths * 8 * 24 * 4


@pytest.mark.parametrize("server", ["vllm", "openai"])
def test_a_stage_on_another_server_takes_no_adapters(server: str) -> None:
    settings = {"engine": "remote", "server": server, "url": "http://127.0.0.1:9", "model": "m", "output": "text"}
    with pytest.raises(InvalidRequestError, match="is not supported by this stage's server") as failure:
        check_params(SamplingParams.parse({"lora": "a"}), RemoteStageConfig.model_validate(settings))
    assert failure.value.param == "lora"
