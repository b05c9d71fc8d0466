"""Rules for failures inside a stage: what is caught, what is logged, what the request is told, and who else is affected
(nobody).

A boundary around a stage, a component, a bridge or a sink catches `BaseException`, and calls `log_defect` or
`stage_failure` first. `Exception` is not enough: a Rust extension panics with a `PanicException`, a library may call
`sys.exit`, and a thread that either of them ends would never give its waiters a result. One rule is in `log_defect`:
Ctrl-C, which only ever reaches the main thread, is raised again there.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from omnistage.core.errors import InternalError, OmniError, StageError

_log = logging.getLogger(__name__)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


_LOST_DEVICE = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "device-side assert",
    "unspecified launch failure",
    "launch timed out",
    "hardware stack error",
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "context is destroyed",
)
"""What CUDA says in an error after which no call of this process succeeds on the device."""


def log_defect(where: str, error: BaseException) -> None:
    """Log an unexpected error by its type and frames. Its message may quote user content, so it is left out.

    Raises Ctrl-C again: code that drives stages in the main thread (a test, a notebook) is to be stopped.
    """
    raise_interrupt(error)
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error("%s failed with %s\n%s", where, type(error).__name__, frames)


def internal_error(what: str, error: BaseException) -> InternalError:
    """Log an unexpected error; what a request is told of it, which is its kind alone."""
    log_defect(what, error)
    failure = InternalError(f"{what} failed with {type(error).__name__}")
    failure.__cause__ = error
    return failure


def raise_interrupt(error: BaseException) -> None:
    """Raise Ctrl-C again, where it was caught in the main thread."""
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error


def loses_device(error: BaseException) -> bool:
    """Whether an error, or what caused it, says that a CUDA device cannot be used by this process any more."""
    visited: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in visited:
        # torch.AcceleratorError, which is a RuntimeError; torch is not imported here.
        if isinstance(cause, RuntimeError) and (text := str(cause)).startswith("CUDA error"):
            # Behind the first line torch gives advice, which names device-side assertions whatever has happened.
            return any(words in text.partition("\n")[0] for words in _LOST_DEVICE)
        visited.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was too little memory, of the host or of a device."""
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    # On a GPU torch.OutOfMemoryError, on the CPU torch has no type for it; torch is not imported here.
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


def kind_of(error: BaseException) -> str:
    """What a request is told of an unexpected error: its message may quote what another has sent."""
    if is_out_of_memory(error):
        return "too little memory; lower the stage's budget or send less at once"
    return type(error).__name__


def stage_failure(error: BaseException, failed: str) -> OmniError:
    """What a request that failed in a stage is told: our own errors as they are, any other by its kind alone.

    `failed` is what did not work, for the user and for the log.
    """
    if isinstance(error, OmniError):
        return error
    log_defect(failed, error)
    failure = StageError(f"{failed} failed: {kind_of(error)}")
    failure.__cause__ = error
    return failure


def isolate(
    batch: Sequence[_Item], run: Callable[[Sequence[_Item]], Sequence[_Result]], failed: str
) -> list[tuple[_Item, _Result | OmniError]]:
    """Run a batch; where that fails, each item by itself, so that only those at fault fail.

    Gives every item with its result or, if it failed by itself, with what its request is told (`stage_failure`).
    `run` must give one result an item, and must not have counted anything when it raises: it is called again.
    """
    if not batch:
        return []
    try:
        results = run(batch)
        if len(results) != len(batch):
            raise StageError(f"{failed} gave {len(results)} results for {len(batch)} inputs")
        return list(zip(batch, results, strict=True))
    except BaseException as error:  # the boundary of a step: whatever a component raises ends at most this batch
        raise_interrupt(error)
        if len(batch) == 1:
            return [(batch[0], stage_failure(error, failed))]
        _log.warning("a batch of %d failed (%s); running each item by itself", len(batch), type(error).__name__)
    return [pair for item in batch for pair in isolate([item], run, failed)]
