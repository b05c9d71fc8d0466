"""`torch.compile` of the layers that a network repeats."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from importlib import import_module

import torch
import torch.fx.experimental._config
from torch import nn

from omnistage.core.user_cache import cache_folder
from omnistage.engines.triton_jit import has_c_compiler

_importing = threading.Lock()
MIN_SIZE = 2
"""Captured batches of one are padded to it: one token is compiled for itself, which would double a start's time."""
_VARIANTS = 64
"""Compiled variants that may lie side by side: all layers, of all stages, are compiled under one code object."""
MIN_BYTES = 1 << 29
"""Weights of a network from which on compiled steps are worth a start that is some seconds longer."""


def worth_compiling(networks: Iterable[nn.Module]) -> bool:
    """Whether networks are compiled where nobody says: large ones on CUDA."""
    weights = [weight for network in networks for weight in network.parameters()]
    large = sum(weight.nbytes for weight in weights) >= MIN_BYTES
    return large and all(weight.is_cuda for weight in weights) and has_c_compiler()


def distinct_sizes() -> AbstractContextManager[object]:
    """What is compiled within takes each size of its inputs for itself.

    Otherwise those that happen to be equal when it is compiled must always be: as many patches as tokens of text.
    """
    patched: AbstractContextManager[object]
    patched = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    return patched


def keep_compiled_code() -> None:
    """Have compiled code kept in the user's cache, unless the environment says where."""
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    # torch's own default is in /tmp, which does not outlive a machine's or a container's start.
    cache = cache_folder("compiled")
    if cache is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)


def start_compile_workers() -> None:
    """Start the processes that compile kernels. They take seconds; until then kernels are compiled one by one."""
    with _importing:
        from torch._inductor.async_compile import maybe_warm_pool

    keep_compiled_code()  # they take the environment with them
    maybe_warm_pool()


def import_compiler() -> None:
    """Import what compiles, in one thread at a time: its modules import each other, and another would see halves."""
    with _importing:
        import_module("torch._inductor.compile_fx")
        with suppress(ImportError, AttributeError):  # what the first compilation imports, as far as torch has it
            import_module("torch._dynamo.repro.after_dynamo")
            import_module("torch._inductor.codegen.common").init_backend_registration()


def prepare_compiler() -> threading.Thread:
    """Import what compiles, and start its processes, in a thread: reading weights leaves the interpreter to it.

    Compilation in other threads waits for it, and raises the error that is ignored here.
    """
    thread = threading.Thread(target=_prepare, name="compiler-imports", daemon=True)
    thread.start()
    return thread


def _prepare() -> None:
    try:
        start_compile_workers()
        threading.Thread(target=_hash_triton, name="triton-key", daemon=True).start()
        import_compiler()
    except Exception:  # a boundary: an import can raise anything, and does so again where it is needed
        return


def _hash_triton() -> None:
    """Compute the key of Triton's cache: a hash over a library of 500 MB, which leaves the interpreter to others."""
    with suppress(ImportError, OSError):
        from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key

        if HAS_TRITON:
            triton_key()


def compile_layers(layers: Iterable[nn.Module], *, backend: str = "inductor") -> None:
    """Compile each layer when it first runs: once for all of the same shapes, for any number of tokens.

    Compiled code is kept in the user's cache, so that the next start finds it.

    torch gives up on a code object after 8 variants by default and runs it uncompiled. A thinker and a talker together
    have more: other widths, one token or many.
    """
    keep_compiled_code()
    if backend == "inductor":
        import_compiler()  # or another thread may be in the middle of it when the first layer runs
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _VARIANTS)
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)
