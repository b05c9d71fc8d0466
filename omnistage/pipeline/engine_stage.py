"""Which stage of which engine runs a component."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.config import ARStageConfig, CodecStageConfig, DiffusionStageConfig, LocalStageConfig
from omnistage.core.errors import ConfigError, RegistryError
from omnistage.core.stage import Stage
from omnistage.core.types import Modality

if TYPE_CHECKING:
    from omnistage.engines.adapters.library import AdapterLibrary


def engine_stage(
    name: str, stage_cfg: LocalStageConfig, component: object, adapters: AdapterLibrary | None = None
) -> Stage:
    """A component on its engine."""
    if isinstance(stage_cfg, ARStageConfig):
        from omnistage.engines.ar.component import ARComponent
        from omnistage.engines.ar.stage import ARStage

        if not isinstance(component, ARComponent):
            raise _wrong_component(name, stage_cfg, component)
        return ARStage(name, component, stage_cfg.budget, adapters)
    if isinstance(stage_cfg, CodecStageConfig):
        from omnistage.engines.codec.component import CodecComponent
        from omnistage.engines.codec.module import ModuleComponent, ModuleStage
        from omnistage.engines.codec.stage import CodecStage

        if isinstance(component, ModuleComponent):
            return ModuleStage(name, component, stage_cfg.budget)
        if not isinstance(component, CodecComponent):
            raise _wrong_component(name, stage_cfg, component)
        if stage_cfg.output not in (None, Modality.AUDIO):
            raise ConfigError(
                f"component {stage_cfg.component!r} outputs audio, not {stage_cfg.output}; use audio, or null",
                param=f"pipeline.stages.{name}.output",
            )
        return CodecStage(name, component, stage_cfg.budget)
    return _diffusion_stage(name, stage_cfg, component, adapters)


def _diffusion_stage(
    name: str, stage_cfg: DiffusionStageConfig, component: object, adapters: AdapterLibrary | None
) -> Stage:
    """The stage that a component of the diffusion engine is made for."""
    from omnistage.engines.diffusion.component import Denoiser, LatentDecoder, PromptEncoder
    from omnistage.engines.diffusion.decode import DecodeStage
    from omnistage.engines.diffusion.encode import EncodeStage
    from omnistage.engines.diffusion.stage import DenoiseStage

    if adapters is not None and not isinstance(component, Denoiser):
        raise ConfigError(
            f"stage {name!r} runs a {type(component).__name__}, which does not support adapters; "
            "name the stage that denoises",
            param="deployment.adapter_stage",
        )
    if isinstance(component, PromptEncoder):
        return EncodeStage(name, component, stage_cfg.budget)
    if isinstance(component, Denoiser):
        return DenoiseStage(name, component, stage_cfg.budget, stage_cfg.params, adapters)
    if isinstance(component, LatentDecoder):
        return DecodeStage(name, component, stage_cfg.budget)
    from omnistage.engines.diffusion.whole_pipeline import WholePipeline, WholeStage

    if isinstance(component, WholePipeline):
        return WholeStage(name, component, stage_cfg.budget)
    raise _wrong_component(name, stage_cfg, component)


def _wrong_component(name: str, stage_cfg: LocalStageConfig, component: object) -> RegistryError:
    return RegistryError(
        f"component {stage_cfg.component!r} is a {type(component).__name__}, which the {stage_cfg.engine} engine "
        "cannot run; use another component or engine",
        param=f"pipeline.stages.{name}.component",
    )
