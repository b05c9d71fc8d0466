"""Key-value caches: positions of writes, and state that outlives its request."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from omnistage_review.registry import Hits, rule
from omnistage_review.syntax import FUNCTIONS, ParsedFile, last_name, literal, method, targets, walk_scope

_CACHE = re.compile(r"(^|_)(kv|cache[sd]?|k_cache|v_cache|past)(_|$)", re.IGNORECASE)
_KV = re.compile(r"(^|_)(kv|past)(_|$)|(key|value|k|v)_?caches?$|past_key_values|kv_?cache", re.IGNORECASE)
_POSITION = re.compile(
    r"(^|_)(pos|position|offset|cur_len|seq_len|seqlen|cache_len|context_len|length|start)(_|$)", re.IGNORECASE
)
_CAPACITY = re.compile(r"^max_?(seq_?|cache_?|context_?|model_?)*(len|length|tokens|positions?)$", re.IGNORECASE)
_RESETS = {"reset", "clear", "crop", "reset_cache", "clear_cache", "free", "pop", "popitem", "zero_", "fill_"}
_CONTAINERS = {
    "DynamicCache",
    "StaticCache",
    "HybridCache",
    "SlidingWindowCache",
    "QuantizedCache",
    "EncoderDecoderCache",
    "Cache",
}


def _shifted(node: ast.expr | None) -> tuple[ast.expr, int] | None:
    """`(x, 1)` for `x + 1` and `(x, -1)` for `x - 1`."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Sub):
        return None
    if literal(node.right) == 1:
        return node.left, 1 if isinstance(node.op, ast.Add) else -1
    return (node.right, 1) if literal(node.left) == 1 and isinstance(node.op, ast.Add) else None


def _same(one: ast.expr | None, other: ast.expr | None) -> bool:
    return one is not None and other is not None and ast.dump(one) == ast.dump(other)


def _ends_after(index: ast.Slice, position: ast.expr) -> bool:
    """Whether the upper bound adds a length to the position too."""
    parts = [] if index.upper is None else list(ast.walk(index.upper))
    sums = [part for part in parts if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add)]
    return any(_same(side, position) for part in sums for side in (part.left, part.right))


def _off_by_one(index: ast.expr) -> str:
    """What is wrong with one axis of a write, or nothing."""
    if isinstance(index, ast.Slice):
        upper, lower = _shifted(index.upper), _shifted(index.lower)
        if (
            lower is not None
            and lower[1] == 1
            and _POSITION.search(last_name(lower[0]))
            and _ends_after(index, lower[0])
        ):
            return f"it writes from `{ast.unparse(lower[0])} + 1` on, the next token is at `{ast.unparse(lower[0])}`"
        if upper is None or index.lower is None or lower is not None:
            return ""
        base = upper[0]  # the upper bound without its 1
        if (
            isinstance(base, ast.BinOp)
            and isinstance(base.op, ast.Add)
            and (_same(base.left, index.lower) or _same(base.right, index.lower))
        ):
            return f"the slice `{ast.unparse(index)}` is one longer or shorter than what is written"
        return ""
    if _CAPACITY.match(last_name(index)):
        return f"`{ast.unparse(index)}` is the size of the cache: the last place is one before it"
    shifted = _shifted(index)
    if shifted is not None and shifted[1] == 1 and _POSITION.search(last_name(shifted[0])):
        return f"it writes at `{ast.unparse(index)}`, the next token is at `{ast.unparse(shifted[0])}`"
    return ""


@rule(
    "KV01",
    "Off-by-one write into a cache",
    "high",
    "KV cache",
    why="Every later token attends to a key at the wrong position, or to one that was never written; output degrades, "
    "and no error is raised.",
    fix="Write n new tokens at `[position, position + n)`; position is the number of tokens already in the cache.",
)
def off_by_one(file: ParsedFile) -> Hits:
    for node in file.nodes(ast.Assign):
        for target in node.targets:
            if not isinstance(target, ast.Subscript) or not _CACHE.search(last_name(target.value)):
                continue
            axes = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
            is_plain = not isinstance(target.slice, ast.Tuple | ast.Slice)
            if is_plain and not re.search(r"(^|_)(k|v|kv)_?cache$", last_name(target.value)):
                continue  # a dict, or a list by layer
            message = next((text for text in map(_off_by_one, axes) if text), "")
            if message:
                yield target, f"write into `{ast.unparse(target.value)}`: {message}"


