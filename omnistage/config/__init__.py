"""Configuration: typed schemas, the checked pipeline graph, and how layers become one configuration."""

from omnistage.config.checkpoint import OmniModelConfig, detect_family, find_model
from omnistage.config.deployment import DeploymentConfig, GroupConfig
from omnistage.config.located import LocatedConfigError, Source
from omnistage.config.remote import RemoteBudget, RemoteStageConfig
from omnistage.config.resolve import OmniEngineArgs, ResolvedConfig, resolve, to_yaml
from omnistage.config.scalars import Size, format_size, parse_size
from omnistage.config.schema import (
    ARBudget,
    ARStageConfig,
    CodecBudget,
    CodecStageConfig,
    DiffusionBudget,
    DiffusionStageConfig,
    EdgeConfig,
    LimitsConfig,
    LocalStageConfig,
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
    "GroupConfig",
    "LimitsConfig",
    "LocalStageConfig",
    "LocatedConfigError",
    "OmniConfig",
    "OmniEngineArgs",
    "OmniModelConfig",
    "PipelineConfig",
    "PipelineGraph",
    "RemoteBudget",
    "RemoteStageConfig",
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
