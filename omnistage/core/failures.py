"""Rules for failures inside a stage: what is logged, what the request is told, and who else is affected (nobody)."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from omnistage.core.errors import OmniError, StageError

_log = logging.getLogger(__name__)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def log_defect(where: str, error: BaseException) -> None:
    """Log an unexpected error by its type and frames. Its message may quote user content, so it is left out."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error("%s failed with %s\n%s", where, type(error).__name__, frames)


def stage_failure(error: BaseException, failed: str, *, doing: str | None = None) -> OmniError:
    """What a request that failed in a stage is told: our own errors as they are, any other by its kind alone.

    `failed` is what did not work, for the user; `doing` the same for the log.
    """
    if isinstance(error, OmniError):
        return error
    log_defect(doing or failed, error)
    failure = StageError(f"{failed} failed: {type(error).__name__}")
    failure.__cause__ = error
    return failure


def isolate(
    batch: Sequence[_Item], run: Callable[[Sequence[_Item]], Sequence[_Result]]
) -> Iterator[tuple[_Item, _Result | Exception]]:
    """Run a batch; where that fails, each item alone, so that only the one at fault fails.

    Yields every item with its result or with the exception that it raised alone. `run` must give one result an item,
    and must not have changed anything that a second run would count twice when it raises.
    """
    if not batch:
        return
    try:
        results = run(batch)
    except Exception as error:  # the boundary of a step: whatever a component raises ends at most this batch
        if len(batch) == 1:
            yield batch[0], error
            return
        _log.warning("a batch of %d failed (%s); running each item alone", len(batch), type(error).__name__)
    else:
        yield from zip(batch, results, strict=True)
        return
    for item in batch:
        try:
            yield item, run([item])[0]
        except Exception as error:  # the same boundary
            yield item, error
