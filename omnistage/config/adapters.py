"""Which stage each configured adapter is for."""

from __future__ import annotations

from omnistage.config.deployment import DeploymentConfig
from omnistage.config.schema import ARStageConfig, DiffusionStageConfig, OmniConfig, StageConfig
from omnistage.core.errors import ConfigError
from omnistage.core.graph import PipelineGraph, did_you_mean
from omnistage.core.validation import short_repr

FOLDERS = "deployment.adapter_folders"
"""The setting that a model without a stage for adapters refuses."""
_DENOISING = "denoise"
"""What families call the stage with the diffusion transformer."""


def with_adapter_stages(config: OmniConfig, graph: PipelineGraph) -> OmniConfig:
    """The configuration with the stage of every adapter. Raises for stages that take none."""
    deployment, stages = config.deployment, config.pipeline.stages
    if not deployment.adapters and not deployment.adapter_folders:
        return config
    default = deployment.adapter_stage
    if default is None:
        default = graph.lead if isinstance(stages[graph.lead], ARStageConfig) else _DENOISING
        if not deployment.adapters and not isinstance(stages.get(default), ARStageConfig | DiffusionStageConfig):
            raise ConfigError("this model has no stage that takes adapters; leave it out", param=FOLDERS)
    stage_of = {name: adapter.stage or default for name, adapter in deployment.adapters.items()}
    for name, stage in (*stage_of.items(), (None, default)):
        path = "deployment.adapter_stage" if name is None else f"deployment.adapters.{name}"
        if stage not in stages:
            raise ConfigError(f"there is no stage {short_repr(stage)}; {did_you_mean(stage, stages)}", param=path)
        _check_stage(stage, stages[stage], path)
    adapters = {
        name: adapter.model_copy(update={"stage": stage_of[name]}) for name, adapter in deployment.adapters.items()
    }
    update = {"adapters": adapters, "adapter_stage": default}
    return config.model_copy(update={"deployment": deployment.model_copy(update=update)})


def _check_stage(name: str, stage: StageConfig, path: str) -> None:
    if not isinstance(stage, ARStageConfig | DiffusionStageConfig):
        raise ConfigError(f"stage {name!r} is a {stage.engine} stage, which does not support adapters", param=path)
    if stage.ranks > 1:
        raise ConfigError(
            f"stage {name!r} runs on several ranks, where adapters are not divided yet; set "
            f"{'tensor' if isinstance(stage, ARStageConfig) else 'context'}_parallel: 1, or merge the adapter",
            param=path,
        )


def takes_adapters(deployment: DeploymentConfig, stage: str) -> bool:
    """Whether a stage gets layers for adapters."""
    stages = {adapter.stage for adapter in deployment.adapters.values()}
    return stage in stages or (bool(deployment.adapter_folders) and stage == deployment.adapter_stage)
