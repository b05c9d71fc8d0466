"""From a resolved configuration to running parts: where each stage runs, its component, its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from omnistage.config import (
    ARStageConfig,
    CodecStageConfig,
    DeploymentConfig,
    DiffusionStageConfig,
    LimitsConfig,
    OmniEngineArgs,
    OmniModelConfig,
    StageConfig,
    resolve,
)
from omnistage.core.errors import CapacityError, CheckpointError, ConfigError, OmniError, RegistryError
from omnistage.core.failures import raise_interrupt
from omnistage.core.family import AnyProcessor, Bridge, LoadContext
from omnistage.core.graph import PipelineGraph
from omnistage.core.params import StageParams
from omnistage.core.registry import Registry
from omnistage.core.stage import Stage
from omnistage.core.types import DTypeName
from omnistage.models.registry import REGISTRY
from omnistage.pipeline.supervision import Rebuild

if TYPE_CHECKING:
    import torch

_LONGEST_REASON = 200

Report = Callable[[str, float], None]
"""Called with what is being loaded and the share of it that is done."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """All that a front door needs to run a model."""

    graph: PipelineGraph
    stages: Mapping[str, Stage]
    bridges: Mapping[str, Bridge]
    defaults: Mapping[str, StageParams]
    processor: AnyProcessor
    deployment: DeploymentConfig
    limits: LimitsConfig
    model: str = ""
    """Its name, as pictures carry it."""
    rebuilds: Mapping[str, Rebuild] = field(default_factory=dict)
    """For each stage what builds it anew after it has failed."""


def build_parts(args: OmniEngineArgs, *, progress: bool = True, registry: Registry = REGISTRY) -> EngineParts:
    """Resolve the configuration and load every stage; stages that were loaded are closed if a later one fails."""
    resolved = resolve(args, registry=registry)
    config, graph = resolved.config, resolved.graph
    if config.deployment.torch_threads is not None:
        import torch

        torch.set_num_threads(config.deployment.torch_threads)
    names = {name: graph.bridge(name) for name in graph.order}
    bridges = {name: registry.bridge(bridge) for name, bridge in names.items() if bridge is not None}
    family = registry.family(resolved.model.family)
    with _reading(resolved.model.folder, "the processor"):
        processor = family.processor(resolved.model)
    factories = {
        name: StageFactory(resolved.model, name, config.pipeline.stages[name], config.deployment, registry)
        for name in graph.order
    }
    return EngineParts(
        graph,
        _build_stages(factories, progress),
        bridges,
        {name: stage.params for name, stage in config.pipeline.stages.items()},
        processor,
        config.deployment,
        config.limits,
        resolved.model.name,
        {name: factory.rebuild for name, factory in factories.items()},
    )


def _build_stages(factories: Mapping[str, StageFactory], progress: bool) -> dict[str, Stage]:
    stages: dict[str, Stage] = {}
    console = Console(stderr=True)
    hidden = not (progress and console.is_terminal)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[doing]}"), TimeElapsedColumn())
    with ExitStack() as undo, Progress(*columns, console=console, disable=hidden) as bar:
        for name, factory in factories.items():
            task = bar.add_task(f"loading {name}", total=1.0, doing="")

            def report(doing: str, done: float, task: object = task) -> None:
                bar.update(task, completed=done, doing=doing)  # type: ignore[arg-type]

            stage = factory.build(report)
            undo.callback(stage.close)
            stages[name] = stage
            report("", 1.0)
        undo.pop_all()
    return stages


class StageFactory:
    """Builds one stage of a model, and builds it anew after it has failed."""

    def __init__(
        self,
        model: OmniModelConfig,
        name: str,
        stage_cfg: StageConfig,
        deployment: DeploymentConfig,
        registry: Registry,
    ) -> None:
        self._registry = registry
        self._component: object | None = None
        """Kept where a new stage can run it again: stages of the other engines close theirs."""
        self._keeps_component = isinstance(stage_cfg, ARStageConfig)
        self._build = partial(build_stage, model, name, stage_cfg, deployment, load=self._load)

    def build(self, progress: Report | None = None) -> Stage:
        return self._build(progress)

    def rebuild(self, attempts: int) -> Stage:
        """The first attempt uses the component that is loaded; the next load the checkpoint again."""
        import torch

        if attempts > 0:
            self._component = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()  # what the failed stage held: the new one plans with what is free
        return self._build()

    def _load(self, context: LoadContext) -> object:
        component = self._component
        if component is None:
            component = load_component(context, registry=self._registry)
            self._component = component if self._keeps_component else None
        return component


def build_stage(
    model: OmniModelConfig,
    name: str,
    stage_cfg: StageConfig,
    deployment: DeploymentConfig,
    progress: Report | None = None,
    *,
    registry: Registry = REGISTRY,
    load: Callable[[LoadContext], object] | None = None,
) -> Stage:
    """Load a stage's component where the configuration says and put it on its engine."""
    load = load or partial(load_component, registry=registry)
    device = resolve_device(stage_cfg.device or deployment.device, param=f"pipeline.stages.{name}.device")
    dtype = resolve_dtype(stage_cfg.dtype or deployment.dtype, device)
    context = LoadContext(
        model, name, stage_cfg, device, dtype, progress, deployment.torch_threads, requested_dtype=deployment.dtype
    )
    if device.type != "cpu":
        return _engine_stage(name, stage_cfg, load(context))
    from omnistage.engines.threads import set_single_threaded, set_threads, single_threaded

    with single_threaded() as threads:  # loading a model leaves no idle OpenMP team behind
        stage = _engine_stage(name, stage_cfg, load(context))
    if stage.uses_torch:
        stage.cpu_threads = threads
        stage.enter_thread = partial(set_threads, threads)
    else:
        stage.enter_thread = set_single_threaded
    return stage


