"""Z-Image: pictures from text, and from pictures."""
