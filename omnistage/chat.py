"""Deprecated path: see `omnistage.core.messages` and `omnistage.pipeline.messages.chat`."""

from omnistage.core.deprecation import forward_names

__getattr__ = forward_names(__name__, "omnistage.core.messages", "omnistage.pipeline.messages.chat")
