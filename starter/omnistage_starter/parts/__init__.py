"""Real weights that ordinary package registries carry: which they are, where they are kept, how they get there."""
