"""`omnistage chat`, with a front door that answers from a list."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from omnistage.cli import app
from omnistage.cli import terminal as terminal_module
from omnistage.cli.conversation import UserMessage, next_file, split_file
from omnistage.cli.terminal import Terminal, half_blocks, printable, timeline
from omnistage.core.errors import (
    LimitExceededError,
    StageError,
    UnsupportedModalityError,
)
from omnistage.core.params import DiffusionParams, SamplingParams
from omnistage.core.types import Modality
from omnistage.media.audio_output import AudioOutput
from omnistage.pipeline.outputs import OutputChunk, StageTrace, Trace
from tests.unit.chat_harness import ALL, FakeOmni, Processor, make

# --------------------------------------------------------------------------------------------- the conversation


def test_an_answer_streams_and_the_next_question_tells_of_it(tmp_path):
    omni = FakeOmni("It is Paris.", "Yes.")
    talk, screen = make(omni, tmp_path)
    assert talk.handle("  What is the capital of France?  ")
    assert talk.handle("Sure?")
    assert screen.getvalue() == "It is Paris. \nYes. \n"
    messages, _, modalities = omni.asked[1]
    assert [(message["role"], message["content"]) for message in messages] == [
        ("user", [{"type": "text", "text": "What is the capital of France?"}]),
        ("assistant", "It is Paris. "),
        ("user", [{"type": "text", "text": "Sure?"}]),
    ]
    assert modalities == (Modality.TEXT,)


def test_new_forgets_the_turns_and_keeps_the_system_message(tmp_path):
    omni = FakeOmni("one", "two")
    talk, _ = make(omni, tmp_path)
    talk.conversation.system = "Be brief."
    talk.handle("a")
    talk.handle("/new")
    talk.handle("b")
    assert [message["role"] for message in omni.asked[1][0]] == ["system", "user"]


def test_empty_lines_are_passed_over_and_quit_ends(tmp_path):
    talk, _ = make(FakeOmni(), tmp_path)
    assert talk.handle("   ")
    assert not talk.handle("/quit")


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(tmp_path):
    omni = FakeOmni(KeyboardInterrupt(), "more")
    talk, screen = make(omni, tmp_path)
    assert talk.handle("Tell me all")
    assert "half \n(stopped)" in screen.getvalue()
    assert omni.closed == 1
    talk.handle("go on")
    assert omni.asked[1][0][1] == {"role": "assistant", "content": "half "}
    assert talk.errors == 0


def test_an_error_is_one_line_and_its_question_is_not_remembered(tmp_path, capsys):
    omni = FakeOmni(StageError("the stage\nfailed"), "fine")
    talk, _ = make(omni, tmp_path)
    assert talk.handle("a")
    assert talk.handle("b")
    assert capsys.readouterr().err == "error: the stage failed\n"
    assert len(omni.asked[1][0]) == 1
    assert talk.errors == 1


def test_a_reply_that_fails_half_way_leaves_no_word_for_the_next(tmp_path, capsys):
    class Failing(FakeOmni):
        def stream_chat(self, messages, params=None, *, modalities, voice=None):
            if not self.asked:
                self.asked.append((messages, params, modalities))
                yield OutputChunk("r", Modality.TEXT, text="one unfini")
                raise StageError("too slow")
            yield from super().stream_chat(messages, params, modalities=modalities, voice=voice)

    talk, screen = make(Failing("fine"), tmp_path, interactive=True)
    talk.handle("first")
    assert screen.getvalue() == "one unfini\n"
    talk.handle("second")
    assert screen.getvalue().split() == ["one", "unfini", "fine"]
    assert [turn.message.text for turn in talk.conversation.turns] == ["second"]


def test_what_is_too_long_loses_its_oldest_turns_and_says_so(tmp_path):
    omni = FakeOmni("1", "2", "3", "4", most=3)
    talk, screen = make(omni, tmp_path)
    for line in ("a", "b", "c"):
        talk.handle(line)
    assert "the oldest turn was left out" in screen.getvalue()
    assert [message["content"] for message in omni.asked[2][0]][1] == "2 "
    assert len(talk.conversation.turns) == 3


def test_a_question_that_is_too_long_by_itself_forgets_nothing(tmp_path, capsys):
    omni = FakeOmni("1", LimitExceededError("too many seconds"), LimitExceededError("too many seconds"), "2")
    talk, _ = make(omni, tmp_path)
    talk.handle("a")
    talk.handle("b")
    assert "too many seconds" in capsys.readouterr().err
    talk.handle("c")
    assert len(omni.asked[-1][0]) == 3


def test_control_characters_of_a_model_do_not_reach_the_terminal(tmp_path):
    talk, screen = make(FakeOmni("a\x1b]0;owned\x07b\x9bc\td"), tmp_path)
    talk.handle("hi")
    assert screen.getvalue() == "a]0;ownedbc\td \n"
    assert printable("é\r\n") == "é\n"


# ---------------------------------------------------------------------------------------------------- commands


def test_speech_is_written_where_it_is_on(tmp_path):
    omni = FakeOmni("one", "two", "three")
    talk, screen = make(omni, tmp_path, sampling=SamplingParams(max_tokens=5))
    talk.handle("/speak on")
    talk.handle("a")
    talk.handle("b")
    talk.handle("/speak off")
    talk.handle("c")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["answer-1.wav", "answer-2.wav"]
    assert "answer-2.wav: 0.1 s of speech" in screen.getvalue()
    assert [modalities for _, _, modalities in omni.asked] == [ALL[:2], ALL[:2], ALL[:1]]
    assert omni.asked[0][1] == {"think": SamplingParams(max_tokens=5)}


def test_a_picture_is_drawn_beside_the_conversation(tmp_path):
    omni = FakeOmni("", "fine")
    talk, screen = make(omni, tmp_path, diffusion=DiffusionParams(seed=3))
    talk.handle("/draw a red apple")
    path = tmp_path / "out" / "picture-1.png"
    assert Image.open(path).size == (4, 4)
    assert screen.getvalue() == f"{path}\n"
    assert omni.asked[0] == (
        [{"role": "user", "content": "a red apple"}],
        {"draw": DiffusionParams(seed=3)},
        (Modality.IMAGE,),
    )
    talk.handle("hello")
    assert len(omni.asked[1][0]) == 1


def test_a_terminal_with_colour_shows_the_picture(tmp_path):
    talk, screen = make(FakeOmni(""), tmp_path, interactive=True)
    talk.handle("/draw it")
    assert "\x1b[38;2;200;200;200;48;2;200;200;200m▀" in screen.getvalue()


def test_files_are_heard_and_seen_with_words_beside_them(tmp_path):
    sound, picture = tmp_path / "my sound.wav", tmp_path / "p.png"
    sound.write_bytes(b"RIFF")
    picture.write_bytes(b"PNG")
    omni = FakeOmni("1", "2", "3", "4")
    talk, _ = make(omni, tmp_path)
    talk.handle(f"/listen {sound}")
    talk.handle(f"/listen '{sound}' Who is this?")
    talk.handle(f"/look {picture}")
    sound.unlink()  # what was said stays said
    talk.handle("And now?")
    said = [message["content"] for message in omni.asked[3][0] if message["role"] == "user"]
    assert said[0] == [{"type": "audio", "audio": b"RIFF"}]
    assert said[1] == [{"type": "audio", "audio": b"RIFF"}, {"type": "text", "text": "Who is this?"}]
    assert said[2] == [{"type": "image", "image": b"PNG"}, {"type": "text", "text": "What is in this picture?"}]


def test_what_is_understood_of_a_sound_is_shown_and_saved(tmp_path):
    class Ears(Processor):
        audio_sample_rate = 16_000

        def transcribe(self, clip) -> str:
            return f"{len(clip.samples)} samples"

    sound = AudioOutput(np.full(2400, 0.1, np.float32), 24_000).save(tmp_path / "a.wav")
    omni = FakeOmni("Indeed.")
    omni.processor = Ears()
    talk, screen = make(omni, tmp_path)
    talk.handle(f"/listen {sound}")
    assert screen.getvalue() == "(transcript: 1600 samples)\nIndeed. \n"
    talk.handle(f"/save {tmp_path / 'kept'}")
    saved = (tmp_path / "kept" / "conversation.txt").read_text()
    assert saved == "you: [a.wav]\ntranscript: 1600 samples\nmodel: Indeed. \n"
    assert omni.asked[0][0][0]["content"][0]["type"] == "audio"


def test_save_writes_text_messages_and_files(tmp_path):
    sound = tmp_path / "hello.wav"
    sound.write_bytes(b"RIFF")
    talk, screen = make(FakeOmni("Hi.", "", "No."), tmp_path)
    talk.handle("/speak on")
    talk.handle(f"/listen {sound}")
    talk.handle("/draw it")
    talk.handle("ok?")
    talk.handle(f"/save {tmp_path / 'kept'}")
    kept = tmp_path / "kept"
    assert (kept / "conversation.txt").read_text() == "you: [hello.wav]\nmodel: Hi. \nyou: ok?\nmodel: No. \n"
    messages = json.loads((kept / "conversation.json").read_text())
    assert messages[0] == {"role": "user", "content": [{"type": "audio", "audio": "input-1.wav"}]}
    names = {"conversation.txt", "conversation.json", "input-1.wav", "answer-1.wav", "answer-2.wav", "picture-1.png"}
    assert {path.name for path in kept.iterdir()} == names
    assert (kept / "input-1.wav").read_bytes() == b"RIFF"
    assert all(name in screen.getvalue() for name in names)


def test_saving_into_the_folder_of_its_files_copies_nothing(tmp_path):
    talk, _ = make(FakeOmni("Hi."), tmp_path)
    talk.handle("/speak on")
    talk.handle("a")
    talk.handle(f"/save {tmp_path / 'out'}")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "answer-1.wav",
        "conversation.txt",
        "conversation.json",
    }


def test_the_trace_is_of_the_last_answer(tmp_path):
    talk, screen = make(FakeOmni("Hi."), tmp_path)
    talk.handle("a")
    talk.handle("/trace")
    assert "request r: 500.0 ms in all" in screen.getvalue()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/dance", "unknown command /dance; /help lists the commands"),
        ("/draw", "the text is missing; use /draw TEXT"),
        ("/speak loudly", "use /speak on or /speak off"),
        ("/listen", "the file is missing; use /listen FILE"),
        ("/look nowhere.png", "no such file"),
        ("/save", "the folder is missing; use /save DIR"),
        ("/save /proc/x", "/proc/x: No such file or directory"),
        ("/trace", "there is no reply yet"),
    ],
)
def test_a_command_that_cannot_be_done_says_why_in_one_line(line, says, tmp_path, capsys):
    talk, _ = make(FakeOmni(), tmp_path)
    assert talk.handle(line)
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1


def test_commands_follow_what_the_model_gives_and_takes(tmp_path, capsys):
    omni = FakeOmni(gives=(Modality.TEXT,))
    omni.processor.input_modalities = frozenset({Modality.TEXT})
    talk, screen = make(omni, tmp_path)
    for line in ("/speak on", "/draw it", "/listen a.wav", "/look a.png"):
        talk.handle(line)
    told = capsys.readouterr().err
    missing = ("speech output", "picture output", "audio input", "picture input")
    assert all(f"this model has no {name};" in told for name in missing)
    talk.handle("/help")
    assert screen.getvalue().count("not supported by this model") == 4


def test_a_model_that_does_not_write_is_refused(tmp_path):
    with pytest.raises(UnsupportedModalityError, match="does not chat"):
        make(FakeOmni(gives=(Modality.IMAGE,)), tmp_path)


# ----------------------------------------------------------------------------------------------- the terminal


def test_half_blocks_hold_two_pixels_each():
    picture = Image.new("RGB", (2, 2), (255, 0, 0))
    picture.putpixel((1, 1), (0, 0, 255))
    text = half_blocks(picture, 2)
    assert text.plain == "▀▀"
    assert [str(span.style) for span in text.spans] == ["#ff0000 on #ff0000", "#ff0000 on #0000ff"]
    assert len(half_blocks(Image.new("RGB", (40, 20)), 8).plain.splitlines()) == 2


def test_ctrl_c_at_the_prompt_gives_up_the_line_and_ctrl_d_ends(monkeypatch):
    typed = iter(["one", KeyboardInterrupt(), "two", EOFError()])

    def read(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(terminal_module, "_use_history", lambda: None)
    screen = io.StringIO()
    lines = list(Terminal(True, Console(file=screen), Console(file=screen)).lines())
    assert lines == ["one", "two"]
    assert "with Ctrl-D or /quit" in screen.getvalue()


def test_names_are_counted_on_and_files_may_have_blanks(tmp_path, monkeypatch):
    (tmp_path / "answer-1.wav").touch()
    assert next_file(tmp_path, "answer", ".wav").name == "answer-2.wav"
    (tmp_path / "a b.wav").touch()
    monkeypatch.chdir(tmp_path)
    assert split_file("a b.wav") == ("a b.wav", "")
    assert split_file("'a b.wav'  what?") == ("a b.wav", "what?")
    assert split_file("c.wav what is it?") == ("c.wav", "what is it?")
    assert str(UserMessage("what?", Modality.AUDIO, Path("x/a.wav"))) == "[a.wav] what?"


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def piped(monkeypatch):
    """Runs the command with lines on standard input and a front door that answers."""

    def run(omni: FakeOmni, lines: str | bytes, *options: str, code: int = 0):
        module = ModuleType("omnistage.omni")
        module.Omni = omni  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "omnistage.omni", module)
        result = CliRunner().invoke(app, ["chat", "m", *options], input=lines)
        assert result.exit_code == code, result.output
        return result

    return run


def test_lines_from_a_pipe_are_answered_one_by_one_without_escape_codes(piped, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    omni = FakeOmni("Paris.", "Rome.")
    result = piped(omni, "France?\nItaly?\n", "--speak", str(tmp_path), "--max-tokens", "9", "--system", "Be brief.")
    assert result.stdout == "Paris. \nRome. \n"
    assert "\x1b" not in result.stdout
    assert (tmp_path / "answer-2.wav").is_file()
    assert omni.asked[0][0][0] == {"role": "system", "content": "Be brief."}
    assert omni.asked[0][1] == {"think": SamplingParams(max_tokens=9)}


def test_bytes_that_are_no_text_do_not_end_the_conversation(piped):
    omni = FakeOmni("one", "two")
    assert piped(omni, b"\xff\xfe?\nnext\n").stdout == "one \ntwo \n"
    assert omni.asked[0][0][0]["content"] == [{"type": "text", "text": "\ufffd\ufffd?"}]


def test_a_script_is_told_that_a_line_failed(piped):
    result = piped(FakeOmni(StageError("broken"), "Rome."), "France?\nItaly?\n", code=2)
    assert result.stdout == "Rome. \n"
    assert "error: broken" in result.stderr


# ---------------------------------------------------------------------------------------------- the timeline


def test_the_timeline_has_a_bar_a_stage_on_one_axis():
    trace = Trace("r", 0.0, finished=1.0)
    trace.stages["think"] = StageTrace("think", 0.0, 0.2, first_chunk=0.3, last_chunk=0.5)
    trace.stages["speak"] = StageTrace("speak", 0.4, 0.4, first_chunk=0.6, last_chunk=1.0)
    trace.stages["draw"] = StageTrace("draw")
    assert timeline(trace, 10).splitlines() == [
        "stage  0   1.00 s",
        "think  ░░████",
        "speak      ██████",
        "draw",
    ]
