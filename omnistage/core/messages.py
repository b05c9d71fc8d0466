"""Chat messages as typed parts, media decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from omnistage.core.clips import AudioClip, VideoClip

if TYPE_CHECKING:
    from PIL import Image

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class ImagePart:
    """`image` is RGB."""

    image: Image.Image


@dataclass(frozen=True, slots=True, eq=False)
class AudioPart:
    clip: AudioClip


@dataclass(frozen=True, slots=True, eq=False)
class VideoPart:
    """`use_audio` is set only where the clip has audio."""

    clip: VideoClip
    use_audio: bool


Part = TextPart | ImagePart | AudioPart | VideoPart


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made. `arguments` is an object, or the text that it wrote where that is none."""

    name: str
    arguments: Mapping[str, Any] | str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a request says about how its chat template is applied, beside `enable_thinking`."""

    variables: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    continue_final: bool = False
    """The last message, an assistant's, is left open, and the answer goes on from there."""
    generation_prompt: bool = True
    """The prompt ends with the opening of the assistant's turn."""

    @property
    def param(self) -> str:
        """The request's field that a model which cannot follow these options refuses."""
        if self.continue_final:
            return "continue_final_message"
        return "chat_template_kwargs" if self.generation_prompt else "add_generation_prompt"


PLAIN_TEMPLATE = TemplateOptions()


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """`parts` is never empty and keeps the order in which the client gave them."""

    role: Role
    parts: tuple[Part, ...]
    name: str | None = None
    """Of the participant; of the function, where the message is a tool's."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None
    """What the assistant thought before, for templates that show it again."""
