"""Deprecated path: see `omnistage.server.moderation.filters`."""

from omnistage.core.deprecation import moved

__getattr__ = moved(__name__, "omnistage.server.moderation.filters")
