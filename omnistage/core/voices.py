"""Which of a model's voices a request's `voice` means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omnistage.core.errors import ConfigError, InvalidRequestError
from omnistage.core.validation import short_repr

OPENAI_VOICES = (
    *("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse"),
)
"""Clients send one of these where their user chose none."""


class VoiceNames:
    """A model's voices, and other names for them: those of the configuration, and OpenAI's.

    OpenAI's names mean the model's voices in turn; with a model whose only voice has no name, that voice.
    """

    def __init__(self, voices: Sequence[str], aliases: Mapping[str, str] | None = None, *, speaks: bool = True) -> None:
        self.voices = tuple(voices)
        for alias, voice in (aliases or {}).items():
            if voice not in self.voices:
                hint = f"voices: {', '.join(self.voices)}" if self.voices else "this model has no named voices"
                raise ConfigError(f"there is no voice {short_repr(voice)}; {hint}", param=f"deployment.voices.{alias}")
        own = {name.casefold() for name in self.voices}
        standard = [name for name in OPENAI_VOICES if name not in own] if speaks else []
        in_turn = {name: self.voices[i % len(self.voices)] if self.voices else None for i, name in enumerate(standard)}
        self.aliases: Mapping[str, str | None] = {**in_turn, **(aliases or {})}
        """The voice that each other name means; None: the only one, which has no name."""

    def resolve(self, name: str | None, param: str = "voice") -> str | None:
        """The voice by its own name; upper and lower case do not matter. Raises `InvalidRequestError`."""
        if name is None or (isinstance(name, str) and name in self.voices):
            return name
        if isinstance(name, str):
            folded = name.casefold()
            matches = [voice for voice in self.voices if voice.casefold() == folded]
            if len(matches) == 1:
                return matches[0]
            for alias in (name, folded):
                if alias in self.aliases:
                    return self.aliases[alias]
        hint = f"voices: {', '.join(self.voices)}" if self.voices else "this model has none; leave it out"
        raise InvalidRequestError(f"there is no voice {short_repr(name)}; {hint}", param=param)
