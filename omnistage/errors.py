"""Deprecated path: see `omnistage.core.errors`."""

from omnistage.core.deprecation import moved

__getattr__ = moved(__name__, "omnistage.core.errors")
