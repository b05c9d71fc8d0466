"""The protocol's preview ("beta"), in both directions: other event names, and flat session settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omnistage.server.realtime.base import JsonObject

_HEADER = "realtime=v1"
_PROTOCOL = "openai-beta.realtime-v1"
_EVENT_NAMES = {
    "response.output_text.delta": "response.text.delta",
    "response.output_text.done": "response.text.done",
    "response.output_audio.delta": "response.audio.delta",
    "response.output_audio.done": "response.audio.done",
    "response.output_audio_transcript.delta": "response.audio_transcript.delta",
    "response.output_audio_transcript.done": "response.audio_transcript.done",
    "conversation.item.added": "conversation.item.created",
}
_NOT_IN_PREVIEW = frozenset({"conversation.item.done"})
_PART_TYPES = {"output_text": "text", "output_audio": "audio"}
_FORMATS = {"pcm16": "audio/pcm", "g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}
_PREVIEW_FORMATS = {name: preview for preview, name in _FORMATS.items()}
_SETTING_PATHS = {
    "modalities": ("output_modalities",),
    "voice": ("audio", "output", "voice"),
    "input_audio_format": ("audio", "input", "format"),
    "output_audio_format": ("audio", "output", "format"),
    "input_audio_transcription": ("audio", "input", "transcription"),
    "input_audio_noise_reduction": ("audio", "input", "noise_reduction"),
    "turn_detection": ("audio", "input", "turn_detection"),
    "speed": ("audio", "output", "speed"),
    "max_response_output_tokens": ("max_output_tokens",),
}


def wants_preview(header: str | None, subprotocols: Sequence[str]) -> bool:
    """Whether a client speaks the preview."""
    return _HEADER in (header or "") or _PROTOCOL in subprotocols


# ------------------------------------------------------------------------------------------------ from the client


def from_preview(values: JsonObject) -> JsonObject:
    """Settings with the preview's flat fields in their new places."""
    settings = {name: value for name, value in values.items() if name not in _SETTING_PATHS}
    for name, path in _SETTING_PATHS.items():
        if name not in values:
            continue
        value = values[name]
        if name == "modalities" and isinstance(value, list):
            value = ["audio"] if "audio" in value else value
        if name.endswith("_audio_format") and isinstance(value, str):
            value = {"type": _FORMATS.get(value, value)}
        for key in reversed(path):
            value = {key: value}
        settings = merge_settings(settings, value)
    return settings


def merge_settings(old: JsonObject, new: JsonObject, groups: tuple[str, ...] = ("audio",)) -> JsonObject:
    """`old` updated with `new`; only `audio` and its `input` and `output` are merged, other values are replaced."""
    merged = dict(old)
    for name, value in new.items():
        if name in groups and isinstance(value, Mapping) and isinstance(merged.get(name), Mapping):
            value = merge_settings(merged[name], dict(value), ("input", "output") if name == "audio" else ())
        merged[name] = value
    return merged


# -------------------------------------------------------------------------------------------------- to the client


def to_preview(event: JsonObject) -> JsonObject | None:
    """An event as the preview has it; None where it has none."""
    if event["type"] in _NOT_IN_PREVIEW:
        return None
    event = {**event, "type": _EVENT_NAMES.get(event["type"], event["type"])}
    if "item" in event:
        event["item"] = _item(event["item"])
    if "session" in event:
        event["session"] = _session(event["session"])
    if "response" in event:
        response = dict(event["response"])
        response["voice"] = response.pop("audio")["output"].get("voice")
        response["output"] = [_item(item) for item in response["output"]]
        response["modalities"] = _modalities(response.pop("output_modalities"))
        event["response"] = response
    return event


def _item(item: JsonObject) -> JsonObject:
    if "content" not in item:
        return item
    content = [{**part, "type": _PART_TYPES.get(part["type"], part["type"])} for part in item["content"]]
    return {**item, "content": content}


def _modalities(modalities: Sequence[str]) -> list[str]:
    return ["text", "audio"] if "audio" in modalities else ["text"]


def _session(session: JsonObject) -> JsonObject:
    audio_input, audio_output = session["audio"]["input"], session["audio"]["output"]
    names = ("id", "object", "model", "instructions", "tools", "tool_choice", "temperature")
    return {
        **{name: session[name] for name in names if name in session},
        "modalities": _modalities(session["output_modalities"]),
        "voice": audio_output.get("voice"),
        "input_audio_format": _PREVIEW_FORMATS[audio_input["format"]["type"]],
        "output_audio_format": _PREVIEW_FORMATS[audio_output["format"]["type"]],
        "input_audio_transcription": audio_input.get("transcription"),
        "turn_detection": audio_input["turn_detection"],
        "max_response_output_tokens": session["max_output_tokens"],
    }
