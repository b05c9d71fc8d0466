"""Configuration: typed schemas, the checked pipeline graph, and how layers become one configuration."""

from omnistage.config.checkpoint import OmniModelConfig, detect_family, find_model
from omnistage.config.located import LocatedConfigError, Source
from omnistage.config.resolve import OmniEngineArgs, ResolvedConfig, resolve, to_yaml
from omnistage.config.scalars import Size, format_size, parse_size
from omnistage.config.schema import (
    ARBudget,
    ARStageConfig,
    CodecBudget,
    CodecStageConfig,
    DeploymentConfig,
    DiffusionBudget,
    DiffusionStageConfig,
    EdgeConfig,
    LimitsConfig,
    OmniConfig,
    PipelineConfig,
    StageConfig,
)
from omnistage.core.graph import PipelineGraph

__all__ = [
    "ARBudget",
    "ARStageConfig",
    "CodecBudget",
    "CodecStageConfig",
    "DeploymentConfig",
    "DiffusionBudget",
    "DiffusionStageConfig",
    "EdgeConfig",
    "LimitsConfig",
    "LocatedConfigError",
    "OmniConfig",
    "OmniEngineArgs",
    "OmniModelConfig",
    "PipelineConfig",
    "PipelineGraph",
    "ResolvedConfig",
    "Size",
    "Source",
    "StageConfig",
    "detect_family",
    "find_model",
    "format_size",
    "parse_size",
    "resolve",
    "to_yaml",
]
