"""Captions: names of emoji as words, the phrases of a request, and which combinations are held out of training.

Pure Python. A caption consists of a `Scene` (what is in the image) and a phrase around it (how a user asks for it).
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass

HUES = {
    "red": 2.0,
    "orange": 28.0,
    "yellow": 50.0,
    "green": 125.0,
    "turquoise": 178.0,
    "blue": 217.0,
    "purple": 275.0,
    "pink": 330.0,
}
"""Colours that things are recoloured to, as degrees."""

BACKGROUNDS = {
    "white": (255, 255, 255),
    "black": (20, 20, 20),
    "grey": (150, 150, 150),
    "red": (222, 50, 50),
    "orange": (245, 150, 40),
    "yellow": (252, 220, 70),
    "green": (70, 170, 80),
    "turquoise": (60, 195, 190),
    "blue": (60, 120, 230),
    "purple": (140, 80, 200),
    "pink": (245, 150, 190),
    "brown": (130, 85, 50),
}

TONES = ("medium-light", "medium-dark", "light", "medium", "dark")
"""Skin tones as they end the names of emoji; longer ones first."""

ASKS = (
    "{x}",
    "{x}",
    "{x}.",
    "Draw {x}",
    "Draw {x}.",
    "draw {x}",
    "Draw me {x}.",
    "Please draw {x}.",
    "Can you draw {x}?",
    "Could you draw {x} for me, please?",
    "Paint {x}.",
    "Show me {x}.",
    "show me {x}",
    "I want to see {x}.",
    "I would like a picture of {x}.",
    "A picture of {x}.",
    "a picture of {x}",
    "Make a picture of {x}.",
    "Picture: {x}",
    "What is {x}?",
    "What does {x} look like?",
    "Tell me about {x}.",
    "Describe {x}.",
    "Write a short story about {x}.",
    "Imagine {x}.",
)
BESIDE = ("{a} and {b}", "{a} next to {b}", "{a} on the left and {b} on the right", "{a} beside {b}")
BEHIND = ("{x} on a {c} background", "{x} in front of a {c} background", "{x} on {c}")
_HELD_OUT_SHARE = {"colour": 10, "background": 10, "beside": 8}
"""One in so many combinations is never seen in training."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What is in a picture: one thing or two, its colour where it was changed or is named, what is behind it."""

    thing: str
    colour: str | None = None
    beside: str | None = None
    background: str | None = None

    def held_out(self) -> str | None:
        """The kind of combination for which this scene is never trained on, or None.

        Neither thing of a pair is trained on before a background that is held out for it, and the order of a pair does
        not matter.
        """
        things = [thing for thing in (self.thing, self.beside) if thing is not None]
        if self.colour is not None and _is_held_out("colour", self.thing, self.colour):
            return "colour"
        if self.background is not None and any(_is_held_out("background", thing, self.background) for thing in things):
            return "background"
        if self.beside is not None and _is_held_out("beside", *sorted(things)):
            return "beside"
        return None

    def words(self, rng: random.Random) -> str:
        """The scene in words; `rng` chooses among ways of saying the same."""
        text = add_article(f"{self.colour} {self.thing}" if self.colour else self.thing, rng)
        if self.beside is not None:
            text = rng.choice(BESIDE).format(a=text, b=add_article(self.beside, rng))
        if self.background is not None:
            text = rng.choice(BEHIND).format(x=text, c=self.background)
        return text


def _is_held_out(kind: str, thing: str, part: str) -> bool:
    digest = hashlib.sha256(f"{kind}|{thing}|{part}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % _HELD_OUT_SHARE[kind] == 0


def add_article(words: str, rng: random.Random) -> str:
    """Mostly with `a` or `an`, as people say it; sometimes bare."""
    return words if rng.random() < 0.2 else a(words)


def a(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def request(scene: Scene, rng: random.Random) -> str:
    """A user's request for the scene."""
    text = rng.choice(ASKS).format(x=scene.words(rng))
    return text[0].upper() + text[1:] if rng.random() < 0.5 else text


def plain_name(name: str, people: bool) -> tuple[str, str | None]:
    """The words of an icon's name, and its skin tone where it is a person with one."""
    name = name.removesuffix("-skin-tone")
    tone = None
    if people:
        tone = next((t for t in TONES if name.endswith(f"-{t}")), None)
        if tone is not None:
            name = name.removesuffix(f"-{tone}").removesuffix("-skin-tone")
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).strip()
    if tone is not None:
        words = f"{words} with {tone.replace('-', ' ')} skin"
    return words, tone
