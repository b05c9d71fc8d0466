"""From a model folder to running parts, with a family of fake components."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from omnistage.config import DeploymentConfig, GroupConfig, OmniEngineArgs
from omnistage.core.errors import CapacityError, CheckpointError, ConfigError, RegistryError
from omnistage.core.family import Family, LoadContext
from omnistage.core.params import CodecParams, SamplingParams
from omnistage.core.registry import Registry
from omnistage.core.stage_memory import StageMemory
from omnistage.engines import compiling
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.codec.component import CodecComponent
from omnistage.omni import Omni
from omnistage.pipeline import build
from omnistage.pipeline.phases import PhaseTimes
from omnistage.placement import devices
from omnistage.placement.memory_plan import MemoryPlan, PlannedDevice, PlannedStage
from tests.hang_guard import HANG_SECONDS
from tests.unit.fakes import FakeProcessor, FakeStage, stream_into

PIPELINE = """
pipeline:
  name: toy
  stages:
    thinker: {engine: autoregressive, component: toy.thinker, output: text, params: {max_tokens: 5}}
    voice: {engine: codec, component: toy.voice, output: audio, dtype: float16}
  edges:
    - {from: thinker, to: voice, bridge: toy.speak}
deployment: {device: cpu, torch_threads: 2, output_buffer: 7}
"""


class ToyAR(ARComponent):
    """Never run: only what kind it is matters here."""


class ToyCodec(CodecComponent):
    """Never run either."""


for kind in (ToyAR, ToyCodec):
    kind.__abstractmethods__ = frozenset()


class Toy:
    """A registered family, a model folder of it, and what its components were loaded with."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.contexts: dict[str, LoadContext] = {}
        self.stages: list[FakeStage] = []
        (folder / "config.json").write_text(json.dumps({"architectures": ["Toy"], "model_type": "toy"}))
        (folder / "pipeline.yaml").write_text(PIPELINE)
        self.registry = Registry()
        self.registry._discovered = True  # only what is registered here
        self.components = {"toy.thinker": ToyAR, "toy.voice": ToyCodec}
        self.registry.register(
            Family(
                "toy",
                ("Toy",),
                folder / "pipeline.yaml",
                dict.fromkeys(self.components, self.load),
                {"toy.speak": stream_into(audio=True)},
                lambda model: FakeProcessor(),
            )
        )
        self.threads: list[int] = []
        monkeypatch.setattr("omnistage.engines.ar.stage.ARStage", lambda *args: self.stage(*args, audio=False))
        monkeypatch.setattr("omnistage.engines.codec.stage.CodecStage", lambda *args: self.stage(*args, audio=True))

    def load(self, context: LoadContext) -> object:
        self.contexts[context.stage_name] = context
        self.threads.append(torch.get_num_threads())
        if context.progress is not None:
            context.progress("weights", 0.5)
        return self.components[context.stage.component]()

    def stage(self, name: str, component: object, budget: object, adapters: object = None, *, audio: bool) -> FakeStage:
        assert adapters is None
        self.stages.append(FakeStage(name, audio=audio))
        return self.stages[-1]

    def args(self, **kwargs: object) -> OmniEngineArgs:
        return OmniEngineArgs.parse({"model": str(self.folder), **kwargs})


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Toy]:
    before = torch.get_num_threads()
    yield Toy(tmp_path, monkeypatch)
    torch.set_num_threads(before)


def test_a_folder_becomes_stages_bridges_and_defaults(toy: Toy) -> None:
    parts = build.build_parts(toy.args(), registry=toy.registry)
    assert [stage.name for stage in toy.stages] == ["thinker", "voice"]
    assert list(parts.bridges) == ["voice"]
    assert parts.defaults == {"thinker": SamplingParams(max_tokens=5), "voice": CodecParams()}
    assert torch.get_num_threads() == 2
    assert [stage.cpu_threads for stage in toy.stages] == [2, 2]
    assert toy.threads == [1, 1]  # whoever loads a model leaves no threads behind
    assert toy.contexts["thinker"].dtype is torch.float32
    assert toy.contexts["voice"].dtype is torch.float16


def test_a_stage_that_is_built_anew_uses_loaded_weights_once_where_its_engine_leaves_them_alone(toy: Toy) -> None:
    parts = build.build_parts(toy.args(), registry=toy.registry)
    loads = {"thinker": 1, "voice": 1}
    for attempt in range(3):
        for name in loads:
            stage = parts.rebuilds[name](attempt)
            loads[name] += name == "voice" or attempt > 0
            assert stage is toy.stages[-1]
            assert (stage.name, stage.cpu_threads) == (name, 2)
    assert len(toy.threads) == sum(loads.values())


def test_a_panic_over_a_checkpoint_is_the_checkpoints_fault(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    def panic() -> object:
        raise PanicException("index out of bounds")

    monkeypatch.setitem(toy.components, "toy.voice", panic)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="PanicException"):
        build.build_parts(toy.args(), progress=False, registry=toy.registry)
    assert toy.stages[0].closed == 1


