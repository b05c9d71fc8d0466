"""The starter's hear stage, on models that count their calls."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from omnistage_starter.hear import ChatToPrompt, MediaToText, PromptBuilder
from omnistage_starter.speech_to_text import SAMPLE_RATE

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


class CountingSpeechToText:
    """Gives the length of each piece as its text; fails on one that is too loud."""

    def __init__(self) -> None:
        self.pieces = 0

    def transcribe_piece(self, samples: NDArray[np.float32]) -> str:
        self.pieces += 1
        if samples.max() > 0.9:
            raise RuntimeError("boom")
        return f"{len(samples) / SAMPLE_RATE:.0f} seconds"


class CountingDescriber:
    def __init__(self) -> None:
        self.images = 0

    def describe_steps(self, pixels: NDArray[np.uint8]) -> Generator[None, None, str]:
        yield
        self.images += 1
        return f"(A picture of {pixels[0, 0, 0]}.)"


class HearStageHarness:
    """The hear stage, on models that count their calls."""

    def __init__(self, think: Path, describer: Any = None) -> None:
        self.speech_to_text, self.describer = CountingSpeechToText(), describer or CountingDescriber()
        self.prompts = PromptBuilder(think)
        self.component = ChatToPrompt(self.prompts, MediaToText(self.speech_to_text, self.describer))  # type: ignore[arg-type]
        self.stage = ModuleStage("hear", self.component, SimpleNamespace(max_batch=16))

    def input(self, name: str, *parts: Any, modality: Modality = Modality.TEXT) -> StageInput:
        info = RequestInfo(name, modalities=frozenset({modality}))
        return StageInput(info, CodecParams(), ChatInput((ChatMessage("user", parts),)))

    def submit(self, name: str, *parts: Any, modality: Modality = Modality.TEXT) -> None:
        self.stage.submit(self.input(name, *parts, modality=modality))

    def tokens(self, text: str) -> tuple[int, ...]:
        return self.prompts.prompt(ChatInput((ChatMessage("user", (TextPart(text),)),))).token_ids


@pytest.fixture(scope="module")
def think(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("think") / "model"
    causal_lm_tiny.write(folder)
    return folder


def prompts(chunks: Sequence[StageChunk]) -> dict[str, ARInput]:
    payloads = {c.request_id: c.payload.prompt for c in chunks if isinstance(c.payload, ModuleOutput)}
    return {name: prompt for name, prompt in payloads.items() if prompt is not None}
