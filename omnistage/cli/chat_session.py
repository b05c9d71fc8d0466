"""A conversation with a loaded model: commands, messages and replies, line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from omnistage.cli import drawing
from omnistage.cli.common import os_reason, print_line
from omnistage.cli.conversation import Conversation, Turn, UserMessage, join_names, next_file, split_file
from omnistage.cli.terminal import Terminal, timeline
from omnistage.core.cancellation import current_cancellation
from omnistage.core.errors import (
    CancelledRequestError,
    InvalidRequestError,
    LimitExceededError,
    OmniError,
    UnsupportedModalityError,
)
from omnistage.core.family import DrawingProcessor, OptionalInputs, Transcriber
from omnistage.core.params import DiffusionParams, SamplingParams
from omnistage.core.types import FinishReason, Modality
from omnistage.media.audio import decode_audio
from omnistage.media.source import load_bytes
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk

if TYPE_CHECKING:
    from omnistage.omni import Omni
    from omnistage.pipeline.intake import ParamsLike

_DEFAULT_QUESTION = "What is in this picture?"


class ChatSession:
    """A conversation with a loaded model, line by line. An error ends its line only."""

    def __init__(
        self,
        omni: Omni,
        terminal: Terminal,
        conversation: Conversation,
        sampling: SamplingParams | None = None,
        diffusion: DiffusionParams | None = None,
        *,
        voice: str | None = None,
        speak: Path | None = None,
    ) -> None:
        self._omni, self._terminal, self.conversation = omni, terminal, conversation
        self._outputs = frozenset(omni.modalities)
        if isinstance(omni.processor, DrawingProcessor) or Modality.TEXT not in self._outputs:
            raise UnsupportedModalityError("this model does not chat; use `omnistage generate`")
        self._inputs = frozenset(omni.processor.input_modalities)
        self._params = drawing.stage_params(omni, sampling, None)
        self._drawing_params = drawing.stage_params(omni, None, diffusion) if Modality.IMAGE in self._outputs else {}
        self._voice = voice
        self._folder = speak or drawing.DEFAULT_FOLDER
        self._speech = False
        if speak is not None:
            self._speak("on")
        self._last: OmniRequestOutput | None = None
        self.errors = 0
        """Lines that ended with an error."""

    def greet(self, name: str) -> None:
        inputs = join_names([str(kind) for kind in Modality if kind in self._inputs])
        outputs = join_names([str(kind) for kind in Modality if kind in self._outputs])
        self._terminal.note(f"{name}: {inputs} in; {outputs} out. /help lists commands, Ctrl-D ends.")

    def handle(self, line: str) -> bool:
        """Process one line; whether the conversation goes on."""
        line = line.strip()
        if not line:
            return True
        if line in ("/quit", "/exit"):
            return False
        try:
            with self._terminal.interrupts.cancelling():
                if line.startswith("/"):
                    self._command(line)
                else:
                    self._send(UserMessage(line))
        except (KeyboardInterrupt, CancelledRequestError):
            self._terminal.note("(stopped)")
        except OmniError as error:
            self._fail(str(error))
        except BrokenPipeError:
            raise  # the reader of the output is gone
        except OSError as error:
            self._fail(os_reason(error))
        return True

    def _fail(self, reason: str) -> None:
        self.errors += 1
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
            raise InvalidRequestError(f"unknown command /{name}; /help lists the commands")
        command(rest.strip())

    def _help(self, _: str) -> None:
        inputs, outputs = self._inputs, self._outputs
        speech = f"speech with every reply, to {self._folder}; now {'on' if self._speech else 'off'}"
        rows = [
            ("/new", "start a new conversation", True),
            ("/speak on|off", speech, Modality.AUDIO in outputs),
            ("/draw TEXT", f"draw a picture, to {self._folder}", Modality.IMAGE in outputs),
            ("/listen FILE [TEXT]", "send an audio file", Modality.AUDIO in inputs),
            ("/look FILE [TEXT]", "send a picture and ask about it", Modality.IMAGE in inputs),
            ("/save DIR", "write the conversation with its audio and pictures", True),
            ("/trace", "when each stage ran for the last reply", True),
            ("/quit", "end, like Ctrl-D; Ctrl-C stops a reply", True),
        ]
        for name, text, supported in rows:
            self._terminal.print(f"  {name:<22}{text if supported else 'not supported by this model'}")

    def _new(self, _: str) -> None:
        self.conversation = Conversation(self.conversation.system)
        self._terminal.note("new conversation")

    def _speak(self, value: str) -> None:
        if value not in ("on", "off"):
            raise InvalidRequestError("use /speak on or /speak off")
        if value == "on":
            self._require(Modality.AUDIO, self._outputs, "speech output")
        self._speech = value == "on"
        self._terminal.note(f"speech is {value}" + (f"; files go to {self._folder}" if self._speech else ""))

    def _draw(self, text: str) -> None:
        self._require(Modality.IMAGE, self._outputs, "picture output")
        if not text:
            raise InvalidRequestError("the text is missing; use /draw TEXT")
        messages: list[dict[str, object]] = [{"role": "user", "content": text}]
        with self._terminal.bar(f"drawing {text}") as report:
            for item in self._stream(messages, self._drawing_params, (Modality.IMAGE,)):
                if item.progress is not None:
                    report("", item.progress.step / max(item.progress.steps, 1))
        picture = self._last.image if self._last is not None else None
        if picture is None:
            raise InvalidRequestError("the model generated no picture; try another text")
        self._folder.mkdir(parents=True, exist_ok=True)
        path = picture.save(next_file(self._folder, "picture", ".png"))
        self.conversation.pictures.append(path)
        self._terminal.show(picture.to_pil())
        self._terminal.print(str(path))

    def _listen(self, rest: str) -> None:
        self._require_input(Modality.AUDIO, "audio input")
        message = self._with_file(Modality.AUDIO, rest, "/listen")
        self._send(message, self._transcribe(message.data))

    def _transcribe(self, data: bytes) -> str:
        """The transcript of an audio file, shown before the reply; empty where the model has none."""
        processor = self._omni.processor
        if not isinstance(processor, Transcriber):
            return ""
        clip = decode_audio(data, self._omni.media_limits, processor.audio_sample_rate)
        transcript = processor.transcribe(clip)
        self._terminal.note(f"(transcript: {transcript})" if transcript else "(no speech was detected in the audio)")
        return transcript

    def _look(self, rest: str) -> None:
        self._require_input(Modality.IMAGE, "picture input")
        self._send(self._with_file(Modality.IMAGE, rest, "/look", _DEFAULT_QUESTION))

    def _with_file(self, kind: Modality, rest: str, command: str, default: str = "") -> UserMessage:
        name, text = split_file(rest)
        if not name:
            raise InvalidRequestError(f"the file is missing; use {command} FILE")
        file = Path(name).expanduser()
        return UserMessage(text or default, kind, file, load_bytes(file, self._omni.media_limits))

    def _save(self, folder: str) -> None:
        if not folder:
            raise InvalidRequestError("the folder is missing; use /save DIR")
        for path in self.conversation.save(Path(folder).expanduser()):
            self._terminal.print(str(path))

    def _trace(self, _: str) -> None:
        if self._last is None or self._last.trace is None:
            raise InvalidRequestError("there is no reply yet; send a message first")
        self._terminal.print(f"{self._last.trace}\n\n{timeline(self._last.trace)}")

    def _require(self, kind: Modality, supported: frozenset[Modality], name: str) -> None:
        if kind not in supported:
            raise UnsupportedModalityError(f"this model has no {name}; /help lists what it supports")

    def _require_input(self, kind: Modality, name: str) -> None:
        """Raise where the model does not take this modality, with the model's own reason where it has one."""
        processor = self._omni.processor
        if kind not in self._inputs and isinstance(processor, OptionalInputs):
            raise UnsupportedModalityError(processor.unsupported_reason(kind))
        self._require(kind, self._inputs, name)

    # -------------------------------------------------------------------------------------------- replies

    def _send(self, message: UserMessage, transcript: str = "") -> None:
        """Send a message, without as many of the oldest turns as must be; one that fails is not remembered."""
        before = self.conversation.dropped
        while True:
            try:
                self._reply(message, transcript)
                break
            except LimitExceededError:
                if not self.conversation.drop_oldest():
                    self.conversation.dropped = before  # the message is too long by itself
                    raise
        if count := self.conversation.dropped - before:
            turns = "turn was" if count == 1 else f"{count} turns were"
            self._terminal.note(f"(too long for the model: the oldest {turns} left out; /new starts again)")

    def _reply(self, message: UserMessage, transcript: str) -> None:
        kinds = (Modality.TEXT, Modality.AUDIO) if self._speech else (Modality.TEXT,)
        text: list[str] = []
        try:
            for item in self._stream(self.conversation.messages(message), self._params, kinds):
                if item.text:
                    text.append(item.text)
                    self._terminal.write(item.text)
        except (KeyboardInterrupt, OmniError) as error:
            if text:
                self._terminal.write("\n")  # also the word that is held back, which would begin the next reply
            if text and isinstance(error, (KeyboardInterrupt, CancelledRequestError)):
                self.conversation.turns.append(Turn(message, "".join(text), transcript))
            raise
        final = self._last
        turn = Turn(message, "".join(text), transcript)
        self._terminal.write("\n")
        if final is not None and final.audio is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = final.audio.save(next_file(self._folder, "answer", ".wav"))
            turn.files.append(path)
            self._terminal.note(f"{path}: {final.audio.seconds:.1f} s of speech")
        if final is not None and final.finish_reason is FinishReason.LENGTH:
            self._terminal.note("(truncated at the maximum number of tokens; --max-tokens sets it)")
        self.conversation.turns.append(turn)

    def _stream(
        self, messages: Sequence[dict[str, object]], params: ParamsLike, kinds: Sequence[Modality]
    ) -> Iterator[OutputChunk]:
        """The chunks of a reply. Ctrl-C raises `CancelledRequestError`; leaving early in any way aborts the request."""
        stopped = current_cancellation()
        voice = self._voice if "audio" in kinds else None
        items = self._omni.stream_chat(messages, params, modalities=kinds, voice=voice)
        with closing(items):  # type: ignore[type-var]
            for item in items:
                if stopped.cancelled:
                    raise CancelledRequestError("the reply was stopped")
                if item.final is not None and item.final.error is None:
                    self._last = item.final
                yield item
