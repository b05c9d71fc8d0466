"""Shared set-up: torchvision's import is repaired before any test imports transformers."""

from omnistage.compat import prepare_torchvision

prepare_torchvision(required=False)
