"""Deprecated path: see `omnistage.core` and `omnistage.pipeline.outputs`."""

from omnistage.core.deprecation import moved

__getattr__ = moved(
    __name__, "omnistage.core.types", "omnistage.core.params", "omnistage.core.validation", "omnistage.pipeline.outputs"
)
