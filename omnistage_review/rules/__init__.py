"""All rules. Importing this package registers them."""

from omnistage_review.rules import (
    caches,
    change,
    concurrency,
    diffusion,
    errors,
    interfaces,
    memory,
    multimodal,
    precision,
    security,
    tensors,
    tests,
)

__all__ = [
    "caches",
    "change",
    "concurrency",
    "diffusion",
    "errors",
    "interfaces",
    "memory",
    "multimodal",
    "precision",
    "security",
    "tensors",
    "tests",
]
