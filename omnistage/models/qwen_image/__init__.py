"""Qwen-Image and Qwen-Image-Edit: pictures from text, and from pictures."""
