"""Deprecated path: see `omnistage.server.moderation.filters`."""

from omnistage.core.deprecation import forward_names

__getattr__ = forward_names(__name__, "omnistage.server.moderation.filters")
