"""The registry of families, components and bridges: the only way from a name in YAML to code.

Names are checked, signatures are checked when something is registered, and no import path is ever taken from a
configuration. A third party adds a family through the entry-point group `omnistage.families`.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import TypeVar

from omnistage.core.errors import RegistryError
from omnistage.core.family import Bridge, ComponentFactory, Family

_T = TypeVar("_T")
ENTRY_POINT_GROUP = "omnistage.families"
_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")


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


class Registry:
    """Families by name, and their components and bridges by qualified name."""

    def __init__(self, builtin: Callable[[Registry], None] | None = None) -> None:
        """`builtin` registers what comes with the package, when something is first looked up."""
        self._builtin = builtin
        self._lock = threading.RLock()
        self._families: dict[str, Family] = {}
        self._components: dict[str, ComponentFactory] = {}
        self._bridges: dict[str, Bridge] = {}
        self._text_bridges: set[str] = set()
        self._discovered = False

    def register(self, family: Family) -> None:
        """Add a family; nothing is added if any of its names or signatures is wrong."""
        with self._lock:
            check_name("family", family.name)
            if family.name in self._families:
                raise RegistryError(f"family {family.name!r} is registered already")
            for name, factory in family.components.items():
                self._check_component(name, factory)
            for name, bridge in family.bridges.items():
                self._check_bridge(name, bridge)
            if unknown := family.text_bridges - family.bridges.keys():
                raise RegistryError(f"text_bridges of {family.name!r}: {min(unknown)!r} is none of its bridges")
            self._families[family.name] = family
            self._components.update(family.components)
            self._bridges.update(family.bridges)
            self._text_bridges |= family.text_bridges

    def register_bridge(self, name: str, bridge: Bridge, *, text_only: bool = False) -> None:
        """`text_only`: it reads its sources' text and never their hidden states."""
        with self._lock:
            self._check_bridge(name, bridge)
            self._bridges[name] = bridge
            if text_only:
                self._text_bridges.add(name)

    def register_component(self, name: str, factory: ComponentFactory) -> None:
        with self._lock:
            self._check_component(name, factory)
            self._components[name] = factory

    def _check_bridge(self, name: str, bridge: Bridge) -> None:
        check_name("bridge", name)
        check_bridge(name, bridge)
        if name in self._bridges:
            raise RegistryError(f"bridge {name!r} is registered already")

    def _check_component(self, name: str, factory: ComponentFactory) -> None:
        check_name("component", name)
        if not callable(factory):
            raise RegistryError(f"component {name!r} is not callable; register a factory that takes a LoadContext")
        required = [p for p in inspect.signature(factory).parameters.values() if p.default is p.empty]
        if len(required) != 1:
            raise RegistryError(f"component factory {name!r} must take one argument, the LoadContext")
        if name in self._components:
            raise RegistryError(f"component {name!r} is registered already")

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

    def text_bridges(self) -> frozenset[str]:
        """Those that never read hidden states of their sources."""
        self._discover()
        return frozenset(self._text_bridges)

    def component_names(self) -> list[str]:
        self._discover()
        return sorted(self._components)

    def bridge_names(self) -> list[str]:
        self._discover()
        return sorted(self._bridges)

    def _discover(self) -> None:
        """Register what comes with the package and the families of installed packages, once, on first use."""
        with self._lock:
            if self._discovered:
                return
            self._discovered = True
            if self._builtin is not None:
                self._builtin(self)
            for entry in entry_points(group=ENTRY_POINT_GROUP):
                family = entry.load()
                if not isinstance(family, Family):
                    raise RegistryError(f"entry point {entry.name!r} of {ENTRY_POINT_GROUP} is not a Family")
                self.register(family)


def _lookup(kind: str, name: str, table: Mapping[str, _T]) -> _T:
    if name not in table:
        names = ", ".join(sorted(table)) or "none"
        raise RegistryError(f"unknown {kind} {name!r}; known: {names}")
    return table[name]
