"""What adapters take of a device, for the memory plan: an upper bound, from the configuration alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from omnistage.engines.adapters.files import CONFIG
from omnistage.engines.adapters.library import DEFAULT_RANK

_UNKNOWN_RANK = 64
"""Of an adapter whose folder does not say: diffusers' say it by their tensors."""


def adapter_bytes(networks: Iterable[nn.Module], slots: int, rank: int, item_size: int) -> int:
    """Matrices of all slots on every linear layer."""
    linears = [layer for network in networks for layer in network.modules() if isinstance(layer, nn.Linear)]
    return sum(layer.in_features + layer.out_features for layer in linears) * slots * rank * item_size


def largest_rank(folders: Iterable[Path]) -> int:
    """Of these adapters; loading them says what is wrong with one."""
    return max((_rank(folder) for folder in folders), default=DEFAULT_RANK)


def _rank(folder: Path) -> int:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return max(int(rank) for rank in (config.get("r", 8), *(config.get("rank_pattern") or {}).values()))
    except (OSError, ValueError, TypeError, AttributeError):
        return _UNKNOWN_RANK
