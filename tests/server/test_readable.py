"""Bodies that are JSON and still not to be read: halves of characters, and nesting without end."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from omnistage.core.errors import InvalidRequestError
from omnistage.server.http.json_body import check_readable
from tests.server.harness import Running

HALF = "\ud800"
MESSAGES = [{"role": "user", "content": "a"}]


def tool(**change: Any) -> dict[str, Any]:
    function = {"name": "look", "description": "x", "parameters": {"type": "object", "properties": {}}, **change}
    return {"type": "function", "function": function}


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def deep(levels: int) -> str:
    """A mark that is sent as so many lists: what writes JSON must not go that deep itself."""
    return f"deep-{levels}"


def written(body: dict[str, Any]) -> str:
    text = json.dumps(body)  # JSON's escapes carry the half
    return re.sub(r'"deep-(\d+)"', lambda found: "[" * int(found[1]) + "]" * int(found[1]), text)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "chat/completions",
            {"messages": MESSAGES, "tools": [tool(description=HALF)]},
            "tools[0].function.description",
        ),
        (
            "chat/completions",
            {"messages": MESSAGES, "tools": [tool(parameters={HALF: 1})]},
            "tools[0].function.parameters",
        ),
        ("chat/completions", {"messages": MESSAGES, "metadata": {"a": HALF}}, "metadata.a"),
        ("responses", {"input": "a", "metadata": {HALF: "a"}}, "metadata"),
        ("responses", {"input": "a", "metadata": {"a": HALF}, "stream": True}, "metadata.a"),
        ("responses", {"input": "a", "tools": [{"type": "function", "name": "a", "description": HALF}]}, None),
        ("completions", {"prompt": HALF}, "prompt"),
        ("images/generations", {"prompt": HALF}, "prompt"),
        ("videos", {"prompt": HALF}, "prompt"),
        ("audio/speech", {"input": HALF, "voice": "a"}, "input"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a", "zz": deep(300)}]}, None),
        ("chat/completions", {"messages": MESSAGES, "tools": [tool(parameters=deep(400))]}, None),
        ("responses", {"input": "a", "tools": [{"type": "function", "name": "a", "parameters": deep(300)}]}, None),
    ],
)
def test_it_is_refused_with_its_place(server: Running, path: str, body: dict[str, Any], param: str | None) -> None:
    data = written({"model": "lm", **body})
    answer = httpx.post(f"{server.url}/v1/{path}", content=data, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert "surrogate" in error["message"] or "nested" in error["message"]
    if param is not None:
        assert error["param"] == param


def test_what_is_deep_but_not_too_deep_passes() -> None:
    check_readable({"a": nested(90), "b": "text 你好 \U0001f600", "c": [1, None, True, 2.5]})
    with pytest.raises(InvalidRequestError, match="nested"):
        check_readable(nested(120))
    with pytest.raises(InvalidRequestError) as caught:
        check_readable({"x" * 500: {HALF + "key": {"end": HALF}}})
    assert caught.value.param is not None
    caught.value.param.encode()
