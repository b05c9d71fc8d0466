"""Omnistage: any-to-any models as pipelines of stages."""

__version__ = "0.1.0"
