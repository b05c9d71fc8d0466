"""What may be said: a hook that sees prompts before they run and answers before they are sent.

A filter is chosen by its name (`--content-filter NAME[:ARGUMENT]`), never by an import path: names are registered in
code, or by an installed package under the entry-point group `omnistage.filters`. What a filter raises ends the request
as a defect: nothing passes a filter that does not work.
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
    """Let it through, but for the last `hold` characters: those are shown again, with more behind them."""

    hold: int = 0


@dataclass(frozen=True, slots=True)
class Redact:
    """Send `text` in place of what was shown and not sent yet, but for its last `hold` characters."""

    text: str
    hold: int = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    """End the request: 400 for a prompt, finish reason `content_filter` for an answer."""


Verdict = Pass | Redact | Refuse


@dataclass(frozen=True, slots=True)
class FilterContext:
    """Whose request it is."""

    holder: str
    model: str


@dataclass(frozen=True, slots=True)
class PromptText:
    """One text of a prompt. `role` is that of its message; None where there are no messages."""

    text: str
    role: str | None = None


@dataclass(slots=True)
class AnswerText:
    """One answer of a request, as it grows."""

    index: int = 0
    """Which of the request's n answers."""
    held: str = ""
    """New text, and what was held back before: none of it has been sent."""
    ended: bool = False
    """No more will come; nothing can be held back any longer."""
    pieces: list[str] = field(default_factory=list)

    @property
    def sent(self) -> str:
        """All that the reader has of this answer."""
        if len(self.pieces) > 1:
            self.pieces[:] = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""

    def before(self, chars: int) -> str:
        """The last characters that were sent; cheap for any length of answer."""
        found: list[str] = []
        for piece in reversed(self.pieces):
            if chars <= 0:
                break
            found.append(piece[-chars:])
            chars -= len(found[-1])
        return "".join(reversed(found))


class RequestFilter(Protocol):
    """The filter of one request. Its methods are called one at a time; those that may be slow are asynchronous."""

    async def check_prompt(self, texts: tuple[PromptText, ...]) -> Verdict:
        """See everything that is written in the prompt, before it runs. `Redact` is not possible here."""
        ...

    def check_media(self, media: Decoded) -> Verdict:
        """See a picture, sound or video of the prompt, in a worker thread."""
        ...

    async def check_output(self, answer: AnswerText) -> Verdict:
        """See an answer whenever it has grown, and once more at its end."""
        ...

    async def check_made(self, made: AudioChunk | ImageChunk | VideoChunk) -> Verdict:
        """See a piece of sound, a picture (previews too) or a video before it is sent. `Redact` is not possible."""
        ...


class ContentFilter(Protocol):
    """What a factory gives: one object for the service, which opens a filter for each request."""

    def open(self, context: FilterContext) -> RequestFilter: ...


class PassingFilter:
    """Lets everything through: a base for filters that look at some of it only."""

    async def check_prompt(self, texts: tuple[PromptText, ...]) -> Verdict:
        return Pass()

    def check_media(self, media: Decoded) -> Verdict:
        return Pass()

    async def check_output(self, answer: AnswerText) -> Verdict:
        return Pass()

    async def check_made(self, made: AudioChunk | ImageChunk | VideoChunk) -> Verdict:
        return Pass()


FilterFactory = Callable[[str | None], ContentFilter]
"""Makes a filter from what stands behind the colon."""
_FACTORIES: dict[str, FilterFactory] = {}


def register_filter(name: str, factory: FilterFactory) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name for a filter; use lower-case letters, digits, - and _")
    if name in _FACTORIES:
        raise ConfigError(f"there is a filter {name!r} already; choose another name")
    _FACTORIES[name] = factory


def make_filter(chosen: str) -> ContentFilter:
    """The filter that `NAME[:ARGUMENT]` names. Raises `ConfigError`."""
    name, _, argument = chosen.partition(":")
    factory = _FACTORIES.get(name)
    if factory is None:
        found = list(entry_points(group=GROUP, name=name)) if _NAME.fullmatch(name) else []
        if not found:
            installed = {entry.name for entry in entry_points(group=GROUP)}
            known = ", ".join(sorted(installed | _FACTORIES.keys()))
            raise ConfigError(f"there is no filter {name[:64]!r}; filters: {known}", param="--content-filter")
        factory = found[0].load()
    return factory(argument or None)


def _wordlist(argument: str | None) -> ContentFilter:
    from omnistage.server.moderation.wordlist import WordList

    return WordList.from_argument(argument)


register_filter("wordlist", _wordlist)
