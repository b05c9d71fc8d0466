"""Copies of networks that share their weights and differ in some modules."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TypeVar

from torch import nn

_M = TypeVar("_M", bound=nn.Module)


def shared_copy(module: _M, swaps: Mapping[nn.Module, nn.Module]) -> _M:
    """A copy of the module tree with other submodules in some places; it shares every parameter and buffer.

    `deepcopy` takes what its memo already holds, so the original stays untouched and nothing private is used.
    """
    memo: dict[int, object] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    memo.update({id(old): new for old, new in swaps.items()})
    return copy.deepcopy(module, memo)
