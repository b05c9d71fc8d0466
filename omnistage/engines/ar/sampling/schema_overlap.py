"""What is known about the values of a JSON schema: their types, and whether two schemas have any in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Json = dict[str, object]
ANY_TYPE = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))
"""Of a schema that does not say; the same object then."""
_OBJECT = ("properties", "additionalProperties", "unevaluatedProperties")
_ARRAY = ("items", "prefixItems", "unevaluatedItems")
FORMS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""xgrammar follows the first of them that is there and nothing else."""
_MAX_HOPS = 64
_MAX_DEPTH = 8
_MAX_WORK = 8_000
"""Comparisons for all `oneOf` of a schema together."""


def covers(wide: frozenset[str], narrow: frozenset[str]) -> bool:
    """Whether values of the types `narrow` are all of the types `wide`."""
    return all(kind in wide or (kind == "integer" and "number" in wide) for kind in narrow)


@dataclass(slots=True)
class Overlap:
    """Answers questions about the schemas inside `root`. Each answer is right or on the safe side."""

    root: object
    _types: dict[int, frozenset[str]] = field(default_factory=dict)
    _open: int = 0
    """Schemas whose types are being found, one inside of another."""
    _work: int = 0

    def target(self, ref: str) -> object:
        """What a `$ref` points to, found as xgrammar does; None if there is nothing."""
        node = self.root
        for part in ref[1:].split("/"):
            if part:
                node = node.get(part) if isinstance(node, dict) else None
        return node

    def declared(self, node: Json) -> frozenset[str]:
        """The types that `type` lists."""
        types = node.get("type")
        return frozenset(kind for kind in (types if isinstance(types, list) else [types]) if isinstance(kind, str))

    def types(self, node: object) -> frozenset[str]:
        """The types that values have by what xgrammar follows: beside an `enum`, say, not by `type`."""
        if not isinstance(node, dict):
            return ANY_TYPE
        if id(node) not in self._types:
            self._types[id(node)] = ANY_TYPE  # meanwhile, for a schema that contains itself
            self._open += 1
            if self._open <= _MAX_HOPS:
                self._types[id(node)] = self._find_types(node)
            self._open -= 1
        return self._types[id(node)]

    def _find_types(self, node: Json) -> frozenset[str]:
        if "$ref" in node:
            ref = node["$ref"]
            return self.types(self.target(ref)) if isinstance(ref, str) else ANY_TYPE
        values = _values(node)
        if values is not None:
            return frozenset(map(_type_of, values))
        for keyword in ("anyOf", "oneOf"):
            if keyword in node:
                return self._union(node[keyword])
        if "allOf" in node:
            return self._union(node["allOf"])
        if "type" in node:
            return self.declared(node)
        if any(keyword in node for keyword in _OBJECT):
            return frozenset({"object"})
        return frozenset({"array"}) if any(keyword in node for keyword in _ARRAY) else ANY_TYPE

    def _union(self, branches: object) -> frozenset[str]:
        kinds = [self.types(branch) for branch in branches] if isinstance(branches, list) else []
        if not kinds or any(types is ANY_TYPE for types in kinds):
            return ANY_TYPE
        return frozenset[str]().union(*kinds)

    def _followed(self, node: object) -> object:
        """The schema at the end of a chain of references."""
        for _ in range(_MAX_HOPS):
            if not isinstance(node, dict):
                break
            ref, branches = node.get("$ref"), node.get("allOf")
            if isinstance(ref, str):
                node = self.target(ref)
            elif isinstance(branches, list) and len(branches) == 1:
                node = branches[0]
            else:
                break
        return node

    def all_disjoint(self, branches: object) -> bool:
        """Whether no value fits two of them, as far as can be seen."""
        if not isinstance(branches, list):
            return True  # xgrammar refuses it
        lists_differ = self._lists_differ(branches)
        if lists_differ is not None:
            return lists_differ
        if self._have_discriminator(branches):  # without comparing each with each
            return True
        return all(self._disjoint(one, other) for index, one in enumerate(branches) for other in branches[index + 1 :])

    def _lists_differ(self, schemas: list[object]) -> bool | None:
        """Whether no two schemas that list their values list the same one; None where one lists none."""
        values = [_values(node) if isinstance(node := self._followed(schema), dict) else None for schema in schemas]
        values_of_each = [{*map(_key, some)} for some in values if some is not None]
        if len(values_of_each) < len(schemas):
            return None
        return len(set[object]().union(*values_of_each)) == sum(map(len, values_of_each))

    def _have_discriminator(self, branches: list[object]) -> bool:
        """Whether they are objects with a required property that has other values in each."""
        nodes = [node for branch in branches if isinstance(node := self._followed(branch), dict)]
        plain = all(node.get("type") == "object" and not any(form in node for form in FORMS) for node in nodes)
        if not plain or len(nodes) < len(branches):
            return False
        names = [_required(node) & _properties(node).keys() for node in nodes]
        common = sorted(set[str].intersection(*names)) if names else []
        return any(self._lists_differ([_properties(node)[name] for node in nodes]) for name in common)

    def _disjoint(self, one: object, other: object, depth: int = 0) -> bool:
        one, other = self._followed(one), self._followed(other)
        self._work += 1
        if self._work > _MAX_WORK or depth > _MAX_DEPTH or not isinstance(one, dict) or not isinstance(other, dict):
            return False
        types, other_types = _with_integers(self.types(one)), _with_integers(self.types(other))
        if not types & other_types:
            return True
        for first, second in ((one, other), (other, one)):
            for keyword in ("anyOf", "oneOf"):
                branches = first.get(keyword)
                if isinstance(branches, list) and branches:
                    return all(self._disjoint(branch, second, depth + 1) for branch in branches)
        values, other_values = _values(one), _values(other)
        if values is not None and other_values is not None:
            self._work += len(values) + len(other_values)
            return {*map(_key, values)}.isdisjoint(map(_key, other_values))
        return types == other_types == {"object"} and self._objects_disjoint(one, other, depth)

    def _objects_disjoint(self, one: Json, other: Json, depth: int) -> bool:
        properties, other_properties = _properties(one), _properties(other)
        required, other_required = _required(one), _required(other)
        self._work += len(required) + len(other_required)
        if any(_excludes(other, name) for name in required) or any(_excludes(one, name) for name in other_required):
            return True
        common = [name for name in required & other_required if name in properties and name in other_properties]
        return any(self._disjoint(properties[name], other_properties[name], depth + 1) for name in sorted(common))


def _values(node: Json) -> list[object] | None:
    """All that fit, where they are listed."""
    if "const" in node:
        return [node["const"]]
    options = node.get("enum")
    return options if isinstance(options, list) else None


def _type_of(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _with_integers(types: Iterable[str]) -> frozenset[str]:
    return frozenset("number" if kind == "integer" else kind for kind in types)


def _key(value: object) -> object:
    """Equal for equal values; for all objects, too, and for all arrays."""
    if isinstance(value, bool) or value is None:
        return ("literal", value)
    if isinstance(value, int | float | str):
        return value
    return ("nested", type(value))


def _properties(node: Json) -> Json:
    properties = node.get("properties")
    return properties if isinstance(properties, dict) else {}


def _required(node: Json) -> set[str]:
    required = node.get("required")
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def _excludes(node: Json, name: str) -> bool:
    """Whether its values never have this property."""
    closed = node.get("additionalProperties", node.get("unevaluatedProperties")) is False
    return closed and name not in _properties(node) and not node.get("patternProperties")