def _engine_stage(name: str, stage_cfg: StageConfig, component: object) -> Stage:
    """A component on its engine."""
    if isinstance(stage_cfg, ARStageConfig):
        from omnistage.engines.ar.component import ARComponent
        from omnistage.engines.ar.stage import ARStage

        if not isinstance(component, ARComponent):
            raise _wrong_component(name, stage_cfg, component)
        return ARStage(name, component, stage_cfg.budget)
    if isinstance(stage_cfg, CodecStageConfig):
        from omnistage.engines.codec.component import CodecComponent
        from omnistage.engines.codec.module import ModuleComponent, ModuleStage
        from omnistage.engines.codec.stage import CodecStage

        if isinstance(component, ModuleComponent):
            return ModuleStage(name, component, stage_cfg.budget)
        if not isinstance(component, CodecComponent):
            raise _wrong_component(name, stage_cfg, component)
        return CodecStage(name, component, stage_cfg.budget)
    return _diffusion_stage(name, stage_cfg, component)


def _diffusion_stage(name: str, stage_cfg: DiffusionStageConfig, component: object) -> Stage:
    """The stage that a component of the diffusion engine is made for."""
    from omnistage.engines.diffusion.component import Denoiser, LatentDecoder, PromptEncoder
    from omnistage.engines.diffusion.decode import DecodeStage
    from omnistage.engines.diffusion.encode import EncodeStage
    from omnistage.engines.diffusion.stage import DenoiseStage

    if isinstance(component, PromptEncoder):
        return EncodeStage(name, component, stage_cfg.budget)
    if isinstance(component, Denoiser):
        return DenoiseStage(name, component, stage_cfg.budget)
    if isinstance(component, LatentDecoder):
        return DecodeStage(name, component, stage_cfg.budget)
    from omnistage.engines.diffusion.whole import WholePipeline, WholeStage

    if isinstance(component, WholePipeline):
        return WholeStage(name, component, stage_cfg.budget)
    raise _wrong_component(name, stage_cfg, component)


def load_component(context: LoadContext, *, registry: Registry = REGISTRY) -> object:
    """A stage's component from its checkpoint; whatever goes wrong in there comes out as an `OmniError`."""
    factory = registry.component(context.stage.component)
    with _reading(context.model.folder, f"stage {context.stage_name!r}"):
        return factory(context)


@contextmanager
def _reading(folder: Path, what: str) -> Iterator[None]:
    """The boundary around a checkpoint: the one broad handler of loading.

    A broken or hostile file can make `transformers`, `tokenizers` and `torch` raise anything at all, so what is not
    ours already is the folder's fault until shown otherwise; the cause stays chained.
    """
    try:
        yield
    except OmniError:
        raise
    except BaseException as error:  # a Rust extension panics over a file with no `Exception`
        raise_interrupt(error)
        if _is_out_of_memory(error):
            raise CapacityError(
                f"there is not enough memory to load {what} from {folder}; use a smaller model or dtype, or another "
                f"device for this stage ({_shortened(error)})"
            ) from error
        raise CheckpointError(
            f"{what} cannot be loaded from {folder}; the checkpoint is damaged or not supported "
            f"({type(error).__name__}: {_shortened(error)})"
        ) from error


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # On the CPU torch has no type for it.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _shortened(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."


def _wrong_component(name: str, stage_cfg: StageConfig, component: object) -> RegistryError:
    return RegistryError(
        f"component {stage_cfg.component!r} is a {type(component).__name__}, which the {stage_cfg.engine} engine "
        "cannot run; use another component or engine",
        param=f"pipeline.stages.{name}.component",
    )


def resolve_device(name: str, *, param: str = "deployment.device") -> torch.device:
    """`auto` is CUDA where there is one, else the CPU. MPS must be asked for by name."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        usable = torch.cuda.device_count()
        raise ConfigError(f"{name} was asked for, but {usable} CUDA devices are usable; use cpu or auto", param=param)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("mps was asked for, but it is not available here; use cpu or auto", param=param)
    return device


def resolve_dtype(name: DTypeName, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and float32 elsewhere."""
    import torch

    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]
