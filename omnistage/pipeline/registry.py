"""Registries of families, components and bridges: the only way from a name in YAML to code.

Names are checked, signatures are checked when something is registered, and no import path is ever taken from a
configuration. A third party adds a family through the entry-point group `omnistage.families`.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from omnistage.errors import RegistryError
from omnistage.types import Modality, OmniTokensPrompt, RequestInfo, StageChunk, StageFeed, StagePayloadIn

if TYPE_CHECKING:
    import numpy as np
    import torch

    from omnistage.chat import ChatMessage
    from omnistage.config import OmniModelConfig, StageConfig
    from omnistage.media.audio import AudioClip
    from omnistage.params import DiffusionParams

_T = TypeVar("_T")
ENTRY_POINT_GROUP = "omnistage.families"
_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")

BridgeResult = tuple[object, Sequence[StagePayloadIn | StageFeed]]
Bridge = Callable[[RequestInfo, object, StageChunk], BridgeResult]
"""`bridge(request, state, chunk) -> (state, inputs)`.

A pure fold over the chunks of the edge's sources: `state` is None at first, then whatever the last call returned.
The first input that it yields starts the downstream stage's work on the request, later ones feed it. The chunk
with `finish` is the last it sees of that source.
"""


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What a component factory is given."""

    model: OmniModelConfig
    stage_name: str
    stage: StageConfig
    device: torch.device
    dtype: torch.dtype
    progress: Callable[[str, float], None] | None = None


ComponentFactory = Callable[[LoadContext], object]


