"""Quantisation schemes, one class each in `schemes`; `packed` and `numbers` are what they compute with and store.

Which layers of a model they change is in `engines/quantisation`.
"""
