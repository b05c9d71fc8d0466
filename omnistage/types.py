"""Deprecated path: see `omnistage.core` and `omnistage.pipeline.outputs`."""

from omnistage.core.deprecation import forward_names

__getattr__ = forward_names(
    __name__, "omnistage.core.types", "omnistage.core.params", "omnistage.core.validation", "omnistage.pipeline.outputs"
)
