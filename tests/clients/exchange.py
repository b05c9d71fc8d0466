"""What the exchanges of every client share: their register, what is asked, and how an answer is judged."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

KEY = "none"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
}
SCHEMA: dict[str, Any] = {**PARAMETERS, "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}}
HELLO = "Say hello to Ann."
CITY = "Name a city."
Exchange = Callable[[str, str], Any]
"""Takes the service's address and a model."""
EXCHANGES: dict[str, dict[str, Exchange]] = {}


def exchange(client: str, way: str) -> Callable[[Exchange], Exchange]:
    def add(function: Exchange) -> Exchange:
        EXCHANGES.setdefault(client, {})[way] = function
        return function

    return add


def need(condition: object, what: object = "") -> None:
    if not condition:
        raise AssertionError(f"not as promised: {what!r}"[:300])


def spoken(url: str, model: str) -> bytes:
    """A WAV file with words, by the service itself."""
    body = json.dumps({"model": model, "input": "The cat sat on the mat.", "response_format": "wav", "voice": "alloy"})
    request = urllib.request.Request(f"{url}/audio/speech", body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        data: bytes = answer.read()
    return data


def openai_client(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=120)
