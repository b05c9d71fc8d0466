"""The conversation of `omnistage chat`: turns, as messages for the model and as files for the user."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omnistage.core.types import Modality

Message = dict[str, object]


@dataclass(frozen=True, slots=True)
class UserMessage:
    """One message of the user: a text, an audio file or a picture, or a text with one of them."""

    text: str = ""
    kind: Modality | None = None
    file: Path | None = None
    data: bytes = field(default=b"", repr=False)
    """The file's content, read once: the file may be deleted during the conversation."""

    def content(self, media: object) -> list[dict[str, object]]:
        """As the parts of a message, with `media` in place of the file."""
        parts: list[dict[str, object]] = [] if self.kind is None else [{"type": str(self.kind), str(self.kind): media}]
        return [*parts, {"type": "text", "text": self.text}] if self.text else parts

    def __str__(self) -> str:
        return " ".join(part for part in (f"[{self.file.name}]" if self.file else "", self.text) if part)


@dataclass(slots=True)
class Turn:
    """A message and what the model replied."""

    message: UserMessage
    reply: str
    transcript: str = ""
    """Of an audio file, where the model gives one."""
    files: list[Path] = field(default_factory=list)
    """Files of the reply."""


@dataclass(slots=True)
class Conversation:
    """The turns so far, after an optional system message."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    pictures: list[Path] = field(default_factory=list)
    """Files of `/draw`; the model is not told of them."""
    dropped: int = 0
    """Oldest turns that are no longer sent to the model; they are still saved."""

    def messages(self, message: UserMessage) -> list[Message]:
        """The conversation for the model, ending with `message`."""
        messages = self._system_messages()
        for turn in self.turns[self.dropped :]:
            messages += _turn_messages(turn, turn.message.data)
        return [*messages, {"role": "user", "content": message.content(message.data)}]

    def drop_oldest(self) -> bool:
        """Send one turn less to the model; whether there was one."""
        if self.dropped == len(self.turns):
            return False
        self.dropped += 1
        return True

    def save(self, folder: Path) -> list[Path]:
        """Write the conversation as text and as messages with copies of its files; the paths."""
        folder.mkdir(parents=True, exist_ok=True)
        files: list[Path] = []
        messages = self._system_messages()
        lines = [f"system: {self.system}"] if self.system is not None else []
        for number, turn in enumerate(self.turns, 1):
            name = None
            if turn.message.file is not None:
                name = f"input-{number}{turn.message.file.suffix}"
                (folder / name).write_bytes(turn.message.data)
                files.append(folder / name)
            messages += _turn_messages(turn, name)
            lines += [f"you: {turn.message}"]
            lines += [f"transcript: {turn.transcript}"] if turn.transcript else []
            lines += [f"model: {turn.reply}"]
        files += _copy_files([*(file for turn in self.turns for file in turn.files), *self.pictures], folder)
        text, data = folder / "conversation.txt", folder / "conversation.json"
        text.write_text("\n".join([*lines, ""]), encoding="utf-8")
        data.write_text(json.dumps(messages, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return [text, data, *files]

    def _system_messages(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]


def _turn_messages(turn: Turn, media: object) -> list[Message]:
    return [
        {"role": "user", "content": turn.message.content(media)},
        {"role": "assistant", "content": turn.reply},
    ]


def _copy_files(files: Iterable[Path], folder: Path) -> list[Path]:
    """The files in the folder; those that no longer exist are left out."""
    copies = []
    for file in files:
        target = folder / file.name
        if file.is_file() and not (target.exists() and target.samefile(file)):
            shutil.copyfile(file, target)
        if target.is_file():
            copies.append(target)
    return copies


def next_file(folder: Path, stem: str, suffix: str) -> Path:
    """A path in the folder that does not exist: `stem-1suffix`, then `stem-2suffix`."""
    number = 1
    while (path := folder / f"{stem}-{number}{suffix}").exists():
        number += 1
    return path


def split_file(text: str) -> tuple[str, str]:
    """The arguments of /listen and /look: a file name, in quotes where it has blanks, and the text after it."""
    text = text.strip()
    if text[:1] in ("'", '"'):
        end = text.find(text[0], 1)
        if end > 0:
            return text[1:end], text[end + 1 :].strip()
    if Path(text).is_file():
        return text, ""
    name, _, rest = text.partition(" ")
    return name, rest.strip()


def join_names(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
