"""Stages whose weights are quantised while they are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from omnistage.config import ARStageConfig, DeploymentConfig, DiffusionStageConfig, StageConfig
from omnistage.core.checkpoint import Checkpoint
from omnistage.core.errors import ConfigError
from omnistage.core.family import ComponentFactory, LoadContext
from omnistage.core.registry import Registry
from omnistage.core.stage import Stage
from omnistage.placement.devices import place

if TYPE_CHECKING:
    from omnistage.engines.quantisation.transform import Quantiser


def make_quantiser(
    model: Checkpoint, name: str, stage_cfg: StageConfig, deployment: DeploymentConfig, registry: Registry
) -> Quantiser | None:
    """What quantises a stage while it is loaded; raises where its device cannot run the scheme."""
    if not isinstance(stage_cfg, ARStageConfig | DiffusionStageConfig) or stage_cfg.quantize is None:
        return None
    if model.hf_config.get("quantization_config") is not None:
        raise ConfigError("the weights of this model are quantised already; leave quantize out", param="quantize")
    stage_cfg.quantize.method.check(*place(name, stage_cfg, deployment), f"{name}.quantize")
    return _quantiser(model, stage_cfg, registry)


def load_quantised(
    context: LoadContext, factory: ComponentFactory, registry: Registry, quantiser: Quantiser | None
) -> object:
    """A stage's component, with quantised weights where its configuration says so."""
    stage_cfg = context.stage
    if not isinstance(stage_cfg, ARStageConfig | DiffusionStageConfig) or stage_cfg.quantize is None:
        return factory(context)
    from omnistage.engines.quantisation.transform import quantising

    if quantiser is None:
        stage_cfg.quantize.method.check(context.device, context.dtype, f"{context.stage_name}.quantize")
        quantiser = _quantiser(context.model, stage_cfg, registry)
    quantiser.layers.clear()
    if context.device.type == "cpu":
        component = factory(context)
        quantiser.apply_to(component, context.device)
    else:
        with quantising(quantiser):
            component = factory(context)
    quantiser.check(context.stage_name)
    return component


def check_quantised(
    quantisers: Sequence[Quantiser | None], stages: Mapping[str, Stage], deployment: DeploymentConfig
) -> None:
    """Close the stages and raise where some should be quantised and nothing was in any.

    Stages in other processes are not seen from here.
    """
    active = [quantiser for quantiser in quantisers if quantiser is not None]
    if not active or deployment.placement or any(quantiser.layers for quantiser in active):
        return
    for stage in stages.values():
        stage.close()
    raise ConfigError(
        f"{active[0].config.scheme} would quantise nothing in this model; leave quantize out", param="quantize"
    )


def _quantiser(model: Checkpoint, stage_cfg: ARStageConfig | DiffusionStageConfig, registry: Registry) -> Quantiser:
    from omnistage.engines.quantisation.transform import Quantiser

    if stage_cfg.quantize is None:
        raise ConfigError("this stage is not quantised", param="quantize")
    keep = registry.family(model.family).full_precision
    if isinstance(stage_cfg, DiffusionStageConfig):
        return Quantiser(stage_cfg.quantize, diffusion=True, full_precision=keep)
    return Quantiser(
        stage_cfg.quantize, diffusion=False, full_precision=keep, merge=stage_cfg.budget.merge_linears is not False
    )
