"""Input and output of a conversation: an interactive terminal, or a pipe."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from omnistage.cli.common import Report, print_note, progress_bar
from omnistage.cli.interrupts import Interrupts

if TYPE_CHECKING:
    from PIL import Image

    from omnistage.pipeline.outputs import Trace

PROMPT = "> "
MAX_COLUMNS = 48
"""Of a picture: a larger one would scroll the conversation off the screen."""
_ROWS_BELOW = 3
"""Of the terminal that a picture leaves free, for its file's name and the prompt."""
# Output of a model is text: an escape sequence in it must not move the cursor or rename the window.
_CONTROL = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """The text without control characters other than line ends and tabs."""
    return text.translate(_CONTROL)


class WordWrap:
    """Breaks text that arrives in pieces between words.

    A word is held back until it ends, for it may not fit. What no line can hold is written as it comes, and so are wide
    characters, as of Chinese and Japanese: a line may end after any of them.
    """

    def __init__(self) -> None:
        self._column, self._blanks, self._word = 0, "", ""
        self._overlong = False  # the beginning of a word that no line can hold is written

    def push(self, text: str, width: int) -> str:
        """What can be written now."""
        pieces = []
        for character in text:
            if character in " \t\n":
                pieces.append(self._end_word(width))
                self._overlong = False
                if character == "\n":
                    pieces.append("\n")
                    self._column, self._blanks = 0, ""
                else:
                    self._blanks += " "
                continue
            length = cell_len(character)
            if self._overlong and length == 1:
                pieces.append(character)  # the terminal breaks it: an address stays one that can be copied
                self._column = self._column + 1 if self._column < width else 1
                continue
            if length > 1:
                pieces.append(self._end_word(width))
            self._word += character
            if length > 1 or cell_len(self._word) >= width:
                pieces.append(self._end_word(width))
                self._overlong = length <= 1
        return "".join(pieces)

    def _end_word(self, width: int) -> str:
        """The word with the blanks before it, or on a line of its own."""
        if not self._word:
            return ""
        blanks, word = self._blanks, self._word
        self._blanks, self._word = "", ""
        length = cell_len(word)
        if self._column + len(blanks) + length > width:
            end = "\n" if self._column else ""
            self._column = length
            return f"{end}{word}"
        self._column += len(blanks) + length
        return blanks + word


@dataclass(frozen=True, slots=True)
class Terminal:
    """Lines in, streamed text and notes out. Prompts, bars and colours only where it is interactive."""

    interactive: bool
    output: Console
    notes: Console
    interrupts: Interrupts = field(default_factory=Interrupts)
    _wrap: WordWrap = field(default_factory=WordWrap)

    @classmethod
    def here(cls) -> Terminal:
        """Over this process's streams; interactive where both ends are a terminal."""
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # invalid UTF-8 must not end the conversation
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        plain = None if interactive else False
        return cls(
            interactive,
            Console(highlight=False, force_terminal=plain),
            Console(stderr=True, highlight=False, force_terminal=plain),
        )

    def lines(self) -> Iterator[str]:
        """Lines of input until its end. Ctrl-C at the prompt only discards the line."""
        if not self.interactive:
            while line := self.interrupts.read(sys.stdin.readline):
                yield line.rstrip("\r\n")
            return
        _use_history()
        while True:
            try:
                line = self.interrupts.read(lambda: input(PROMPT))
            except KeyboardInterrupt:
                self.note("\nend the conversation with Ctrl-D or /quit")
            except EOFError:
                self.output.print()
                return
            else:
                yield line

    def write(self, text: str) -> None:
        """Print streamed text at once; on a terminal word by word, broken at its width."""
        text = printable(text)
        if self.interactive:
            text = self._wrap.push(text, self.output.width)
        print(text, end="", file=self.output.file, flush=True)

    def print(self, text: str = "") -> None:
        """Print a line of a result."""
        self.output.print(Text(printable(text)), soft_wrap=True)

    def note(self, text: str, style: str = "dim") -> None:
        """Print a line about the conversation."""
        print_note(Text(printable(text), style=style), self.notes)

    @contextmanager
    def bar(self, title: str) -> Iterator[Report]:
        """A progress bar where the terminal is interactive."""
        if not self.interactive:
            yield lambda what, done: None
            return
        with progress_bar(title, transient=True) as report:
            yield report

    def show(self, picture: Image.Image) -> bool:
        """Show a picture as coloured half blocks; whether the terminal could."""
        if not self.interactive or self.output.color_system is None:
            return False
        rows = max(1, self.output.height - _ROWS_BELOW)
        columns = max(1, min(MAX_COLUMNS, self.output.width, round(2 * rows * picture.width / picture.height)))
        self.output.print(half_blocks(picture, columns, rows))
        return True


def half_blocks(picture: Image.Image, columns: int, max_rows: int = 1000) -> Text:
    """The picture in `columns` characters a line: the upper pixel of two is a half block, the lower its background."""
    from PIL import Image

    rows = min(max_rows, max(1, round(picture.height * columns / picture.width / 2)))
    small = picture.convert("RGB").resize((columns, 2 * rows), Image.Resampling.LANCZOS)
    pixels = small.tobytes()

    def colour(x: int, y: int) -> str:
        start = 3 * (y * columns + x)
        return "#" + pixels[start : start + 3].hex()

    lines = (
        Text.assemble(*(("▀", f"{colour(x, 2 * row)} on {colour(x, 2 * row + 1)}") for x in range(columns)))
        for row in range(rows)
    )
    return Text("\n").join(lines)


def timeline(trace: Trace, columns: int = 60) -> str:
    """When each stage ran: a bar per stage on one time axis, light where the request was queued."""
    ends = [stage.last_chunk for stage in trace.stages.values() if stage.last_chunk is not None]
    total = max([*ends, trace.finished or 0.0, 1e-9])
    width = max([5, *map(len, trace.stages)])

    def column(seconds: float) -> int:
        return min(int(seconds / total * columns), columns - 1)

    lines = [f"{'stage':<{width}}  0{f'{total:.2f} s':>{columns - 1}}"]
    for stage in trace.stages.values():
        bar = [" "] * columns
        if stage.submitted is not None and stage.started is not None:
            bar[column(stage.submitted) : column(stage.started)] = "░" * (
                column(stage.started) - column(stage.submitted)
            )
            first, last = column(stage.started), column(stage.last_chunk or stage.started)
            bar[first : last + 1] = "█" * (last + 1 - first)
        lines.append(f"{stage.stage:<{width}}  {''.join(bar)}".rstrip())
    return "\n".join(lines)


def _use_history() -> None:
    """Line editing and history for `input`, where the system has them."""
    try:
        import readline  # noqa: F401  (the import has the effect)
    except ImportError:
        return