def test_a_door_opens_over_a_folder(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    original = build.build_parts
    monkeypatch.setattr(
        "omnistage.pipeline.front.build_parts",
        lambda args, progress: original(args, progress=progress, registry=toy.registry),
    )
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Omni(toy.folder, device="cpu", overrides=["deployment.max_inflight=3"], progress=True) as omni:
        assert omni.orchestrator.max_inflight == 3
        assert omni.chat([{"role": "user", "content": "one two"}], modalities=["audio"]).audio is not None
    assert [stage.closed for stage in toy.stages] == [1, 1]


def test_stages_that_were_loaded_are_closed_if_a_later_one_fails(toy: Toy) -> None:
    toy.components["toy.voice"] = ToyAR
    with pytest.raises(RegistryError, match="codec engine cannot run"):
        build.build_parts(toy.args(), progress=False, registry=toy.registry)
    assert [stage.closed for stage in toy.stages] == [1]
    toy.components["toy.thinker"] = ToyCodec
    with pytest.raises(RegistryError, match="autoregressive engine cannot run"):
        build.build_parts(toy.args(), progress=False, registry=toy.registry)


class Breaking:
    """Raises what a broken checkpoint makes a library raise."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *_: object) -> object:
        raise self.error


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [(KeyError, ("w",)), (Exception, ("x" * 999,)), (RecursionError, ()), (ZeroDivisionError, ("\nby 0",))],
    ids=lambda given: given.__name__ if isinstance(given, type) else "",
)
@pytest.mark.parametrize("place", ["stage 'thinker'", "the processor"])
def test_whatever_a_checkpoint_makes_a_library_raise_is_a_checkpoint_error(
    toy: Toy, kind: type[Exception], arguments: tuple[str, ...], place: str
) -> None:
    error = kind(*arguments)
    _break(toy, place, error)
    with pytest.raises(CheckpointError) as caught:
        build.build_parts(toy.args(), progress=False, registry=toy.registry)
    message = str(caught.value)
    assert str(toy.folder) in message
    assert place in message
    assert type(error).__name__ in message
    assert len(message) < len(str(toy.folder)) + 350
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (MemoryError, ""),
        (torch.OutOfMemoryError, "CUDA"),
        (RuntimeError, "DefaultCPUAllocator: can't allocate memory"),
    ],
)
@pytest.mark.parametrize("place", ["stage 'thinker'", "the processor"])
def test_a_model_that_does_not_fit_is_told_what_to_change(
    toy: Toy, kind: type[Exception], message: str, place: str
) -> None:
    _break(toy, place, kind(message))
    with pytest.raises(CapacityError, match="use a smaller model or dtype"):
        build.build_parts(toy.args(), progress=False, registry=toy.registry)


@pytest.mark.parametrize("where", ["the engine", "the warm-up"])
def test_a_stage_without_memory_to_run_is_told_what_to_change(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def out_of_memory(*_: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    if where == "the engine":
        monkeypatch.setattr("omnistage.engines.codec.stage.CodecStage", out_of_memory)
    else:
        monkeypatch.setattr(FakeStage, "warm_up", out_of_memory)
        on_gpu(monkeypatch)
    with pytest.raises(CapacityError, match=r"not enough memory to run stage .*lower its budget.*Tried to allocate"):
        build.build_parts(toy.args(), progress=False, registry=toy.registry)
    assert all(stage.closed == 1 for stage in toy.stages)


def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have stages measured and warmed up as on a GPU."""
    init = build.StageFactory.__init__

    def placed(self: build.StageFactory, *args: object) -> None:
        init(self, *args)  # type: ignore[arg-type]
        self._on_gpu = True

    class Meter:
        def mark_loaded(self) -> None: ...
        def result(self) -> None: ...

    monkeypatch.setattr(build.StageFactory, "__init__", placed)
    monkeypatch.setattr(build, "meter_for", lambda planned: Meter())


def test_a_stage_that_is_built_anew_is_warmed_up_like_the_first(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    warm: list[str] = []
    monkeypatch.setattr(FakeStage, "warm_up", lambda stage: warm.append(stage.name))
    on_gpu(monkeypatch)
    parts = build.build_parts(toy.args(), progress=False, registry=toy.registry)
    assert warm == ["thinker", "voice"]
    parts.rebuilds["voice"](0)
    assert warm == ["thinker", "voice", "voice"]


@pytest.mark.parametrize(
    ("weighed", "imports"),
    [
        ({"thinker": compiling.MIN_BYTES, "voice": 0}, True),
        ({"thinker": compiling.MIN_BYTES - 1, "voice": compiling.MIN_BYTES}, False),
    ],
)
def test_what_compiles_is_imported_while_the_weights_of_a_large_network_are_read(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, weighed: dict[str, int], imports: bool
) -> None:
    """Not before, for planning would wait for it; and no engine is built meanwhile, which may import parts of it."""
    events: list[str] = []
    weights_read = threading.Event()

    def import_compiler() -> None:
        assert weights_read.wait(HANG_SECONDS)
        events.append("compiler imported")

    def prepare_compiler() -> threading.Thread:
        thread = threading.Thread(target=import_compiler, daemon=True)
        thread.start()
        return thread

    def load(context: LoadContext, *, registry: Registry, quantiser: object) -> object:
        assert quantiser is None
        events.append(f"{context.stage_name} read")
        weights_read.set()
        return toy.load(context)

    def built(name: str, component: object, budget: object, adapters: object = None) -> FakeStage:
        events.append(f"{name} built")
        return FakeStage(name, audio=name == "voice")

    stages = [
        PlannedStage(name, "cpu", "", StageMemory(weights), False, None, None, {}) for name, weights in weighed.items()
    ]
    plan = MemoryPlan("toy", "toy", (1, 1), 1, 1, (PlannedDevice("cpu", None, 0, 0, tuple(stages)),))
    monkeypatch.setattr(build, "load_plan", lambda *_: plan)
    monkeypatch.setattr(build, "load_component", load)
    monkeypatch.setattr(compiling, "prepare_compiler", prepare_compiler)
    monkeypatch.setattr("omnistage.engines.ar.stage.ARStage", built)
    monkeypatch.setattr("omnistage.engines.codec.stage.CodecStage", built)
    on_gpu(monkeypatch)
    build.build_parts(toy.args(), progress=False, registry=toy.registry)
    imported = ["compiler imported"] if imports else []
    assert events == ["thinker read", *imported, "thinker built", "voice read", "voice built"]


def test_a_start_says_what_it_is_doing_and_how_long_it_took(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch)
    said: list[tuple[str, float]] = []
    parts = build.build_parts(toy.args(), progress=lambda *report: said.append(report), registry=toy.registry)
    assert [doing for doing, _ in said[:5]] == [
        "thinker: weights",
        "thinker: weights",
        "thinker: engine",
        "thinker: warming up",
        "thinker: loaded",
    ]
    shares = [done for _, done in said]
    assert shares[:5] == sorted(shares[:5])
    assert shares[4] == 1.0
    stages = [f"{name}: {doing}" for name in ("thinker", "voice") for doing in ("weights", "engine", "warming up")]
    assert list(parts.times.seconds) == ["configuration", "memory plan", "processor", *stages]


def test_a_phase_ends_where_the_next_begins() -> None:
    now = iter(range(0, 100, 10))
    times = PhaseTimes(lambda: float(next(now)))
    for phase in ("weights", "weights", "engine", "weights"):
        times.begin(phase)
    times.end()
    assert times.seconds == {"weights": 20.0, "engine": 10.0}
    assert str(times) == "weights 20.0 s, engine 10.0 s"


def test_an_error_of_ours_passes_as_it_is(toy: Toy) -> None:
    error = ConfigError("mine", param="pipeline")
    _break(toy, "stage 'thinker'", error)
    with pytest.raises(ConfigError) as caught:
        build.build_parts(toy.args(), progress=False, registry=toy.registry)
    assert caught.value is error


def _break(toy: Toy, place: str, error: Exception) -> None:
    if place == "the processor":
        object.__setattr__(toy.registry.family("toy"), "processor", Breaking(error))
    else:
        toy.components["toy.thinker"] = Breaking(error)  # type: ignore[assignment]


def test_auto_prefers_cuda_and_never_takes_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.resolve_device("auto").type == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert devices.resolve_device("auto").type == "cpu"
    assert devices.resolve_device("mps").type == "mps"


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert devices.resolve_device("cuda:0").index == 0
    with pytest.raises(ConfigError, match="1 CUDA devices are usable"):
        devices.resolve_device("cuda:1")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="mps"):
        devices.resolve_device("mps")


def test_auto_dtype_is_what_the_device_is_good_at() -> None:
    assert devices.resolve_dtype("auto", torch.device("cpu")) is torch.float32
    assert devices.resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert devices.resolve_dtype("bfloat16", torch.device("cpu")) is torch.bfloat16


@pytest.mark.parametrize(
    ("group", "deployment", "threads"),
    [
        ({"replicas": 2}, {}, 3),
        ({"replicas": 16}, {}, 1),
        ({"replicas": 1}, {}, None),
        ({"replicas": 2, "torch_threads": 5}, {"torch_threads": 4}, 5),
        ({"replicas": 2}, {"torch_threads": 4}, 4),
        ({"replicas": 2, "kind": "ray"}, {}, None),
    ],
)
def test_replicas_share_the_cores_unless_their_threads_are_configured(
    monkeypatch: pytest.MonkeyPatch, group: dict[str, object], deployment: dict[str, object], threads: int | None
) -> None:
    monkeypatch.setattr(build, "usable_cores", lambda: 6)
    configured = GroupConfig.model_validate({"stages": ["voice"], **group})
    assert build._torch_threads(configured, DeploymentConfig.model_validate(deployment)) == threads
