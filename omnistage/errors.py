"""Deprecated path: see `omnistage.core.errors`."""

from omnistage.core.deprecation import forward_names

__getattr__ = forward_names(__name__, "omnistage.core.errors")
