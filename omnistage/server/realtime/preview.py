"""The protocol's preview ("beta") had other names for some of its events; a client that asks for it is sent those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_HEADER = "realtime=v1"
_PROTOCOL = "openai-beta.realtime-v1"
_NAMES = {
    "response.output_text.delta": "response.text.delta",
    "response.output_text.done": "response.text.done",
    "response.output_audio.delta": "response.audio.delta",
    "response.output_audio.done": "response.audio.done",
    "response.output_audio_transcript.delta": "response.audio_transcript.delta",
    "response.output_audio_transcript.done": "response.audio_transcript.done",
    "conversation.item.added": "conversation.item.created",
}
_UNKNOWN = frozenset({"conversation.item.done"})
_PARTS = {"output_text": "text", "output_audio": "audio"}
_FORMATS = {"audio/pcm": "pcm16", "audio/pcmu": "g711_ulaw", "audio/pcma": "g711_alaw"}


def asked_for(header: str | None, subprotocols: Sequence[str]) -> bool:
    """Whether a client speaks the preview."""
    return _HEADER in (header or "") or _PROTOCOL in subprotocols


def renamed(event: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """An event as the preview has it; nothing where it has none."""
    if event["type"] in _UNKNOWN:
        return ()
    made = {**event, "type": _NAMES.get(event["type"], event["type"])}
    if "item" in made:
        made["item"] = _item(made["item"])
    if "session" in made:
        made["session"] = _flat(made["session"])
    if "response" in made:
        response = made["response"]
        voice = response["audio"]["output"].get("voice")
        shown = {key: value for key, value in response.items() if key not in ("audio", "output_modalities")}
        shown |= {"output": [_item(item) for item in response["output"]], "voice": voice}
        made["response"] = shown | {"modalities": _modalities(response["output_modalities"])}
    return (made,)


def _item(item: dict[str, Any]) -> dict[str, Any]:
    if "content" not in item:
        return item
    content = [{**part, "type": _PARTS.get(part["type"], part["type"])} for part in item["content"]]
    return {**item, "content": content}


def _modalities(modalities: Sequence[str]) -> list[str]:
    return ["text", "audio"] if "audio" in modalities else ["text"]


def _flat(session: dict[str, Any]) -> dict[str, Any]:
    hearing, speaking = session["audio"]["input"], session["audio"]["output"]
    names = ("id", "object", "model", "instructions", "tools", "tool_choice", "temperature")
    return {
        **{name: session[name] for name in names if name in session},
        "modalities": _modalities(session["output_modalities"]),
        "voice": speaking.get("voice"),
        "input_audio_format": _FORMATS[hearing["format"]["type"]],
        "output_audio_format": _FORMATS[speaking["format"]["type"]],
        "input_audio_transcription": None,
        "turn_detection": hearing["turn_detection"],
        "max_response_output_tokens": session["max_output_tokens"],
    }
