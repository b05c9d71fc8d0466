"""Whose turn it is among texts that a speech model cannot speak all at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from omnistage.core.params import CodecParams
from omnistage.core.types import TOKEN_IDS, AudioChunk, ModuleInput, RequestInfo
from omnistage.engines.codec.module import UNFINISHED, Job, JobResult
from omnistage.models.text_to_speech import synthesiser
from omnistage.models.text_to_speech.synthesiser import Synthesiser

BUDGET = 100


class Speaker(Synthesiser):
    """Takes a byte for each token, and one run for each token."""

    def __init__(self) -> None:
        self.layer = torch.nn.Identity()
        super().__init__(self.layer, torch.device("cpu"), 16_000)
        self.memory_budget = BUDGET

    def memory_of(self, tokens: int) -> int:
        return tokens

    def speak(self, inputs: dict[str, torch.Tensor], voice: str | None) -> torch.Tensor:
        for _ in range(inputs["input_ids"].shape[1]):
            self.layer(torch.zeros(1))
        return torch.zeros(8)


@pytest.fixture
def speaker(monkeypatch: pytest.MonkeyPatch) -> Speaker:
    monkeypatch.setattr(synthesiser, "_SLICE_SECONDS", 0.0)
    return Speaker()


def run(speaker: Speaker, name: str, tokens: int) -> JobResult:
    payload = ModuleInput({TOKEN_IDS: np.zeros(tokens, np.int64)})
    return speaker.run([Job(RequestInfo(name), CodecParams(seed=1), payload, 0)])[0]


def finish(speaker: Speaker, name: str, tokens: int) -> None:
    while run(speaker, name, tokens) is UNFINISHED:
        assert name in speaker._speeches
    assert name not in speaker._speeches


def test_short_texts_do_not_pass_a_long_one_that_waits_for_memory(speaker: Speaker) -> None:
    assert run(speaker, "first", 30) is UNFINISHED
    assert run(speaker, "long", 90) is UNFINISHED
    assert run(speaker, "short", 30) is UNFINISHED
    assert set(speaker._speeches) == {"first"}  # else there would always be one that the long one must wait for
    finish(speaker, "first", 30)
    assert run(speaker, "short", 30) is UNFINISHED
    assert run(speaker, "long", 90) is UNFINISHED
    assert set(speaker._speeches) == {"long"}
    finish(speaker, "long", 90)
    finish(speaker, "short", 30)


def test_a_long_text_that_is_given_up_while_it_waits_holds_nobody_back(speaker: Speaker) -> None:
    run(speaker, "first", 30)
    run(speaker, "long", 90)
    speaker.forget("long")
    assert run(speaker, "short", 30) is UNFINISHED
    assert set(speaker._speeches) == {"first", "short"}
    speaker.close()


def test_texts_that_fit_together_are_spoken_in_turns(speaker: Speaker) -> None:
    for name in ("first", "second", "third"):
        assert run(speaker, name, 30) is UNFINISHED
    assert set(speaker._speeches) == {"first", "second", "third"}
    for name in ("third", "first", "second"):
        finish(speaker, name, 30)
    assert isinstance(run(speaker, "last", 0), AudioChunk)
