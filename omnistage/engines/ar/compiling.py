"""`torch.compile` of a decoder's layers."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

MIN_SIZE = 2
"""Captured batches of one are padded to it: one token is compiled for itself, which would double a start's time."""
_VARIANTS = 64
"""Compiled variants that may lie side by side: all layers, of all stages, are compiled under one code object."""

_MIN_BYTES = 1 << 29
"""Weights of a decoder from which on compiled steps are worth a start that is some seconds longer."""


def worth_compiling(decoder: nn.Module) -> bool:
    """Whether a decoder is compiled where nobody says: a large one on CUDA."""
    weights = list(decoder.parameters())
    return all(weight.is_cuda for weight in weights) and sum(weight.nbytes for weight in weights) >= _MIN_BYTES


def compile_layers(decoder: nn.Module) -> None:
    """Compile each layer when it first runs: once for all of the same shapes, for any number of tokens.

    Compiled code is kept in the user's cache, so that the next start finds it.

    torch gives up on a code object after 8 variants by default and runs it uncompiled. A thinker and a talker together
    have more: other widths, one token or many.
    """
    # torch's own default is in /tmp, which does not outlive a machine's or a container's start.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omnistage" / "compiled"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _VARIANTS)
    for layer in decoder.layers:  # type: ignore[union-attr]
        layer.compile(dynamic=True)
