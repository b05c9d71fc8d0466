"""`triton.jit` for kernels that are defined where Triton may not be installed."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any

logger = logging.getLogger(__name__)

HAS_TRITON = importlib.util.find_spec("triton") is not None


def _launch_errors() -> tuple[type[Exception], ...]:
    if not HAS_TRITON:
        return ()
    from triton.runtime.errors import OutOfResources

    return (OutOfResources,)


LAUNCH_ERRORS = _launch_errors()
"""Of a kernel that needs more shared memory or registers than the device has."""


@lru_cache
def has_c_compiler() -> bool:
    """Whether Triton, and with it torch.compile on CUDA, finds what it builds launchers with."""
    if os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"):
        return True
    logger.warning("no C compiler was found: Triton kernels and torch.compile are not used; install gcc or set CC")
    return False


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
