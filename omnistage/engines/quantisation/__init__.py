"""Quantised weights: `rules` choose the layers, `transform` exchanges them in a loaded model, `packed` is the CPU's."""
