"""Merges configuration layers, later over earlier, and keeps the source of each value."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from omnistage.config.located import KeyPath, LocatedConfigError, Source, dotted
from omnistage.config.problems import keys_of, model_at
from omnistage.config.yamlio import Document, parse_value
from omnistage.core.graph import did_you_mean
from omnistage.core.validation import is_utf8, short_repr

SET = Source("--set")
_MAX_KEY = 300
_SECTIONS = ("pipeline", "deployment", "limits")
_STAGES: KeyPath = ("pipeline", "stages")
_ANY_ENGINE = ("output", "params")
"""Keys that a stage keeps where a later layer gives it another engine."""


@dataclass(slots=True)
class Layers:
    """The merged data so far. Mappings merge key by key; other values, lists too, are replaced.

    A stage that is null is removed. One that gets another engine keeps its output and parameters alone.
    """

    data: dict[str, object] = field(default_factory=dict)
    sources: dict[KeyPath, Source] = field(default_factory=dict)

    def add(self, document: Document) -> None:
        """Merge a parsed file."""
        if isinstance(document.data, dict):
            self._merge(self.data, document.data, (), document.sources)

    def set(self, path: KeyPath, value: object, source: Source) -> None:
        """Set one value, creating the sections around it."""
        nested: object = value
        for part in reversed(path[1:]):
            nested = {part: nested}
        sources = dict.fromkeys(_paths_in(value, path), source)
        # A new section has this source; an existing one keeps its own.
        sources |= {path[:end]: self.sources.get(path[:end], source) for end in range(1, len(path))}
        self._merge(self.data, {path[0]: nested}, (), sources)

    def section(self, *path: str) -> dict[str, object]:
        """A copy of a section, empty where there is none."""
        section: object = self.data
        for part in path:
            section = section.get(part) if isinstance(section, dict) else None
        return dict(section) if isinstance(section, dict) else {}

    def apply_overrides(self, overrides: Iterable[str]) -> None:
        """Apply `--set KEY=VALUE` strings, in order."""
        for text in overrides:
            key, equals, value = text.partition("=")
            if not equals or not key.strip():
                raise LocatedConfigError(
                    f"{short_repr(text)} is not KEY=VALUE, like thinker.budget.max_running=4", where=SET
                )
            if len(key) > _MAX_KEY:
                raise LocatedConfigError(f"{short_repr(key)} is longer than any key; check the spelling", where=SET)
            if not is_utf8(text):
                param = key.strip() if is_utf8(key) else None
                raise LocatedConfigError(
                    f"{short_repr(text)} is not UTF-8 text; write it again in UTF-8", param=param, where=SET
                )
            self.set(self.locate(key.strip()), parse_value(value.strip(), f"--set {key.strip()}"), SET)

    def locate(self, key: str) -> KeyPath:
        """The full path of the key of a `--set`.

        It starts with a section or a stage; `stage.key` finds `key` in the stage's budget or params.
        """
        parts = tuple(key.split("."))
        if not all(parts):
            raise LocatedConfigError("has an empty part; write parts joined by single dots", param=key, where=SET)
        stages = self._stages()
        if parts[0] not in _SECTIONS:
            if parts[0] not in stages:
                raise LocatedConfigError(
                    f"starts with neither a stage nor a section; {did_you_mean(parts[0], (*stages, *_SECTIONS))}",
                    param=key,
                    where=SET,
                )
            parts = (*_STAGES, *self._expand(parts, key))
        if len(parts) == 1:
            raise LocatedConfigError(f"is a whole section; set a key in it, like {key}.KEY=...", param=key, where=SET)
        self._refuse_list_items(parts, key)
        return parts

    def _expand(self, parts: KeyPath, key: str) -> KeyPath:
        """`thinker.max_running` to `thinker.budget.max_running`."""
        if len(parts) == 1:
            raise LocatedConfigError(f"is a whole stage; set a key in it, like {key}.KEY=...", param=key, where=SET)
        stage = (*_STAGES, parts[0])
        model = model_at(stage, self.data)
        if model is None or parts[1] in keys_of(model):
            return parts
        inner = {name: model_at((*stage, name), self.data) for name in ("budget", "params")}
        sections = [name for name, section in inner.items() if section is not None and parts[1] in keys_of(section)]
        if len(sections) == 1:
            return (parts[0], sections[0], *parts[1:])
        if sections:
            both = " or ".join(f"{parts[0]}.{name}.{parts[1]}" for name in sections)
            raise LocatedConfigError(f"is ambiguous; write {both}", param=key, where=SET)
        names = [*keys_of(model), *(n for section in inner.values() if section for n in keys_of(section))]
        raise LocatedConfigError(f"unknown key; {did_you_mean(parts[1], names)}", param=key, where=SET)

    def _stages(self) -> list[str]:
        here: object = self.data
        for part in _STAGES:
            here = here.get(part) if isinstance(here, Mapping) else None
        return list(here) if isinstance(here, Mapping) else []

    def _refuse_list_items(self, path: KeyPath, key: str) -> None:
        here: object = self.data
        for depth, part in enumerate(path):
            if isinstance(here, list):
                raise LocatedConfigError(
                    f"is inside a list; set the whole list: {dotted(path[:depth])}=[...]", param=key, where=SET
                )
            here = here.get(part) if isinstance(here, Mapping) else None

    def _merge(
        self, base: dict[str, object], top: Mapping[str, object], path: KeyPath, sources: Mapping[KeyPath, Source]
    ) -> None:
        for key, value in top.items():
            here = (*path, key)
            old = base.get(key)
            if path == _STAGES and (value is None or _changes_engine(old, value)):
                self._drop(base, here, keep=() if value is None else _ANY_ENGINE)
                if value is None:
                    continue
                old = base.get(key)
            if isinstance(value, dict) and isinstance(old, dict):
                self.sources[here] = sources[here]
                self._merge(old, value, here, sources)
                continue
            for replaced in _paths_in(old, here):
                self.sources.pop(replaced, None)
            base[key] = _copy(value)
            self.sources |= {p: sources[p] for p in _paths_in(value, here)}

    def _drop(self, stages: dict[str, object], path: KeyPath, keep: Collection[str]) -> None:
        """Take a stage out, but for the keys that its next engine reads too."""
        stage = stages.pop(path[-1], None)
        remainder = {key: value for key, value in stage.items() if key in keep} if isinstance(stage, dict) else {}
        if remainder:
            stages[path[-1]] = remainder
        remaining = set(_paths_in(remainder, path)) if remainder else set()
        for stale in set(_paths_in(stage, path)) - remaining:
            self.sources.pop(stale, None)


def _changes_engine(old: object, new: object) -> bool:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return False
    return "engine" in new and "engine" in old and new["engine"] != old["engine"]


def _paths_in(value: object, path: KeyPath) -> Iterable[KeyPath]:
    """The path of a value and of everything in it."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _paths_in(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _paths_in(item, (*path, str(index)))


def _copy(value: object) -> object:
    """A copy that shares no containers, not even between aliases: a later layer changes it in place."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value
