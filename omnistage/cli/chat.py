"""`omnistage chat`: a conversation in the terminal, with all that the model hears, sees, says and draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnistage.cli import drawing
from omnistage.cli.common import (
    EXIT_ERROR,
    ConfigOption,
    DeviceOption,
    DTypeOption,
    ModelArgument,
    SetOption,
    err,
    print_line,
)
from omnistage.cli.generate import sampling_params
from omnistage.cli.terminal import Terminal, timeline
from omnistage.core.errors import InvalidRequestError, LimitExceededError, OmniError, UnsupportedModalityError

if TYPE_CHECKING:
    from omnistage.cli.conversation import Conversation, Said
    from omnistage.core.params import DiffusionParams, SamplingParams
    from omnistage.core.types import Modality
    from omnistage.omni import Omni
    from omnistage.pipeline.intake import ParamsLike
    from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk

_ABOUT_A_PICTURE = "What is in this picture?"
_STOPPED = "(stopped)"


def chat(
    model: ModelArgument,
    speak: Annotated[
        Path | None, typer.Option("--speak", metavar="DIR", help="Speak as well: a WAV for every answer goes here.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    voice: Annotated[str | None, typer.Option(help="Who speaks; default: the model's first voice.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers and pictures.")] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    device: DeviceOption = None,
    dtype: DTypeOption = None,
) -> None:
    """Talk to a model in the terminal.

    Answers appear as they are written. `/help` lists what else this model can do: speak, draw, listen to a file, look
    at one. Ctrl-C stops an answer, Ctrl-D ends the conversation. Lines from a pipe are answered one by one.

    Examples:

    ```
    omnistage chat starter
    omnistage chat starter --speak out/speech --seed 1
    echo 'What is the capital of France?' | omnistage chat starter --max-tokens 32
    ```
    """
    sampling = sampling_params(max_tokens=max_tokens, temperature=temperature, seed=seed)
    asked = drawing.parse_params(seed=seed)
    if speak is not None:
        speak.mkdir(parents=True, exist_ok=True)
    from omnistage.cli.conversation import Conversation
    from omnistage.omni import Omni

    terminal = Terminal.here()
    err().print(f"loading {model}", style="dim", soft_wrap=True, markup=False)
    given = tuple(overrides or ())
    with Omni(model, config=config, overrides=given, device=device, dtype=dtype, progress=terminal.interactive) as omni:
        talk = Talk(omni, terminal, Conversation(system), sampling, asked, voice=voice, speak=speak)
        if terminal.interactive:
            talk.greet(model)
        for line in terminal.lines():
            if not talk.take(line):
                break
    if talk.failed and not terminal.interactive:
        raise typer.Exit(EXIT_ERROR)  # a script must be able to tell


class Talk:
    """A conversation with a loaded model, line by line. A line that fails says so and leaves the others alone."""

    def __init__(
        self,
        omni: Omni,
        terminal: Terminal,
        conversation: Conversation,
        sampling: SamplingParams | None = None,
        asked: DiffusionParams | None = None,
        *,
        voice: str | None = None,
        speak: Path | None = None,
    ) -> None:
        from omnistage.core.family import DrawingProcessor
        from omnistage.core.types import Modality

        self._omni, self._terminal, self.conversation = omni, terminal, conversation
        self._gives = frozenset(omni.modalities)
        if isinstance(omni.processor, DrawingProcessor) or Modality.TEXT not in self._gives:
            raise UnsupportedModalityError("this model does not chat; `omnistage generate` asks it for the rest")
        self._takes = frozenset(omni.processor.input_modalities)
        self._params = drawing.stage_params(omni, sampling, None)
        self._drawing_params = drawing.stage_params(omni, None, asked) if Modality.IMAGE in self._gives else {}
        self._voice = voice
        self._folder = speak or drawing.DEFAULT_FOLDER
        self._speaks = False
        if speak is not None:
            self._speak("on")
        self._last: OmniRequestOutput | None = None
        self.failed = 0
        """Lines that ended with an error."""

    def greet(self, name: str) -> None:
        from omnistage.cli.conversation import joined

        takes = joined([str(kind) for kind in _in_order(self._takes)])
        gives = joined([str(kind) for kind in _in_order(self._gives)])
        self._terminal.note(f"{name} takes {takes} and gives {gives}. /help lists commands, Ctrl-D ends.")

    def take(self, line: str) -> bool:
        """Do what one line says; whether the conversation goes on."""
        line = line.strip()
        if not line:
            return True
        if line in ("/quit", "/exit"):
            return False
        try:
            if line.startswith("/"):
                self._command(line)
            else:
                from omnistage.cli.conversation import Said

                self._ask(Said(line))
        except KeyboardInterrupt:
            self._terminal.note(_STOPPED)
        except OmniError as error:
            self._fail(str(error))
        except BrokenPipeError:
            raise  # whoever read the answers has left
        except OSError as error:
            self._fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
        return True

    def _fail(self, reason: str) -> None:
        self.failed += 1
        print_line(" ".join(reason.split()))

    # ------------------------------------------------------------------------------------------- commands

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "new": self._new,
            "speak": self._speak,
            "draw": self._draw,
            "listen": self._listen,
            "look": self._look,
            "save": self._save,
            "trace": self._trace,
        }
        command = commands.get(name)
        if command is None:
            raise InvalidRequestError(f"there is no command /{name}; /help lists them")
        command(rest.strip())

    def _help(self, _: str) -> None:
        from omnistage.core.types import Modality

        gives, takes = self._gives, self._takes
        speaking = f"speech with every answer, to {self._folder}; now {'on' if self._speaks else 'off'}"
        rows = [
            ("/new", "begin a new conversation", True),
            ("/speak on|off", speaking, Modality.AUDIO in gives),
            ("/draw WORDS", f"draw a picture, to {self._folder}", Modality.IMAGE in gives),
            ("/listen FILE [WORDS]", "say it with a sound file", Modality.AUDIO in takes),
            ("/look FILE [WORDS]", "show a picture and ask about it", Modality.IMAGE in takes),
            ("/save DIR", "write the conversation, with its sounds and pictures", True),
            ("/trace", "when each stage ran for the last answer", True),
            ("/quit", "end, as Ctrl-D does; Ctrl-C stops an answer", True),
        ]
        for name, about, there in rows:
            self._terminal.say(f"  {name:<22}{about if there else 'not with this model'}")

    def _new(self, _: str) -> None:
        from omnistage.cli.conversation import Conversation

        self.conversation = Conversation(self.conversation.system)
        self._terminal.note("a new conversation")

    def _speak(self, how: str) -> None:
        from omnistage.core.types import Modality

        if how not in ("on", "off"):
            raise InvalidRequestError("say /speak on or /speak off")
        if how == "on":
            self._need(Modality.AUDIO, self._gives, "speak")
        self._speaks = how == "on"
        self._terminal.note(f"speech is {how}" + (f"; it goes to {self._folder}" if self._speaks else ""))

    def _draw(self, words: str) -> None:
        from omnistage.cli.conversation import next_file
        from omnistage.core.types import Modality

        self._need(Modality.IMAGE, self._gives, "draw")
        if not words:
            raise InvalidRequestError("say what to draw: /draw WORDS")
        messages: list[dict[str, object]] = [{"role": "user", "content": words}]
        with self._terminal.bar(f"drawing {words}") as report:
            for item in self._stream(messages, self._drawing_params, (Modality.IMAGE,)):
                if item.progress is not None:
                    report("", item.progress.step / max(item.progress.steps, 1))
        picture = self._last.image if self._last is not None else None
        if picture is None:
            raise InvalidRequestError("the model gave no picture; try other words")
        self._folder.mkdir(parents=True, exist_ok=True)
        path = picture.save(next_file(self._folder, "picture", ".png"))
        self.conversation.pictures.append(path)
        self._terminal.show(picture.to_pil())
        self._terminal.say(str(path))

    def _listen(self, rest: str) -> None:
        from omnistage.core.types import Modality

        self._need_part(Modality.AUDIO, "hear")
        said = self._with_file(Modality.AUDIO, rest, "/listen")
        self._ask(said, self._heard(said.data))

    def _heard(self, sound: bytes) -> str:
        """What the model understands of a sound, shown before it answers; empty where it cannot say."""
        from omnistage.core.family import Transcriber
        from omnistage.media.audio import decode_audio

        ears = self._omni.processor
        if not isinstance(ears, Transcriber):
            return ""

        words = ears.transcribe(decode_audio(sound, self._omni.media_limits, ears.audio_sample_rate))
        self._terminal.note(f"(heard: {words})" if words else "(heard no words)")
        return words

    def _look(self, rest: str) -> None:
        from omnistage.core.types import Modality

        self._need_part(Modality.IMAGE, "see")
        self._ask(self._with_file(Modality.IMAGE, rest, "/look", _ABOUT_A_PICTURE))

    def _with_file(self, kind: Modality, rest: str, command: str, default: str = "") -> Said:
        from omnistage.cli.conversation import Said, file_and_words
        from omnistage.media.source import load_bytes

        name, words = file_and_words(rest)
        if not name:
            raise InvalidRequestError(f"name a file: {command} FILE")
        file = Path(name).expanduser()
        return Said(words or default, kind, file, load_bytes(file, self._omni.media_limits))

    def _save(self, folder: str) -> None:
        if not folder:
            raise InvalidRequestError("name a folder: /save DIR")
        for path in self.conversation.save(Path(folder).expanduser()):
            self._terminal.say(str(path))

    def _trace(self, _: str) -> None:
        if self._last is None or self._last.trace is None:
            raise InvalidRequestError("nothing was answered yet; ask something first")
        self._terminal.say(f"{self._last.trace}\n\n{timeline(self._last.trace)}")

    def _need(self, kind: Modality, among: frozenset[Modality], verb: str) -> None:
        if kind not in among:
            raise UnsupportedModalityError(f"this model does not {verb}; /help lists what it does")

    def _need_part(self, kind: Modality, verb: str) -> None:
        """Raise where the model does not take this kind, with what helps where it could have the part for it."""
        from omnistage.core.family import OptionalInputs

        processor = self._omni.processor
        if kind not in self._takes and isinstance(processor, OptionalInputs):
            raise UnsupportedModalityError(processor.unsupported_reason(kind))
        self._need(kind, self._takes, verb)

    # -------------------------------------------------------------------------------------------- answers

    def _ask(self, said: Said, heard: str = "") -> None:
        """Answer, forgetting as much of the oldest as must be forgotten; what cannot be answered is not remembered."""
        before = self.conversation.forgotten
        while True:
            try:
                self._answer(said, heard)
                break
            except LimitExceededError:
                if not self.conversation.forget_oldest():
                    self.conversation.forgotten = before  # it is too long by itself
                    raise
        if lost := self.conversation.forgotten - before:
            turns = "turn" if lost == 1 else f"{lost} turns"
            self._terminal.note(f"(too long for the model: it was not told of the oldest {turns}; /new begins anew)")

    def _answer(self, said: Said, heard: str) -> None:
        from omnistage.cli.conversation import Turn, next_file
        from omnistage.core.types import FinishReason, Modality

        kinds = (Modality.TEXT, Modality.AUDIO) if self._speaks else (Modality.TEXT,)
        text: list[str] = []
        try:
            for item in self._stream(self.conversation.messages(said), self._params, kinds):
                if item.text:
                    text.append(item.text)
                    self._terminal.write(item.text)
        except KeyboardInterrupt:
            if text:
                self._terminal.write("\n")
                self.conversation.turns.append(Turn(said, "".join(text), heard))
            raise
        final = self._last
        turn = Turn(said, "".join(text), heard)
        self._terminal.write("\n")
        if final is not None and final.audio is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = final.audio.save(next_file(self._folder, "answer", ".wav"))
            turn.files.append(path)
            self._terminal.note(f"{path}: {final.audio.seconds:.1f} s of speech")
        if final is not None and final.finish_reason is FinishReason.LENGTH:
            self._terminal.note("(cut off at its most tokens; --max-tokens sets them)")
        self.conversation.turns.append(turn)

    def _stream(
        self, messages: Sequence[dict[str, object]], params: ParamsLike, kinds: Sequence[Modality]
    ) -> Iterator[OutputChunk]:
        """The items of an answer; leaving early, by Ctrl-C above all, ends its work."""
        voice = self._voice if "audio" in kinds else None
        items = self._omni.stream_chat(messages, params, modalities=kinds, voice=voice)
        with closing(items):  # type: ignore[type-var]
            for item in items:
                if item.final is not None and item.final.error is None:
                    self._last = item.final
                yield item


def _in_order(kinds: frozenset[Modality]) -> list[Modality]:
    from omnistage.core.types import Modality

    return [kind for kind in Modality if kind in kinds]
