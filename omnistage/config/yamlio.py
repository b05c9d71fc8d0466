"""Parses YAML to plain data with the line of every key.

Tags that build objects, duplicate keys, alias bombs and very deep or large documents are refused with their line. Keys
are always text, as written: `on:` is the key `on`, not true.

ruamel.yaml was tried in place of PyYAML's nodes: it keeps lines too, but has no limits on depth, aliases or tags, takes
3.4 times as long (one run on a busy machine), and reads other values (`yes` is text in YAML 1.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from omnistage.config.located import KeyPath, LocatedConfigError, Source, dotted
from omnistage.core.validation import is_utf8, short_repr

MAX_BYTES = 2**20
MAX_DEPTH = 32
MAX_NODES = 20_000
"""Values after aliases are expanded: a bomb of a few lines expands to billions."""

_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + name for name in ("str", "int", "float", "bool", "null")}
_SHOWN_PATH = 300
_MERGE = _TAG + "merge"


@dataclass(frozen=True, slots=True)
class Document:
    """Plain data (dict, list, str, int, float, bool, None) and the source of each value."""

    data: object
    sources: dict[KeyPath, Source]


def load_file(path: Path, label: str | None = None) -> Document:
    """Read a YAML file whose top level must be a mapping; an empty file is an empty mapping."""
    label = label or (str(path) if len(str(path)) <= _SHOWN_PATH else short_repr(str(path)))
    try:
        # One byte more than allowed is enough to know, whatever the size of the file.
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        text = raw.decode("utf-8")
    except FileNotFoundError as error:
        raise LocatedConfigError(f"configuration file {label} does not exist; check the path") from error
    except UnicodeDecodeError as error:
        raise LocatedConfigError("is not UTF-8 text; save it as UTF-8", where=Source(label)) from error
    except OSError as error:
        raise LocatedConfigError(f"cannot be read: {error.strerror or error}", where=Source(label)) from error
    except ValueError as error:  # an embedded NUL, half of a surrogate pair
        raise LocatedConfigError(f"{short_repr(label)} is not a usable path; check it", param="config") from error
    document = load_text(text, label)
    if document.data is None:
        return Document({}, {})
    if not isinstance(document.data, dict):
        raise LocatedConfigError(
            "the top level must be a mapping with the keys pipeline, deployment or limits", where=Source(label, 1)
        )
    return document


def load_text(text: str, label: str) -> Document:
    """Parse one YAML document."""
    if not is_utf8(text):
        raise LocatedConfigError("is not UTF-8 text; save it as UTF-8", where=Source(label))
    if len(text.encode("utf-8")) > MAX_BYTES:
        raise LocatedConfigError(f"is larger than {MAX_BYTES} bytes; make it smaller", where=Source(label))
    try:
        loader = _Loader(text, label)
        root = loader.get_single_node()
        if root is None:
            return Document(None, {})
        builder = _Builder(loader, label)
        return Document(builder.build(root, (), 1), builder.sources)
    except yaml.YAMLError as error:
        raise _syntax_error(error, label) from error


def parse_value(text: str, label: str) -> object:
    """The value of a `--set`: one YAML scalar, or a list or mapping in flow style."""
    return load_text(text, label).data


def _line_of(item: yaml.Event | yaml.Node, label: str) -> Source:
    mark = item.start_mark
    return Source(label, None if mark is None else mark.line + 1)


def _syntax_error(error: yaml.YAMLError, label: str) -> LocatedConfigError:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else None
        problem = error.problem or error.context or "cannot be read"
        return LocatedConfigError(f"not valid YAML: {problem}; fix this line", where=Source(label, line))
    return LocatedConfigError(f"not valid YAML: {error}", where=Source(label))


class _Loader(yaml.SafeLoader):
    """Refuses deep nesting while nodes are composed, which is recursive; the parser below it is not."""

    def __init__(self, text: str, label: str) -> None:
        super().__init__(text)
        self._label = label
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: object = self.peek_event()  # type: ignore[no-untyped-call]
        self._depth += 1
        if self._depth > MAX_DEPTH and isinstance(event, yaml.CollectionStartEvent):
            message = f"is nested deeper than {MAX_DEPTH} levels; flatten it"
            raise LocatedConfigError(message, where=_line_of(event, self._label))
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Builder:
    """Turns composed nodes into plain data, counting what aliases expand to."""

    def __init__(self, loader: yaml.SafeLoader, label: str) -> None:
        self._loader = loader
        self._label = label
        self._nodes = 0
        self.sources: dict[KeyPath, Source] = {}

    def build(self, node: yaml.Node, path: KeyPath, depth: int) -> object:
        self._count(node, path, depth)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            items: list[object] = []
            for index, item in enumerate(node.value):
                here = (*path, str(index))
                self.sources[here] = self._source(item)
                items.append(self.build(item, here, depth + 1))
            return items
        return self._scalar(node, path)

    def _count(self, node: yaml.Node, path: KeyPath, depth: int) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES or depth > MAX_DEPTH:
            raise self._error(
                node, path, f"expands to more than {MAX_NODES} values or {MAX_DEPTH} levels; use fewer aliases"
            )

    def _scalar(self, node: yaml.Node, path: KeyPath) -> object:
        if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALARS:
            tag = node.tag.replace(_TAG, "!!")
            raise self._error(node, path, f"the YAML type {tag} is not allowed here; put the value in quotes")
        try:
            value: object = self._loader.construct_object(node)
        except (ValueError, LookupError, OverflowError) as error:  # LookupError: `!!bool maybe`, `!!int ''`
            tag = node.tag.replace(_TAG, "!!")
            message = f"{short_repr(node.value)} cannot be read as {tag}; correct it or remove the tag"
            raise self._error(node, path, message) from error
        if isinstance(value, str):
            self._check_text(value, node, path)
        return value

    def _check_text(self, text: str, node: yaml.Node, path: KeyPath) -> None:
        if not is_utf8(text):  # YAML's escapes can spell it
            raise self._error(node, path, f"{short_repr(text)} has half of a surrogate pair; remove it")

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, depth: int) -> dict[str, object]:
        if node.tag != _TAG + "map":
            raise self._error(node, path, f"the YAML type {node.tag.replace(_TAG, '!!')} is not allowed here")
        values: dict[str, object] = {}
        first_line: dict[str, int] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged.append(value_node)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, path, "a key must be plain text")
            key = str(key_node.value)
            self._check_text(key, key_node, path)
            here = (*path, key)
            line = key_node.start_mark.line + 1
            if key in first_line:
                raise self._error(
                    key_node, here, f"duplicate key, first on line {first_line[key]}; remove one of the two"
                )
            first_line[key] = line
            self.sources[here] = Source(self._label, line)
            values[key] = self.build(value_node, here, depth + 1)
        for value_node in merged:
            self._merge(value_node, values, path, depth)
        return values

    def _merge(self, node: yaml.Node, values: dict[str, object], path: KeyPath, depth: int) -> None:
        """`<<: *anchor`: keys of the anchored mapping that are not given here; earlier ones win."""
        mappings = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for mapping in mappings:
            if not isinstance(mapping, yaml.MappingNode):
                raise self._error(mapping, path, "only a mapping can be merged with <<")
            scratch = _Builder(self._loader, self._label)
            scratch._nodes = self._nodes
            scratch._count(mapping, path, depth + 1)
            data = scratch._mapping(mapping, path, depth + 1)
            self._nodes = scratch._nodes
            fresh = {key: value for key, value in data.items() if key not in values}
            values.update(fresh)
            level = len(path)
            self.sources.update({p: s for p, s in scratch.sources.items() if p[level] in fresh})

    def _source(self, node: yaml.Node) -> Source:
        return _line_of(node, self._label)

    def _error(self, node: yaml.Node, path: KeyPath, message: str) -> LocatedConfigError:
        return LocatedConfigError(message, param=dotted(path) or None, where=self._source(node))
