"""A batch that fails is run item by item: only those at fault fail."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from omnistage.core.errors import InvalidRequestError, OmniError, StageError
from omnistage.core.failures import isolate

BAD = 13


class Component:
    """Doubles numbers; fails with every batch that holds a bad one. Counts what it has done."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error or RuntimeError("a secret of the user")
        self.batches: list[int] = []
        self.done = 0

    def run(self, batch: Sequence[int]) -> list[int]:
        self.batches.append(len(batch))
        if BAD in batch:
            raise self.error
        self.done += len(batch)
        return [2 * item for item in batch]


def test_a_batch_that_works_runs_once() -> None:
    component = Component()
    assert isolate([1, 2, 3], component.run, "doubling") == [(1, 2), (2, 4), (3, 6)]
    assert component.batches == [3]


def test_nothing_runs_for_an_empty_batch() -> None:
    component = Component()
    assert isolate([], component.run, "doubling") == []
    assert component.batches == []


def test_only_the_items_at_fault_fail_and_nothing_is_counted_twice() -> None:
    component = Component()
    results = isolate([1, BAD, 3, BAD], component.run, "doubling")
    assert [item for item, _ in results] == [1, BAD, 3, BAD]
    assert [isinstance(result, OmniError) for _, result in results] == [False, True, False, True]
    assert component.batches == [4, 1, 1, 1, 1]
    assert component.done == 2


def test_a_single_item_has_one_try() -> None:
    component = Component()
    ((_, failure),) = isolate([BAD], component.run, "doubling")
    assert component.batches == [1]
    assert isinstance(failure, StageError)
    assert str(failure) == "doubling failed: RuntimeError"  # the exception's message may quote what the user sent


def test_who_runs_out_of_memory_is_told_so() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(1 << 60, dtype=torch.uint8)
    for error in (of_torch.value, MemoryError(), torch.OutOfMemoryError("CUDA out of memory")):
        ((_, failure),) = isolate([BAD], Component(error).run, "doubling")
        assert str(failure) == "doubling failed: too little memory; lower the stage's budget or send less at once"


def test_our_own_errors_are_passed_on_as_they_are() -> None:
    error = InvalidRequestError("too dark", param="image")
    assert isolate([1, BAD], Component(error).run, "doubling") == [(1, 2), (BAD, error)]


def test_a_wrong_number_of_results_is_a_failure_of_those_items() -> None:
    results = isolate([1, 2], lambda batch: [0] * (3 - len(batch)), "doubling")
    assert [str(result) for _, result in results] == ["doubling gave 2 results for 1 inputs"] * 2


def test_what_ends_the_process_is_not_caught() -> None:
    def interrupted(batch: Sequence[int]) -> list[int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        isolate([1, 2], interrupted, "doubling")
