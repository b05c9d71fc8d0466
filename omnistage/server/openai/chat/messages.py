"""The form of chat messages for the OpenAPI document; `parse_messages` checks them, where their media are decoded."""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string"}
_URL: dict[str, Any] = {
    "description": "A `data:` URL; others as far as the service allows them.",
    "anyOf": [_TEXT, {"type": "object", "required": ["url"], "properties": {"url": _TEXT, "detail": _TEXT}}],
}
_COUNT = {"type": "integer", "minimum": 1}


def _part(kinds: list[str], required: str, **fields: Any) -> dict[str, Any]:
    properties = {"type": {"enum": kinds}, **fields}
    return {"type": "object", "required": ["type", required], "properties": properties}


MESSAGE_SCHEMAS: dict[str, Any] = {
    "MessagePart": {
        "description": "A piece of a message: text, a picture, a sound, a video.",
        "anyOf": [
            _part(["text", "input_text", "output_text"], "text", text=_TEXT),
            _part(["image_url", "input_image"], "image_url", image_url=_URL),
            _part(
                ["input_audio"],
                "input_audio",
                input_audio={
                    "type": "object",
                    "required": ["data"],
                    "properties": {"data": {**_TEXT, "description": "Base64."}, "format": _TEXT},
                },
            ),
            _part(["audio_url"], "audio_url", audio_url=_URL),
            _part(
                ["video_url"],
                "video_url",
                video_url=_URL,
                fps={"type": "number", "exclusiveMinimum": 0},
                min_frames=_COUNT,
                max_frames={**_COUNT, "minimum": 2},
            ),
        ],
    },
    "Message": {
        "description": "One message of a conversation.",
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {
                "anyOf": [
                    {**_TEXT, "minLength": 1},
                    {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/MessagePart"}},
                    {"type": "null", "description": "Of an assistant only."},
                ]
            },
            "name": _TEXT,
            "tool_call_id": _TEXT,
            "tool_calls": {"type": "array", "items": {"$ref": "#/components/schemas/ToolCall"}},
        },
    },
}