def _self_attribute(node: ast.AST) -> str:
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return last_name(node) if is_own else ""


def _methods(owner: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in owner.body if isinstance(node, FUNCTIONS))


def _is_empty_cache(file: ParsedFile, value: ast.expr | None) -> bool:
    if isinstance(value, ast.Constant):
        return value.value is None
    if isinstance(value, ast.List | ast.Tuple | ast.Dict):
        return not getattr(value, "elts", None) and not getattr(value, "keys", None)
    return isinstance(value, ast.Call) and last_name(value.func) in _CONTAINERS | {"list", "dict"}


@rule(
    "KV02",
    "Cache kept across requests",
    "high",
    "KV cache",
    why="Keys and values of one request are read by the next one: wrong answers, and one user's content in another's.",
    fix="Make the cache where the request begins, or reset it there.",
    whole_file=True,
)
def kept_across_requests(file: ParsedFile) -> Hits:
    if not file.is_shipped:
        return
    for owner in file.nodes(ast.ClassDef):
        caches: dict[str, ast.AST] = {}
        updated: set[str] = set()
        reset: set[str] = set()
        for function in _methods(owner):
            for node in ast.walk(function):
                if function.name in ("__init__", "__post_init__"):
                    for target in targets(node):
                        name = _self_attribute(target)
                        if _KV.search(name) and _is_empty_cache(file, getattr(node, "value", None)):
                            caches[name] = node
                    continue
                _note_use(file, node, updated, reset)
        for name in sorted((caches.keys() & updated) - reset):
            yield caches[name], f"`{owner.name}.{name}` is filled by requests and never reset"


def _note_use(file: ParsedFile, node: ast.AST, updated: set[str], reset: set[str]) -> None:
    """Notes the attributes that a node fills and those that it resets."""
    for target in targets(node):
        name = _self_attribute(target)
        value = getattr(node, "value", None)
        if name:
            is_new = _is_empty_cache(file, value) or not (isinstance(value, ast.AST) and _continues(file, name, value))
            (reset if is_new else updated).add(name)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            name = _self_attribute(node.func.value)
            if name and node.func.attr in _RESETS:
                reset.add(name)
            elif name and node.func.attr in ("append", "extend", "update"):
                updated.add(name)
        for word in node.keywords:
            if word.arg in ("past_key_values", "kv_cache", "cache") and _self_attribute(word.value):
                updated.add(_self_attribute(word.value))
        if method(node).startswith(("reset", "clear", "evict", "trim")):
            reset.update(filter(None, map(_self_attribute, node.args)))
    elif isinstance(node, ast.Delete):
        reset.update(filter(None, map(_self_attribute, node.targets)))
        reset.update(_self_attribute(item.value) for item in node.targets if isinstance(item, ast.Subscript))


def _continues(file: ParsedFile, name: str, value: ast.AST) -> bool:
    """Whether a value goes on from the attribute's own: from the model, or a variable joined with it before."""
    if not isinstance(value, ast.Name):
        return _comes_from_model(value)
    return any(
        isinstance(node, ast.Assign)
        and any(last_name(target) == value.id for target in node.targets)
        and _comes_from_model(node.value)
        and any(_self_attribute(inner) == name for inner in ast.walk(node.value))
        for node in walk_scope(file.scope(value))
    )


def _comes_from_model(value: ast.AST) -> bool:
    """`outputs.past_key_values`, or a concatenation with what was there before."""
    return any(
        (isinstance(inner, ast.Attribute) and inner.attr == "past_key_values")
        or (isinstance(inner, ast.Call) and method(inner) in ("cat", "concat", "concatenate"))
        for inner in ast.walk(value)
    )
