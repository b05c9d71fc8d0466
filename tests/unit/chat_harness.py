"""`omnistage chat` over a front door that answers from a list."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from rich.console import Console

from omnistage.cli.chat_session import ChatSession
from omnistage.cli.conversation import Conversation
from omnistage.cli.terminal import Terminal
from omnistage.core.errors import (
    OmniError,
    PromptTooLongError,
)
from omnistage.core.params import DiffusionParams, SamplingParams
from omnistage.core.types import FinishReason, Modality, Progress
from omnistage.media.audio_output import AudioOutput
from omnistage.media.image_output import ImageOutput
from omnistage.media.limits import MediaLimits
from omnistage.pipeline.outputs import CompletionOutput, OmniRequestOutput, OutputChunk, StageTrace, Trace

ALL = (Modality.TEXT, Modality.AUDIO, Modality.IMAGE)
STAGES = {"think": SimpleNamespace(params_type=SamplingParams), "draw": SimpleNamespace(params_type=DiffusionParams)}


class Processor:
    input_modalities = frozenset({Modality.TEXT, Modality.AUDIO, Modality.IMAGE})


class FakeOmni:
    """Says what is next in `answers`, a word an item; an error in its place is raised."""

    def __init__(self, *answers: str | BaseException, gives: tuple[Modality, ...] = ALL, most: int = 10**6) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[list[dict[str, object]], object, tuple[Modality, ...]]] = []
        self.modalities, self.processor, self.media_limits = gives, Processor(), MediaLimits()
        self.orchestrator = SimpleNamespace(stages=STAGES)
        self.most = most
        self.closed = 0

    def __call__(self, model: str, **options: object) -> FakeOmni:
        return self

    def __enter__(self) -> FakeOmni:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def stream_chat(self, messages, params=None, *, modalities, voice=None) -> Iterator[OutputChunk]:
        if len(messages) > self.most:
            raise PromptTooLongError(f"{len(messages)} messages are too many")
        self.asked.append((messages, params, tuple(modalities)))
        return self._items(tuple(modalities))

    def _items(self, modalities: tuple[Modality, ...]) -> Iterator[OutputChunk]:
        answer = self.answers.pop(0)
        try:
            if isinstance(answer, OmniError):
                raise answer
            if Modality.IMAGE in modalities:
                yield OutputChunk("r", Modality.IMAGE, progress=Progress(1, 2))
            for word in answer.split(" ") if isinstance(answer, str) else ("half",):
                yield OutputChunk("r", Modality.TEXT, text=word + " ")
            if isinstance(answer, BaseException):
                raise answer
            yield OutputChunk("r", Modality.TEXT, final=self._final(modalities))
        finally:
            self.closed += 1

    def _final(self, modalities: tuple[Modality, ...]) -> OmniRequestOutput:
        trace = Trace("r", 0.0, finished=0.5, stages={"think": StageTrace("think", 0.0, 0.1)})
        output = OmniRequestOutput("r", [CompletionOutput()], finish_reason=FinishReason.STOP, trace=trace)
        if Modality.AUDIO in modalities:
            output.audio = AudioOutput(np.zeros(2400, np.float32), 24_000)
        if Modality.IMAGE in modalities:
            output.images.append(ImageOutput(np.full((4, 4, 3), 200, np.uint8)))
        return output


def make(
    omni: FakeOmni, tmp_path: Path, *, interactive: bool = False, **options: object
) -> tuple[ChatSession, io.StringIO]:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=interactive, color_system="truecolor" if interactive else None)
    talk = ChatSession(omni, Terminal(interactive, console, console), Conversation(), **options)  # type: ignore[arg-type]
    talk._folder = tmp_path / "out"
    return talk, screen
