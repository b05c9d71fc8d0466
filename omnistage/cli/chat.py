"""`omnistage chat`: a conversation in the terminal: text, speech and pictures in and out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from omnistage.cli import drawing
from omnistage.cli.common import EXIT_ERROR
from omnistage.cli.generate import SamplingOptions
from omnistage.cli.options import ModelArgument, ModelOptions
from omnistage.cli.terminal import Terminal


def chat(
    model: ModelArgument,
    sampling: SamplingOptions,
    settings: ModelOptions,
    speak: Annotated[
        Path | None,
        typer.Option("--speak", metavar="DIR", help="Also generate speech; a WAV file per reply is written here."),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    voice: Annotated[
        str | None, typer.Option(metavar="NAME", help="The voice; default: the model's first one.")
    ] = None,
) -> None:
    """Chat with a model in the terminal.

    Replies stream. `/help` lists what else this model supports: speech, drawing, audio files, pictures. Ctrl-C stops a
    reply, Ctrl-D ends the conversation. Lines from a pipe are processed one by one.

    Examples:

    ```
    omnistage chat starter
    omnistage chat starter --speak out/speech --seed 1
    echo 'What is the capital of France?' | omnistage chat starter --max-tokens 32
    ```
    """
    params = sampling.params()
    diffusion = drawing.DrawingOptions().params(sampling.seed)
    if speak is not None:
        speak.mkdir(parents=True, exist_ok=True)
    from omnistage.cli.chat_session import ChatSession
    from omnistage.cli.conversation import Conversation

    terminal = Terminal.here()
    with settings.load(model, progress=terminal.interactive) as omni:
        session = ChatSession(omni, terminal, Conversation(system), params, diffusion, voice=voice, speak=speak)
        if terminal.interactive:
            session.greet(model)
        with terminal.interrupts:
            for line in terminal.lines():
                if not session.handle(line):
                    break
    if session.errors and not terminal.interactive:
        raise typer.Exit(EXIT_ERROR)
