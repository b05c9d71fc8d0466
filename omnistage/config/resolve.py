"""Builds the checked configuration of a model: family defaults < configuration file < options < `--set`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Self

from pydantic import Field, ValidationError

from omnistage.config.adapters import with_adapter_stages
from omnistage.config.checkpoint import OmniModelConfig, detect_family, find_model, read_model_config
from omnistage.config.emit import emit_yaml, value_paths
from omnistage.config.graph import check_names, check_placement, graph_of
from omnistage.config.layers import Layers
from omnistage.config.located import DEFAULT, LocatedConfigError, Source, Sources, dotted, nearest_source
from omnistage.config.problems import to_config_error
from omnistage.config.quantize import RECIPE_FILE, SchemeName
from omnistage.config.scalars import ConfigModel, DeviceName, Size, format_size
from omnistage.config.schema import OmniConfig
from omnistage.config.yamlio import load_file
from omnistage.core.checkpoint import read_json
from omnistage.core.errors import CheckpointError, ConfigError
from omnistage.core.family import Family
from omnistage.core.graph import PipelineGraph
from omnistage.core.registry import Registry
from omnistage.core.types import DTypeName
from omnistage.core.validation import first_problem, short_repr


class OmniEngineArgs(ConfigModel):
    """Arguments that start an engine."""

    model: str = Field(min_length=1, description="A folder, or a name in the local hub cache.")
    config: Path | None = Field(default=None, description="A YAML file laid over the family's defaults.")
    overrides: tuple[str, ...] = Field(default=(), description="KEY=VALUE strings, as for --set.")
    device: DeviceName | None = Field(default=None, description="Short for deployment.device.")
    dtype: DTypeName | None = Field(default=None, description="Short for deployment.dtype.")
    gpu_memory: Size | None = Field(default=None, description="Short for deployment.gpu_memory.")
    quantize: SchemeName | None = Field(
        default=None, description="Scheme of quantised weights, for all stages that it suits."
    )
    ray: str | None = Field(
        default=None,
        min_length=1,
        description="Ray cluster, auto or an address, for the groups of deployment.placement, or for all stages.",
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a model on the hub.")
    cache_dir: Path | None = Field(default=None, description="Hub cache; null: the hub's default.")
    adapters: tuple[str, ...] = Field(default=(), description="NAME=FOLDER strings, for deployment.adapters.")
    adapter_folders: tuple[str, ...] = Field(default=(), description="Added to deployment.adapter_folders.")
    allow_download: bool = Field(default=False, description="Fetch the model from the hub if it is not here.")

    @classmethod
    def parse(cls, values: Mapping[str, object]) -> Self:
        """Build from untrusted values, turning pydantic's error into a `ConfigError`."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            unknown = f"unknown argument; known: {', '.join(cls.model_fields)}"
            problem = first_problem(error, words={"extra_forbidden": unknown})
            raise ConfigError(problem.message, param=dotted(tuple(map(str, problem.path))) or None) from error


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A valid configuration with the source of each value."""

    config: OmniConfig
    graph: PipelineGraph
    model: OmniModelConfig
    provenance: Mapping[str, Source]
    """Source of every value by its dotted path, in the order of `to_yaml`."""

    def restricted(self, stages: Iterable[str]) -> ResolvedConfig:
        """The part of it that one process builds: only these stages, in graph order, and the graph's own edges."""
        order = tuple(stages)
        if order == self.graph.order:
            return self
        pipeline = self.config.pipeline
        pipeline = pipeline.model_copy(update={"stages": {name: pipeline.stages[name] for name in order}})
        return replace(
            self,
            config=self.config.model_copy(update={"pipeline": pipeline}),
            graph=replace(self.graph, order=order),
        )


def resolve(args: OmniEngineArgs, *, registry: Registry, weights: bool = True) -> ResolvedConfig:
    """Find the model, merge the layers, validate the result. Without `weights` its small files suffice.

    Raises `CheckpointError` for the model and `ConfigError` for the configuration.
    """
    folder = find_model(
        args.model,
        registry,
        revision=args.revision,
        cache_dir=args.cache_dir,
        allow_download=args.allow_download,
        weights=weights,
    )
    hf_config = read_model_config(folder)
    family = detect_family(hf_config, registry)
    layers = _stack(args, family, hf_config, folder)
    config, graph = check(layers.data, layers.sources, registry)
    path = Path(args.model).expanduser()
    is_path = path.is_dir() or path.is_file()
    name = (folder.name if folder == path.resolve() else path.resolve().stem) if is_path else args.model
    return ResolvedConfig(
        config=config,
        graph=graph,
        model=OmniModelConfig(folder=folder, hf_config=hf_config, family=family.name, name=name, config=config),
        provenance=_provenance(config, layers.sources),
    )