class InputProcessor(Protocol):
    """Turns what a user sends into the entry stage's input. Thread-safe."""

    input_modalities: frozenset[Modality]

    def chat(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> StagePayloadIn:
        """Apply the chat template; media become spans. `tools` are functions that the model may call."""
        ...

    def text(self, prompt: str) -> StagePayloadIn:
        """A bare prompt, no template; special tokens in it stay text."""
        ...

    def tokens(self, prompt: OmniTokensPrompt) -> StagePayloadIn: ...

    def voices(self) -> Sequence[str]:
        """Names that a request's `voice` may take; empty where the model does not speak."""
        ...


@runtime_checkable
class HearingProcessor(Protocol):
    """An input processor whose model takes sounds of some lengths only."""

    def clip_seconds(self) -> tuple[float, float]:
        """The shortest and the longest sound that may be one part of a message."""
        ...


@runtime_checkable
class ReadingProcessor(Protocol):
    """An input processor of a model that can speak a text as it is."""

    def read_aloud(self, text: str) -> list[dict[str, object]]:
        """The conversation that has just this text spoken."""
        ...


@runtime_checkable
class WritingProcessor(Protocol):
    """An input processor of a model that can write down what is said without a thought about it. Thread-safe."""

    def transcribe(self, clip: AudioClip, over: Callable[[], bool] | None = None) -> str:
        """The words in a sound at `ears_rate`; empty where there are none.

        It takes as long as it takes, but asks now and then whether it is `over`: then what it gives is of no use.
        """
        ...

    @property
    def ears_rate(self) -> int:
        """Samples a second that it hears."""
        ...


@runtime_checkable
class PartialProcessor(Protocol):
    """An input processor whose model may be there without some of its parts."""

    def lacking(self, kind: Modality) -> str:
        """Why it does not take this kind of media, and what helps."""
        ...


@runtime_checkable
class DrawingProcessor(Protocol):
    """Turns a request to draw into the entry stage's input. Thread-safe."""

    input_modalities: frozenset[Modality]

    def draw(
        self, prompt: str, images: Sequence[np.ndarray], mask: np.ndarray | None, params: DiffusionParams
    ) -> StagePayloadIn:
        """`images` are `uint8 [h, w, 3]`, `mask` is `uint8 [h, w]`; `params` is all that the request will use."""
        ...

    def voices(self) -> Sequence[str]: ...


AnyProcessor = InputProcessor | DrawingProcessor


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: how to recognise it and everything special that serves it."""

    name: str
    architectures: tuple[str, ...]
    """Values of `architectures` or `model_type` in config.json. `*` matches any causal LM, after all others."""
    pipeline: Path
    components: Mapping[str, ComponentFactory]
    bridges: Mapping[str, Bridge]
    processor: Callable[[OmniModelConfig], AnyProcessor]
    tiny: Callable[..., None] | None = None
    verify: Callable[..., object] | None = None
    aliases: tuple[str, ...] = field(default=())
    variants: tuple[str, ...] = field(default=())
    """What `tiny` takes as `variant`, the default first; empty where it takes none."""


def check_name(kind: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise RegistryError(
            f"{kind} name {name!r} is not a registry name: use lower-case words joined by dots, like 'family.part'"
        )


def check_bridge(name: str, bridge: Bridge) -> None:
    """Raise unless `bridge` takes exactly (request, state, chunk)."""
    if not callable(bridge):
        raise RegistryError(f"bridge {name!r} is not callable; register a function (request, state, chunk)")
    parameters = list(inspect.signature(bridge).parameters.values())
    names = [p.name for p in parameters]
    positional = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if names != ["request", "state", "chunk"] or not positional:
        raise RegistryError(
            f"bridge {name!r} takes ({', '.join(names)}); its signature must be (request, state, chunk)"
        )


def _check_factory(name: str, factory: ComponentFactory) -> None:
    if not callable(factory):
        raise RegistryError(f"component {name!r} is not callable; register a factory that takes a LoadContext")
    required = [p for p in inspect.signature(factory).parameters.values() if p.default is p.empty]
    if len(required) != 1:
        raise RegistryError(f"component factory {name!r} must take one argument, the LoadContext")


class Registry:
    """Families by name, and their components and bridges by qualified name."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._families: dict[str, Family] = {}
        self._components: dict[str, ComponentFactory] = {}
        self._bridges: dict[str, Bridge] = {}
        self._discovered = False

    def register(self, family: Family) -> None:
        """Add a family; nothing is added if any of its names or signatures is wrong."""
        with self._lock:
            check_name("family", family.name)
            if family.name in self._families:
                raise RegistryError(f"family {family.name!r} is registered already")
            for name, factory in family.components.items():
                check_name("component", name)
                _check_factory(name, factory)
                if name in self._components:
                    raise RegistryError(f"component {name!r} is registered already")
            for name, bridge in family.bridges.items():
                check_name("bridge", name)
                check_bridge(name, bridge)
                if name in self._bridges:
                    raise RegistryError(f"bridge {name!r} is registered already")
            self._families[family.name] = family
            self._components.update(family.components)
            self._bridges.update(family.bridges)

    def register_bridge(self, name: str, bridge: Bridge) -> None:
        with self._lock:
            check_name("bridge", name)
            check_bridge(name, bridge)
            if name in self._bridges:
                raise RegistryError(f"bridge {name!r} is registered already")
            self._bridges[name] = bridge

    def register_component(self, name: str, factory: ComponentFactory) -> None:
        with self._lock:
            check_name("component", name)
            _check_factory(name, factory)
            if name in self._components:
                raise RegistryError(f"component {name!r} is registered already")
            self._components[name] = factory

    def families(self) -> Mapping[str, Family]:
        self._discover()
        return dict(self._families)

    def family(self, name: str) -> Family:
        self._discover()
        return _lookup("family", name, self._families)

    def component(self, name: str) -> ComponentFactory:
        self._discover()
        return _lookup("component", name, self._components)

    def bridge(self, name: str) -> Bridge:
        self._discover()
        return _lookup("bridge", name, self._bridges)

    def component_names(self) -> list[str]:
        self._discover()
        return sorted(self._components)

    def bridge_names(self) -> list[str]:
        self._discover()
        return sorted(self._bridges)

    def _discover(self) -> None:
        """Load the built-in families and those of installed packages, once, on first use."""
        with self._lock:
            if self._discovered:
                return
            self._discovered = True
            from omnistage.engines.codec import onnx
            from omnistage.models import builtin_families
            from omnistage.models._diffusers.bridges import BRIDGES

            for name, factory in onnx.COMPONENTS.items():
                self.register_component(name, factory)
            for name, bridge in (*BRIDGES.items(), *onnx.BRIDGES.items()):
                self.register_bridge(name, bridge)
            for family in builtin_families():
                self.register(family)
            for entry in entry_points(group=ENTRY_POINT_GROUP):
                family = entry.load()
                if not isinstance(family, Family):
                    raise RegistryError(f"entry point {entry.name!r} of {ENTRY_POINT_GROUP} is not a Family")
                self.register(family)


def _lookup(kind: str, name: str, table: Mapping[str, _T]) -> _T:
    if name not in table:
        known = ", ".join(sorted(table)) or "none"
        raise RegistryError(f"unknown {kind} {name!r}; known: {known}")
    return table[name]


REGISTRY = Registry()
