"""What `omnistage chat` remembers: turns, as messages for the model and as files for the user."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omnistage.core.types import Modality

Message = dict[str, object]


@dataclass(frozen=True, slots=True)
class Said:
    """What the user said at once: words, a sound or a picture, or words beside one."""

    words: str = ""
    kind: Modality | None = None
    file: Path | None = None
    data: bytes = field(default=b"", repr=False)
    """The file's content, read once: a file that is gone later does not end the conversation."""

    def content(self, media: object) -> list[dict[str, object]]:
        """As a message's parts, with `media` in the file's place."""
        parts: list[dict[str, object]] = [] if self.kind is None else [{"type": str(self.kind), str(self.kind): media}]
        return [*parts, {"type": "text", "text": self.words}] if self.words else parts

    def __str__(self) -> str:
        return " ".join(part for part in (f"[{self.file.name}]" if self.file else "", self.words) if part)


@dataclass(slots=True)
class Turn:
    """What was said and what was answered."""

    said: Said
    answer: str
    heard: str = ""
    """What the model understood of a sound, where it says so."""
    files: list[Path] = field(default_factory=list)
    """What was written of the answer."""


@dataclass(slots=True)
class Conversation:
    """The turns so far, behind an optional system message."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    pictures: list[Path] = field(default_factory=list)
    """What was drawn: beside the conversation, not part of it."""
    forgotten: int = 0
    """Turns that the model is no longer told; they are still saved."""

    def messages(self, said: Said) -> list[Message]:
        """The conversation for the model, with what is said now at its end."""
        made = self._start()
        for turn in self.turns[self.forgotten :]:
            made.append({"role": "user", "content": turn.said.content(turn.said.data)})
            made.append({"role": "assistant", "content": turn.answer})
        return [*made, {"role": "user", "content": said.content(said.data)}]

    def forget_oldest(self) -> bool:
        """Tell the model of one turn less; whether there was one."""
        if self.forgotten == len(self.turns):
            return False
        self.forgotten += 1
        return True

    def save(self, folder: Path) -> list[Path]:
        """Write the conversation as text and as messages, and copy its files beside them; what was written."""
        folder.mkdir(parents=True, exist_ok=True)
        written: list[Path] = []
        made = self._start()
        lines = [f"system: {self.system}"] if self.system is not None else []
        for number, turn in enumerate(self.turns, 1):
            name = None
            if turn.said.file is not None:
                name = f"said-{number}{turn.said.file.suffix}"
                (folder / name).write_bytes(turn.said.data)
                written.append(folder / name)
            made.append({"role": "user", "content": turn.said.content(name)})
            made.append({"role": "assistant", "content": turn.answer})
            lines += [f"you: {turn.said}"]
            lines += [f"heard: {turn.heard}"] if turn.heard else []
            lines += [f"model: {turn.answer}"]
        made_files = [*(file for turn in self.turns for file in turn.files), *self.pictures]
        written += _copied(made_files, folder)
        text, messages = folder / "conversation.txt", folder / "conversation.json"
        text.write_text("\n".join([*lines, ""]), encoding="utf-8")
        messages.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return [text, messages, *written]

    def _start(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]


def _copied(files: Iterable[Path], folder: Path) -> list[Path]:
    """The files in the folder; those that lie there already stay, those that are gone are left out."""
    copies = []
    for file in files:
        target = folder / file.name
        if file.is_file() and not (target.exists() and target.samefile(file)):
            shutil.copyfile(file, target)
        if target.is_file():
            copies.append(target)
    return copies


def next_file(folder: Path, stem: str, suffix: str) -> Path:
    """A name in the folder that is not taken: `stem-1suffix`, then `stem-2suffix`."""
    number = 1
    while (path := folder / f"{stem}-{number}{suffix}").exists():
        number += 1
    return path


def file_and_words(text: str) -> tuple[str, str]:
    """What follows /listen and /look: a file's name, quoted where it has blanks, and words behind it."""
    text = text.strip()
    if text[:1] in ("'", '"'):
        end = text.find(text[0], 1)
        if end > 0:
            return text[1:end], text[end + 1 :].strip()
    if Path(text).is_file():
        return text, ""
    name, _, words = text.partition(" ")
    return name, words.strip()


def joined(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
