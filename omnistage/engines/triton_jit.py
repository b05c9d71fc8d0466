"""`triton.jit` for kernels that are defined where Triton may not be installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection
from typing import Any

HAS_TRITON = importlib.util.find_spec("triton") is not None


def jit(*, counts: Collection[str] = (), metadata: Collection[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that compiles a kernel with Triton, or leaves it as it is without.

    Arguments named in `counts` and `metadata` never lead to another compilation, which a graph capture would not
    survive: not by their value, and not by their alignment.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        if not HAS_TRITON:
            return function
        import triton

        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        return triton.jit(
            function,
            do_not_specialize=[name for name in names if name in counts],
            do_not_specialize_on_alignment=[name for name in names if name in metadata],
        )

    return decorate
