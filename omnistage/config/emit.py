"""Prints a configuration as YAML with the source of every value in a comment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import yaml

from omnistage.config.located import DEFAULT, KeyPath, Source, dotted


def emit_yaml(data: Mapping[str, object], provenance: Mapping[str, Source]) -> str:
    """Block style, keys in the order of `data`, one value a line. Loads back as the same data."""
    pairs = list(_lines(data, (), 0))
    width = min(max((len(text) for text, path in pairs if path is not None), default=0), 60)
    rows = []
    for text, path in pairs:
        rows.append(text if path is None else f"{text:<{width}}  # {provenance.get(dotted(path), DEFAULT)}")
    return "\n".join(rows) + "\n"


def value_paths(data: Mapping[str, object]) -> list[KeyPath]:
    """Paths of what `emit_yaml` prints a value for, in its order."""
    return [path for _, path in _lines(data, (), 0) if path is not None]


def _lines(data: Mapping[str, object], path: KeyPath, indent: int) -> Iterator[tuple[str, KeyPath | None]]:
    """Lines of a mapping; those that hold a value come with its path."""
    pad = " " * indent
    for key, value in data.items():
        here, name = (*path, key), _flow(key)
        if isinstance(value, dict) and value:
            yield f"{pad}{name}:", None
            yield from _lines(value, here, indent + 2)
        elif isinstance(value, list) and value and all(isinstance(item, dict) and item for item in value):
            yield f"{pad}{name}:", None
            for index, item in enumerate(value):
                inner = _lines(item, (*here, str(index)), indent + 4)
                for number, (text, at) in enumerate(inner):
                    # The dash replaces the last two blanks of the first line's indent.
                    yield (f"{pad}  - {text[indent + 4 :]}" if number == 0 else text), at
        else:
            yield f"{pad}{name}: {_flow(value)}", here


def _flow(value: object) -> str:
    """A value on one line."""
    text = _dump(value, None)
    # Line breaks in strings make plain and single-quoted styles span lines; double quotes escape them.
    # `splitlines` knows the breaks that are not \n, as YAML does.
    return _dump(value, '"') if len(text.splitlines()) > 1 or not text.isprintable() else text


def _dump(value: object, style: str | None) -> str:
    text = yaml.safe_dump(
        value, default_flow_style=True, default_style=style, width=float("inf"), allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")