def check(data: Mapping[str, object], sources: Sources, registry: Registry) -> tuple[OmniConfig, PipelineGraph]:
    """Validate merged data; every error carries the path and, by `sources`, the file and line."""
    try:
        config = OmniConfig.model_validate(data)
    except ValidationError as error:
        raise to_config_error(error, data, sources) from error
    try:
        graph = graph_of(config.pipeline, registry.text_bridges())
        check_names(config.pipeline, registry)
        check_placement(config.deployment.placement, config.pipeline.stages)
        config = with_adapter_stages(config, graph)
    except ConfigError as error:
        path = tuple((error.param or "").split("."))
        raise LocatedConfigError(error.message, param=error.param, where=nearest_source(path, sources)) from error
    return config, graph


def to_yaml(resolved: ResolvedConfig) -> str:
    """The whole configuration with the source of each value in a comment; usable as a `--config` file."""
    header = f"# Configuration of {resolved.model.name} (family {resolved.model.family})\n"
    return header + emit_yaml(_dump(resolved.config), resolved.provenance)


def _stack(args: OmniEngineArgs, family: Family, hf_config: Mapping[str, object], folder: Path) -> Layers:
    layers = Layers()
    pipeline = family.pipeline if family.pipeline_of is None else family.pipeline_of(hf_config)
    layers.add(load_file(pipeline, label=f"{family.name}/{pipeline.name}"))
    if (folder / RECIPE_FILE).is_file():
        _add_recipe(layers, folder)
    if args.config is not None:
        layers.add(load_file(args.config))
    memory = None if args.gpu_memory is None else format_size(args.gpu_memory)
    for name, value in (("device", args.device), ("dtype", args.dtype), ("gpu_memory", memory)):
        if value is not None:
            layers.set(("deployment", name), value, Source(f"--{name.replace('_', '-')}"))
    if args.quantize is not None:
        _quantise_all(layers, args.quantize)
    layers.apply_overrides(args.overrides)
    for text in args.adapters:
        name, _, path = text.partition("=")
        if not name or not path:
            raise ConfigError(f"--adapter takes NAME=FOLDER, not {text!r}", param="adapters")
        layers.set(("deployment", "adapters", name), {"folder": path}, Source("--adapter"))
    if args.adapter_folders:
        layers.set(("deployment", "adapter_folders"), list(args.adapter_folders), Source("--adapter-folder"))
    if args.ray is not None:
        _place_on_ray(layers, args.ray)
    return layers


def _add_recipe(layers: Layers, folder: Path) -> None:
    """What a quantised checkpoint says of its stages."""
    stages = read_json(folder / RECIPE_FILE).get("stages")
    if not isinstance(stages, dict):
        raise CheckpointError(f"{RECIPE_FILE} in {folder} names no stages; fetch the model again")
    for name, recipe in stages.items():
        if name not in layers.section("pipeline", "stages"):
            raise CheckpointError(f"{RECIPE_FILE} in {folder} names an unknown stage {short_repr(name)}")
        layers.set(("pipeline", "stages", name, "quantize"), recipe, Source(RECIPE_FILE))


def _quantise_all(layers: Layers, scheme: SchemeName) -> None:
    """The scheme for all stages that may have weights for it, unless the configuration says more of one."""
    for name, stage in layers.section("pipeline", "stages").items():
        if not isinstance(stage, dict) or stage.get("engine") not in ("autoregressive", "diffusion"):
            continue
        if stage.get("quantize") is None:
            value = {"scheme": scheme, "required": False}
            layers.set(("pipeline", "stages", name, "quantize"), value, Source("--quantize"))


def _place_on_ray(layers: Layers, address: str) -> None:
    """Groups that name no kind become actors of a cluster; where there is no group, all stages become one."""
    source = Source("--ray")
    layers.set(("deployment", "ray_address"), address, source)
    groups = layers.section("deployment", "placement")
    stages = layers.section("pipeline", "stages")
    remote = {name for name, stage in stages.items() if isinstance(stage, dict) and stage.get("engine") == "remote"}
    local = [name for name in stages if name not in remote]
    if not groups:
        layers.set(("deployment", "placement", "all"), {"stages": local, "kind": "ray"}, source)
    for name, group in groups.items():
        if isinstance(group, dict) and "kind" not in group:
            layers.set(("deployment", "placement", name, "kind"), "ray", source)


def _dump(config: OmniConfig) -> dict[str, object]:
    return config.model_dump(mode="json", by_alias=True)


def _provenance(config: OmniConfig, sources: Sources) -> Mapping[str, Source]:
    # Values without a source are defaults.
    return MappingProxyType({dotted(path): sources.get(path, DEFAULT) for path in value_paths(_dump(config))})
