"""Plain decoder-only language models."""
