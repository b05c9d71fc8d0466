"""What the command line says of a model that lacks a part, and of what no setting can help."""

from __future__ import annotations

import pytest
from omnistage_starter.processor import missing_part

from omnistage.cli.common import print_error
from omnistage.core.errors import LimitExceededError, PromptTooLongError
from omnistage.core.types import Modality
from tests.unit.chat_harness import FakeOmni, Processor, make


class TextOnly(Processor):
    input_modalities = frozenset({Modality.TEXT})

    def unsupported_reason(self, kind: Modality) -> str:
        return missing_part(kind)


@pytest.mark.parametrize(
    ("line", "kind"), [("/listen q.wav", Modality.AUDIO), ("/look a.png What is it?", Modality.IMAGE)]
)
def test_a_part_that_is_missing_is_named_with_what_brings_it(line, kind, tmp_path, capsys):
    omni = FakeOmni()
    omni.processor = TextOnly()
    talk, _ = make(omni, tmp_path)
    assert talk.handle(line)
    assert capsys.readouterr().err == f"error: {missing_part(kind)}\n"
    assert not omni.asked


def test_missing_speech_recognition_names_npm_and_the_pull():
    assert missing_part(Modality.AUDIO) == (
        "this starter does not take audio: its speech recognition is missing; with npm installed, run `omnistage pull "
        "starter` again, or send text"
    )


def test_a_prompt_that_the_model_cannot_hold_comes_without_advice_about_limits(capsys):
    print_error(PromptTooLongError("has 9000 tokens, and the language model holds 8192: shorten it", param="prompt"))
    told = capsys.readouterr().err
    assert told == "error: prompt: has 9000 tokens, and the language model holds 8192: shorten it\n"
    print_error(LimitExceededError("900 characters exceed the limit of 800; shorten it", param="prompt"))
    assert "hint: limits are set with --set limits.KEY=VALUE" in capsys.readouterr().err
