"""Streamed text is cut into sentences, whatever it is written in; more in `test_starter_text_to_speech.py`."""

from __future__ import annotations

import pytest

from omnistage.core.sentences import Sentences


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_words_of_code_are_kept_where_they_are_spoken(size: int) -> None:
    text = "Run it. ```make``` builds all.\n```\nmake demo\n```\nDone."
    state, pieces = Sentences(first_words=None, drop_code=False), list[str]()
    for at in range(0, len(text), size):
        state, more = state.push(text[at : at + size])
        pieces += more
    pieces += state.finish()
    assert pieces == ["Run it.", "```make``` builds all.", "```", "make demo", "```", "Done."]
    assert "".join(pieces).replace(" ", "") == "".join(text.split())


def test_sentences_end_without_white_space_after_a_full_width_mark() -> None:
    text = "\u4f60\u597d\u3002\u4f60\u597d\u5417\uff1f\u201d\u597d\uff01\uff01\u597d"
    state, pieces = Sentences(first_words=None).push(text)
    assert [*pieces, *state.finish()] == [
        "\u4f60\u597d\u3002",
        "\u4f60\u597d\u5417\uff1f\u201d\u597d\uff01\uff01",
        "\u597d",
    ]
