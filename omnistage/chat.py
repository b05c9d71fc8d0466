"""Deprecated path: see `omnistage.core.messages` and `omnistage.pipeline.messages.chat`."""

from omnistage.core.deprecation import moved

__getattr__ = moved(__name__, "omnistage.core.messages", "omnistage.pipeline.messages.chat")
