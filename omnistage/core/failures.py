"""Rules for failures inside a stage: what is logged, what the request is told, and who else is affected (nobody)."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from omnistage.core.errors import OmniError, StageError

_log = logging.getLogger(__name__)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def log_defect(where: str, error: BaseException) -> None:
    """Log an unexpected error by its type and frames. Its message may quote user content, so it is left out."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error("%s failed with %s\n%s", where, type(error).__name__, frames)


def stage_failure(error: BaseException, failed: str) -> OmniError:
    """What a request that failed in a stage is told: our own errors as they are, any other by its kind alone.

    `failed` is what did not work, for the user and for the log.
    """
    if isinstance(error, OmniError):
        return error
    log_defect(failed, error)
    failure = StageError(f"{failed} failed: {type(error).__name__}")
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
    except Exception as error:  # the boundary of a step: whatever a component raises ends at most this batch
        if len(batch) == 1:
            return [(batch[0], stage_failure(error, failed))]
        _log.warning("a batch of %d failed (%s); running each item by itself", len(batch), type(error).__name__)
    return [pair for item in batch for pair in isolate([item], run, failed)]
