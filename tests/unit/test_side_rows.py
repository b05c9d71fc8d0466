"""Side rows of a sequence: views of the upstream's memory at first, copies of its own before they are many."""

from __future__ import annotations

import pytest
import torch

from omnistage.core.errors import InternalError
from omnistage.core.types import ARInput
from omnistage.engines.ar import rows as module
from omnistage.engines.ar.rows import SequenceRows


def opened() -> SequenceRows:
    payload = ARInput((1, 2), streaming=True)
    return SequenceRows.open("a", payload, 8, False, torch.device("cpu"), torch.float32)


def test_a_row_serves_the_token_of_its_place_and_the_last_one_all_further() -> None:
    rows = opened()
    values = torch.arange(12.0).view(6, 2)
    rows.feed(values[:1], final=False)
    rows.feed(values[1:5], final=False)
    assert [rows.side_row(2 + i)[0].item() for i in range(5)] == [0, 2, 4, 6, 8]
    with pytest.raises(InternalError):
        rows.side_row(7)
    rows.feed(values[5:], final=True)
    assert [rows.side_row(2 + i)[0].item() for i in (5, 6, 99)] == [10, 10, 10]


def test_the_upstreams_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_BORROWED", 3)
    rows, steps = opened(), torch.arange(10.0).view(10, 1, 1).repeat(1, 4, 2)
    for i, step in enumerate(steps):
        step = step.clone()
        may_borrow = rows.may_borrow(step[:1])
        rows.feed(step[:1], final=False)
        if not may_borrow:
            assert i % 4 == 3
            rows.own_side_rows()
    assert [rows.side_row(2 + i)[1].item() for i in range(10)] == list(range(10))
    assert {row.untyped_storage().data_ptr() for row in rows.side[:4]} == {rows.side[0].untyped_storage().data_ptr()}
    assert rows.side[0].untyped_storage().data_ptr() != rows.side[4].untyped_storage().data_ptr()


def test_a_large_tensor_is_not_held_for_the_sake_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    step = torch.zeros(100, 2)
    monkeypatch.setattr(module, "_MAX_BORROWED_BYTES", step.nbytes)
    assert opened().may_borrow(step[:1])
    monkeypatch.setattr(module, "_MAX_BORROWED_BYTES", step.nbytes - 1)
    assert not opened().may_borrow(step[:1])
    opened().own_side_rows()  # nothing to copy is no error
