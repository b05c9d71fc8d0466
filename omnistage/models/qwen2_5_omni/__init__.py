"""Qwen2.5-Omni: a thinker, a talker and a streaming vocoder."""
