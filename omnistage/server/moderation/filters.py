"""The content filter interface: checks prompts before they run and outputs before they are sent.

A filter is chosen by name (`--content-filter NAME[:ARGUMENT]`), never by an import path: names are registered in code,
or by an installed package under the entry-point group `omnistage.filters`. An exception in a filter ends the request as
a defect: a broken filter lets nothing through.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol

from omnistage.core.errors import ConfigError

if TYPE_CHECKING:
    from omnistage.core.types import AudioChunk, ImageChunk, VideoChunk
    from omnistage.media.context import Decoded

GROUP = "omnistage.filters"
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class Pass:
    """Let it through except the last `hold` characters, which are checked again with the text that follows."""

    hold: int = 0


@dataclass(frozen=True, slots=True)
class Redact:
    """Send `text` instead of what was checked and not sent yet, except its last `hold` characters."""

    text: str
    hold: int = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    """End the request: 400 for a prompt, finish reason `content_filter` for an answer."""


Verdict = Pass | Redact | Refuse


@dataclass(frozen=True, slots=True)
class FilterContext:
    """The request's holder and model."""

    holder: str
    model: str


@dataclass(frozen=True, slots=True)
class PromptText:
    """One text of a prompt. `role` is its message's; None for a prompt without messages."""

    text: str
    role: str | None = None


@dataclass(slots=True)
class AnswerText:
    """One generated text of a request, as it grows."""

    index: int = 0
    """Its index among the request's `n` texts."""
    held: str = ""
    """Text that has not been sent: what was held back, then what is new."""
    ended: bool = False
    """The text is complete; nothing can be held back any longer."""
    pieces: list[str] = field(default_factory=list)

    @property
    def sent(self) -> str:
        """The text that has been sent."""
        if len(self.pieces) > 1:
            self.pieces[:] = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""

    def before(self, chars: int) -> str:
        """The last characters that were sent; cheap for any length."""
        tail: list[str] = []
        for piece in reversed(self.pieces):
            if chars <= 0:
                break
            tail.append(piece[-chars:])
            chars -= len(tail[-1])
        return "".join(reversed(tail))


class RequestFilter:
    """The filter of one request: a base that lets everything through. Its methods are called one at a time."""

    async def check_prompt(self, texts: tuple[PromptText, ...]) -> Verdict:
        """Check all text of the prompt before it runs. `Redact` counts as `Refuse`."""
        return Pass()

    def check_media(self, media: Decoded) -> Verdict:
        """Check an image, audio clip or video of the prompt, in a worker thread."""
        return Pass()

    async def check_output(self, answer: AnswerText) -> Verdict:
        """Check a generated text whenever it has grown, and once more at its end."""
        return Pass()

    async def check_made(self, chunk: AudioChunk | ImageChunk | VideoChunk) -> Verdict:
        """Check generated audio, an image (previews too) or a video before it is sent. `Redact` counts as `Refuse`."""
        return Pass()


PassingFilter = RequestFilter


class ContentFilter(Protocol):
    """One object for the service, which opens a filter for each request."""

    def open(self, context: FilterContext) -> RequestFilter: ...


FilterFactory = Callable[[str | None], ContentFilter]
"""Creates a filter from its argument, the text after the colon."""
_FACTORIES: dict[str, FilterFactory] = {}


def register_filter(name: str, factory: FilterFactory) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a valid filter name; use lower-case letters, digits, - and _")
    if name in _FACTORIES:
        raise ConfigError(f"there is already a filter {name!r}; choose another name")
    _FACTORIES[name] = factory


def make_filter(spec: str) -> ContentFilter:
    """The filter that `NAME[:ARGUMENT]` names. Raises `ConfigError`."""
    name, _, argument = spec.partition(":")
    factory = _FACTORIES.get(name)
    if factory is None:
        installed = entry_points(group=GROUP)
        if not _NAME.fullmatch(name) or name not in installed.names:
            names = ", ".join(sorted(installed.names | _FACTORIES.keys()))
            raise ConfigError(f"there is no filter {name[:64]!r}; filters: {names}", param="--content-filter")
        factory = installed[name].load()
    return factory(argument or None)


def _wordlist(argument: str | None) -> ContentFilter:
    from omnistage.server.moderation.wordlist import WordList

    return WordList.from_argument(argument)


register_filter("wordlist", _wordlist)
