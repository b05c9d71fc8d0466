"""Ctrl-C in `omnistage chat`, wherever it lands."""

from __future__ import annotations

import io
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from omnistage.cli import terminal as terminal_module
from omnistage.cli.chat import chat
from omnistage.cli.generate import SamplingOptions
from omnistage.cli.interrupts import Interrupts
from omnistage.cli.options import ModelOptions
from omnistage.cli.terminal import Terminal
from omnistage.core.cancellation import current_cancellation
from omnistage.core.types import Modality
from omnistage.pipeline.output_assembler import OutputBuffer
from omnistage.pipeline.outputs import OutputChunk
from tests.hang_guard import HANG_SECONDS
from tests.unit.chat_harness import FakeOmni, make

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")]


@pytest.fixture(autouse=True)
def _as_in_a_terminal() -> Iterator[None]:
    """A shell's background starts its programs with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def cancelled() -> None:
    """Wait until the work of this thread is cancelled."""
    event = threading.Event()
    with current_cancellation().on_cancel(event.set):
        assert event.wait(HANG_SECONDS)


class Talker(FakeOmni):
    """Presses Ctrl-C at a place of its reply, where nothing must be interrupted, and goes on until it is stopped."""

    def __init__(self, place: str) -> None:
        super().__init__("one two three", "four")
        self.place: str | None = place
        self.done: list[str] = []

    def press(self, place: str) -> None:
        if place == self.place:
            self.place = None
            ctrl_c()
            cancelled()
        self.done.append(place)

    def stream_chat(self, messages, params=None, *, modalities, voice=None) -> Iterator[OutputChunk]:
        self.press("request")
        items = super().stream_chat(messages, params, modalities=modalities, voice=voice)

        def stream() -> Iterator[OutputChunk]:
            try:
                for item in items:
                    self.press("item")
                    yield item
            finally:
                self.press("abort")
                items.close()  # type: ignore[attr-defined]

        return stream()


@pytest.mark.parametrize("place", ["request", "item", "abort"])
def test_ctrl_c_stops_a_reply_and_interrupts_nothing_in_it(place: str, tmp_path: Path) -> None:
    omni = Talker(place)
    talk, screen = make(omni, tmp_path)
    with talk._terminal.interrupts:
        assert talk.handle("Tell me all")
        assert place in omni.done  # what came behind Ctrl-C
        assert omni.closed == 1
        assert ("(stopped)" in screen.getvalue()) == (place != "abort")  # the reply was whole by then
        ctrl_c()  # between two lines: there is nothing to stop, and nothing happens
        omni.answers = ["four"]
        assert talk.handle("go on")
    assert screen.getvalue().endswith("four \n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_was_said_before_ctrl_c_is_kept(tmp_path: Path) -> None:
    omni = FakeOmni("one two three", "four")
    talk, screen = make(omni, tmp_path)
    write = talk._terminal.output.file.write

    def pressed(text: str) -> int:
        if text == "two ":
            ctrl_c()
            cancelled()
        return write(text)

    talk._terminal.output.file.write = pressed  # type: ignore[method-assign]
    with talk._terminal.interrupts:
        assert talk.handle("Count")
    assert screen.getvalue() == "one two \n(stopped)\n"
    assert [turn.reply for turn in talk.conversation.turns] == ["one two "]


def test_a_second_ctrl_c_does_not_wait_for_what_cannot_be_cancelled() -> None:
    interrupts = Interrupts()
    with interrupts:
        with interrupts.cancelling():
            ctrl_c()
            cancelled()
            with pytest.raises(KeyboardInterrupt):
                ctrl_c()
        with interrupts.cancelling() as work:  # the next work is another one
            assert not work.cancelled


def test_a_lock_that_is_being_taken_back_is_not_left_half_way() -> None:
    """Ctrl-C that raises while `Condition.wait` takes its lock back ends in a `RuntimeError`: it is released unheld."""
    buffer, waiting, interrupts = OutputBuffer(4), threading.Event(), Interrupts()
    main = threading.get_ident()

    def produce() -> None:
        waiting.wait(HANG_SECONDS)
        with buffer._lock:  # the one who waits is woken, and needs the lock to go on
            buffer._items.append(OutputChunk("r", Modality.TEXT, text="x"))
            buffer._has_items.notify()
            signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=produce)
    thread.start()
    with interrupts, interrupts.cancelling():
        waiting.set()
        item = buffer.get()
        cancelled()
    thread.join()
    assert item is not None
    assert item.text == "x"
    assert not buffer._lock.locked()


def test_ctrl_c_at_the_prompt_raises_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["one", None, "two"])

    def read(prompt: str) -> str:
        line = next(typed, "")
        if line is None:
            ctrl_c()
            pytest.fail("the line was read on")
        if not line:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(terminal_module, "_use_history", lambda: None)
    screen = io.StringIO()
    terminal = Terminal(True, Console(file=screen), Console(file=screen))
    lines = []
    with terminal.interrupts:
        for line in terminal.lines():
            ctrl_c()
            lines.append(line)
    assert lines == ["one", "two"]
    assert screen.getvalue().count("with Ctrl-D or /quit") == 1


def test_ctrl_c_while_a_pipe_is_read_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe(io.StringIO):
        def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
            line = super().readline()
            if not line:
                ctrl_c()
            return line

    monkeypatch.setattr("sys.stdin", Pipe("one\n"))
    screen = io.StringIO()
    terminal, omni = Terminal(False, Console(file=screen), Console(file=screen)), FakeOmni("Paris.")
    monkeypatch.setattr(Terminal, "here", lambda: terminal)
    monkeypatch.setattr(ModelOptions, "load", lambda self, model, progress: omni)
    with pytest.raises(KeyboardInterrupt):
        chat("m", SamplingOptions(), ModelOptions())
    assert screen.getvalue() == "Paris. \n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_others_stay() -> None:
    pressed: list[int] = []

    def handler(number: int, frame: object) -> None:
        pressed.append(number)

    signal.signal(signal.SIGINT, handler)
    with Interrupts() as interrupts, interrupts.cancelling() as work:
        ctrl_c()
        assert pressed == [signal.SIGINT]
        assert not work.cancelled
    assert signal.getsignal(signal.SIGINT) is handler
