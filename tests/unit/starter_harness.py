"""The starter's stage that hears, on ears and eyes whose work is counted."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from omnistage_starter.hear import Hearer, Prompter, Words
from omnistage_starter.hearing import RATE

from omnistage.core.messages import ChatMessage, TextPart
from omnistage.core.params import CodecParams
from omnistage.core.types import (
    ARInput,
    ChatInput,
    Modality,
    ModuleOutput,
    RequestInfo,
    StageChunk,
    StageInput,
)
from omnistage.engines.codec import ModuleStage
from omnistage.models.causal_lm import tiny as causal_lm_tiny


class Ears:
    """Hears how long each piece is; breaks over one that is too loud."""

    def __init__(self) -> None:
        self.pieces = 0

    def words(self, samples: NDArray[np.float32]) -> str:
        self.pieces += 1
        if samples.max() > 0.9:
            raise RuntimeError("boom")
        return f"{len(samples) / RATE:.0f} seconds"


class Eyes:
    def __init__(self) -> None:
        self.pictures = 0

    def look(self, pixels: NDArray[np.uint8]) -> Generator[None, None, str]:
        yield
        self.pictures += 1
        return f"(A picture of {pixels[0, 0, 0]}.)"


class HearStageHarness:
    """The stage that hears, on ears and eyes whose work is counted."""

    def __init__(self, think: Path, eyes: Any = None) -> None:
        self.ears, self.eyes, self.prompter = Ears(), eyes or Eyes(), Prompter(think)
        self.component = Hearer(self.prompter, Words(self.ears, self.eyes))  # type: ignore[arg-type]
        self.stage = ModuleStage("hear", self.component, SimpleNamespace(max_batch=16))

    def input(self, name: str, *parts: Any, modality: Modality = Modality.TEXT) -> StageInput:
        info = RequestInfo(name, modalities=frozenset({modality}))
        return StageInput(info, CodecParams(), ChatInput((ChatMessage("user", parts),)))

    def submit(self, name: str, *parts: Any, modality: Modality = Modality.TEXT) -> None:
        self.stage.submit(self.input(name, *parts, modality=modality))

    def tokens(self, text: str) -> tuple[int, ...]:
        return self.prompter.prompt(ChatInput((ChatMessage("user", (TextPart(text),)),))).token_ids


@pytest.fixture(scope="module")
def think(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("think") / "model"
    causal_lm_tiny.write(folder)
    return folder


def prompts(chunks: Sequence[StageChunk]) -> dict[str, ARInput]:
    found = {c.request_id: c.payload.prompt for c in chunks if isinstance(c.payload, ModuleOutput)}
    return {name: prompt for name, prompt in found.items() if prompt is not None}
