"""Wan 2.1 and 2.2: videos from text, and from pictures."""
