"""The think block of a text is told from the answer, however the text is cut."""

from __future__ import annotations

import itertools

import pytest

from omnistage.core.errors import InvalidRequestError
from omnistage.core.family import ThinkBlock
from omnistage.core.params import SamplingParams, StructuredOutput
from omnistage.pipeline.intake import RequestOptions
from omnistage.server.reasoning import ReasoningReader, plan_thinking

CHAT = [{"role": "user", "content": "hi"}]
JSON = {"lm": SamplingParams(structured=StructuredOutput(json_object=True))}


def read(opened: bool, *pieces: str) -> tuple[str, str]:
    reader = ReasoningReader(opened)
    pairs = [*map(reader.push, pieces), reader.end()]
    return "".join(pair[0] for pair in pairs), "".join(pair[1] for pair in pairs)


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "answer"),
    [
        (False, "<think>\nHm.\n\nYes.\n</think>\n\nHello", "Hm.\n\nYes.", "Hello"),
        (True, "Hm.\n</think>\n\nHello\n", "Hm.", "Hello\n"),
        (True, "<think>\nHm.</think>Hello", "Hm.", "Hello"),
        (False, "<think>\n\n</think>\n\nHello", "", "Hello"),
        (False, " Hello <think>no</think>", "", " Hello <think>no</think>"),
        (False, "<thing> & <th", "", "<thing> & <th"),
        (False, "  <thi", "", "  <thi"),
        (False, "", "", ""),
        (True, "cut off in </thin", "cut off in </thin", ""),
        (True, "cut off \n", "cut off", ""),
        (False, "<think>a</thinK></think>b</think>c", "a</thinK>", "b</think>c"),
        (True, "a</think>", "a", ""),
    ],
)
def test_a_text_is_split_the_same_wherever_it_is_cut(opened: bool, text: str, reasoning: str, answer: str) -> None:
    assert read(opened, text) == (reasoning, answer)
    assert read(opened, *text) == (reasoning, answer)
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        assert read(opened, text[:first], text[first:second], text[second:]) == (reasoning, answer)


class Switch:
    """A processor whose template opens the block where `opens` says so; None: it has none."""

    def __init__(self, opens: dict[bool | None, bool] | None) -> None:
        self._opens = opens

    def chat(self, *_: object, **__: object) -> object:
        raise AssertionError

    def think_block(self, thinking: bool | None) -> ThinkBlock | None:
        return None if self._opens is None else ThinkBlock(7, self._opens[thinking])


HYBRID = Switch({None: True, True: True, False: False})
ALWAYS = Switch({None: True, True: True, False: True})


def test_a_free_answer_may_have_a_block() -> None:
    for params in (None, {}, SamplingParams(), {"lm": SamplingParams()}):
        assert plan_thinking(HYBRID, CHAT, params, RequestOptions()) == (params, ThinkBlock(7, True))
    assert plan_thinking(HYBRID, "a plain prompt", None, RequestOptions()) == (None, None)
    assert plan_thinking(Switch(None), CHAT, None, RequestOptions()) == (None, None)
    assert plan_thinking(None, CHAT, None, RequestOptions()) == (None, None)
    assert plan_thinking(HYBRID, CHAT, None, RequestOptions(["text", "audio"], thinking=False)) == (None, None)
    with pytest.raises(InvalidRequestError, match="would be spoken"):
        plan_thinking(HYBRID, CHAT, None, RequestOptions(["text", "audio"]))


@pytest.mark.parametrize("processor", [HYBRID, ALWAYS])
def test_a_constraint_begins_behind_the_block(processor: Switch) -> None:
    params, block = plan_thinking(processor, CHAT, JSON, RequestOptions())
    assert block == ThinkBlock(7, True)
    assert isinstance(params, dict)
    assert params["lm"].structured == JSON["lm"].structured.model_copy(update={"after_token": 7})  # type: ignore[union-attr]


def test_a_constraint_begins_at_once_where_there_may_be_no_block() -> None:
    assert plan_thinking(HYBRID, CHAT, JSON, RequestOptions(thinking=False)) == (JSON, None)
    instruct = Switch({None: False, True: False, False: False})
    assert plan_thinking(instruct, CHAT, JSON, RequestOptions()) == (JSON, None)
    assert plan_thinking(instruct, CHAT, JSON, RequestOptions(thinking=True))[1] == ThinkBlock(7, False)


@pytest.mark.parametrize(
    ("processor", "thinking", "reason"),
    [
        (None, True, "does not think"),
        (Switch(None), True, "does not think"),
        (ALWAYS, False, "always thinks"),
    ],
)
def test_what_the_model_cannot_do_is_refused(processor: Switch | None, thinking: bool, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        plan_thinking(processor, CHAT, None, RequestOptions(thinking=thinking))
