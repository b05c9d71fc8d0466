"""Calls that run a slice at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from omnistage.models.paused import PausedCall


def test_a_call_computes_on_the_cuda_stream_of_who_began_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread would be on the default one, and what it computes be read before it is there."""
    stages, current = SimpleNamespace(device=torch.device("cuda")), []
    cudnn: list[bool] = []

    @contextmanager
    def stream(one: object) -> Iterator[None]:
        current.append(one)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stages)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", cudnn.append)

    def compute(paused: PausedCall[list[object]]) -> list[object]:
        paused.pause()
        return list(current)

    call = PausedCall(compute, "test")
    assert not call.advance()
    assert call.advance()
    assert call.result == [stages]
    assert cudnn == [False], "cuDNN would prepare its attention for each length, in this thread anew"
