"""Stable Diffusion 3 and 3.5: pictures from text, and from pictures."""
