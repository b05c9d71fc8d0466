"""Qwen3-Omni: text, images, audio and video in; text and speech out."""
