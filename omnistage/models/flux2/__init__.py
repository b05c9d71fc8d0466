"""FLUX.2 klein: pictures from text and from reference pictures."""
