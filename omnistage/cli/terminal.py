"""Where a conversation happens: a person at a terminal, or lines from a pipe."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from omnistage.cli.common import Report, progress_bar

if TYPE_CHECKING:
    from PIL import Image

    from omnistage.pipeline.outputs import Trace

PROMPT = "> "
MOST_COLUMNS = 48
"""Of a picture: more rows would push the conversation off the screen."""
# What models say is text: an escape sequence in it must not move the cursor or rename the window.
_UNSEEN = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """The text without control characters other than line ends and tabs."""
    return text.translate(_UNSEEN)


@dataclass(frozen=True, slots=True)
class Terminal:
    """Lines in, streamed text and notes out. Without a person at it there are no prompts, bars or colours."""

    interactive: bool
    answers: Console
    notes: Console

    @classmethod
    def here(cls) -> Terminal:
        """Over this process's own streams. A person is there where both ends are a terminal."""
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a byte that is no text must not end the conversation
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        plain = None if interactive else False
        return cls(
            interactive,
            Console(highlight=False, force_terminal=plain),
            Console(stderr=True, highlight=False, force_terminal=plain),
        )

    def lines(self) -> Iterator[str]:
        """What is typed or piped, line by line, until its end. Ctrl-C at the prompt gives up the line, no more."""
        if not self.interactive:
            for line in sys.stdin:
                yield line.rstrip("\r\n")
            return
        _use_history()
        while True:
            try:
                yield input(PROMPT)
            except KeyboardInterrupt:
                self.note("\nCtrl-D or /quit ends it")
            except EOFError:
                self.answers.print()
                return

    def write(self, text: str) -> None:
        """A piece of an answer, at once."""
        print(printable(text), end="", file=self.answers.file, flush=True)

    def say(self, text: str = "") -> None:
        """A line of a result."""
        self.answers.print(Text(printable(text)), soft_wrap=True)

    def note(self, text: str, style: str = "dim") -> None:
        """A line about the conversation."""
        self.notes.print(Text(printable(text), style=style), soft_wrap=True)

    @contextmanager
    def bar(self, title: str) -> Iterator[Report]:
        """A bar for long work where somebody watches."""
        if not self.interactive:
            yield lambda what, done: None
            return
        with progress_bar(title) as report:
            yield report

    def show(self, picture: Image.Image) -> bool:
        """Show a picture as coloured half blocks; whether the terminal could."""
        if not self.interactive or self.answers.color_system is None:
            return False
        self.answers.print(half_blocks(picture, min(MOST_COLUMNS, self.answers.width)))
        return True


def half_blocks(picture: Image.Image, columns: int) -> Text:
    """The picture in `columns` characters a line: the upper pixel of two is a half block, the lower its background."""
    from PIL import Image

    rows = max(1, round(picture.height * columns / picture.width / 2))
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
    """When each stage ran, a bar each on one time axis; pale where it had the request and did not run yet."""
    ends = [stage.last_chunk for stage in trace.stages.values() if stage.last_chunk is not None]
    whole = max([*ends, trace.finished or 0.0, 1e-9])
    width = max([5, *map(len, trace.stages)])

    def column(seconds: float) -> int:
        return min(int(seconds / whole * columns), columns - 1)

    lines = [f"{'stage':<{width}}  0{f'{whole:.2f} s':>{columns - 1}}"]
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
    """Let `input` edit the line and go back to earlier ones, where the system can."""
    try:
        import readline  # noqa: F401  (to have imported it is enough)
    except ImportError:
        return
