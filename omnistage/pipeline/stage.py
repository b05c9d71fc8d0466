"""Deprecated path: see `omnistage.core.stage`."""

from omnistage.core.deprecation import moved

__getattr__ = moved(__name__, "omnistage.core.stage")
