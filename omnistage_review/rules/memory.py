"""Memory that grows without a bound: caches, queues, payloads."""

from __future__ import annotations

import ast
import re

from omnistage_review.registry import Hits, rule
from omnistage_review.syntax import (
    FUNCTIONS,
    Function,
    ParsedFile,
    decorator_names,
    has_star_kwargs,
    keyword,
    last_name,
    literal,
    method,
    names_in,
    parameters,
    targets,
    walk_scope,
)

_NAME = re.compile(r"(^|_)(cache[sd]?|memo|seen|history)$|^(cache|memo)(_|$)", re.IGNORECASE)
_EVICTS = {"pop", "popitem", "clear", "popleft", "evict", "discard", "remove", "move_to_end", "trim", "prune"}
_QUEUES = {
    "queue.Queue", "queue.LifoQueue", "queue.PriorityQueue", "asyncio.Queue", "asyncio.LifoQueue",
    "asyncio.PriorityQueue", "multiprocessing.Queue",
}  # fmt: skip
_UNBOUNDED_QUEUES = {"queue.SimpleQueue", "multiprocessing.SimpleQueue"}
_BODIES = {"body", "json", "form"}


def _empty_mapping(file: ParsedFile, value: ast.expr | None) -> bool:
    if isinstance(value, ast.Dict):
        return not value.keys
    return isinstance(value, ast.Call) and file.name(value.func) in (
        "dict",
        "collections.defaultdict",
        "collections.OrderedDict",
    )


@rule(
    "MEM01",
    "Unbounded cache",
    "medium",
    "memory",
    why="Keys come from requests, so the cache grows for as long as the service runs, until the process is killed.",
    fix="Give it a size and evict the oldest entry, or use functools.lru_cache with a maxsize.",
    whole_file=True,
)
def unbounded_cache(file: ParsedFile) -> Hits:
    if not file.is_shipped:
        return
    for function in file.functions():
        if (
            _cached_for_ever(file, function)
            and not _few_keys(function)
            and [item for item in parameters(function) if item.arg not in ("self", "cls")]
        ):
            yield function, f"every result of `{function.name}` is never released"
    for node in file.assignments():
        if not _empty_mapping(file, node.value):
            continue
        for target in targets(node):
            name = last_name(target)
            if not _NAME.search(name) or not _lives_long(file, node, target):
                continue
            if _grows(file, name) and not _is_bounded(file, name):
                yield node, f"`{name}` gets an entry per key and loses none"


def _cached_for_ever(file: ParsedFile, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    if "functools.cache" in decorator_names(file, function):
        return True
    return any(
        isinstance(node, ast.Call)
        and file.name(node.func) == "functools.lru_cache"
        and (maxsize := keyword(node, "maxsize") or (node.args[0] if node.args else None)) is not None
        and isinstance(maxsize, ast.Constant)
        and maxsize.value is None
        for node in function.decorator_list
    )


def _few_keys(function: Function) -> bool:
    """Whether all parameters are of types with few values: numbers of devices, classes, switches."""
    names = [
        ast.unparse(item.annotation).partition("[")[0] if item.annotation is not None else ""
        for item in parameters(function)
    ]
    return set(names) <= {"int", "bool", "type", "torch.device", "torch.dtype", "Literal", "device", "dtype"}


def _lives_long(file: ParsedFile, node: ast.AST, target: ast.expr) -> bool:
    """A module's variable or an object's attribute, rather than a local variable."""
    return isinstance(target, ast.Attribute) or not isinstance(file.scope(node), (*FUNCTIONS, ast.Lambda))


def _grows(file: ParsedFile, name: str) -> bool:
    """Filled inside a function, by a key that is not a constant."""
    for node in file.nodes(ast.Assign):
        for target in node.targets:
            if (
                isinstance(target, ast.Subscript)
                and last_name(target.value) == name
                and file.function(node) is not None
            ) and not isinstance(target.slice, ast.Constant):
                return True
    return any(
        method(call) == "setdefault" and isinstance(call.func, ast.Attribute) and last_name(call.func.value) == name
        for call in file.nodes(ast.Call)
    )


def _is_bounded(file: ParsedFile, name: str) -> bool:
    """Whether something is taken out, replaced or counted anywhere in the file."""
    for call in file.nodes(ast.Call):
        if isinstance(call.func, ast.Attribute) and call.func.attr in _EVICTS and last_name(call.func.value) == name:
            return True
        if method(call) == "len" and call.args and last_name(call.args[0]) == name:
            return True
    for node in file.nodes(ast.Delete):
        if any(isinstance(item, ast.Subscript) and last_name(item.value) == name for item in node.targets):
            return True
    assignments = [target for node in file.assignments() for target in targets(node) if last_name(target) == name]
    return len(assignments) > 1


@rule(
    "MEM02",
    "Unbounded queue",
    "medium",
    "batching",
    why="When requests come faster than they are served, the queue takes all memory, and every request in it is late.",
    fix="Give it a maxsize, and refuse with 429 when it is full.",
)
def unbounded_queue(file: ParsedFile) -> Hits:
    if not file.is_shipped:
        return
    for call in file.nodes(ast.Call):
        name = file.name(call.func)
        size = keyword(call, "maxsize") or (call.args[0] if call.args else None)
        open_ended = (size is None and not has_star_kwargs(call)) or (
            isinstance(value := literal(size), int) and value <= 0
        )
        if name in _UNBOUNDED_QUEUES or (name in _QUEUES and open_ended):
            yield call, f"`{name}` without a maxsize"


@rule(
    "MEM03",
    "Payload of unbounded size",
    "medium",
    "security",
    why="One client with a large body, or one URL with a large file, takes all memory of the service.",
    fix="Check the declared size, then read in pieces up to a limit and refuse what is longer (413).",
)
def unbounded_payload(file: ParsedFile) -> Hits:
    if not file.is_shipped:
        return
    for call in file.nodes(ast.Call):
        if not isinstance(call.func, ast.Attribute):
            continue
        value, name = call.func.value, call.func.attr
        whole = not call.args and not call.keywords
        is_request = last_name(value) in ("request", "req") and isinstance(file.parent(call), ast.Await)
        if (name in _BODIES and whole and is_request) or (name == "read" and whole and _is_upload(file, value)):
            yield call, f"`await {ast.unparse(call)}` reads a body of any size"
        elif name == "read" and whole and _opens_url(file, value):
            yield call, f"`{ast.unparse(call)}` reads a response of any size"
        elif file.name(call.func).startswith("websockets."):
            size = keyword(call, "max_size")
            if isinstance(size, ast.Constant) and size.value is None:
                yield call, "a WebSocket with max_size=None"
    for node in file.nodes(ast.Attribute):
        if node.attr == "content" and _calls(file, node.value, ("requests.get", "httpx.get")):
            yield node, f"`{ast.unparse(node)}` reads a response of any size"


def _is_upload(file: ParsedFile, value: ast.expr) -> bool:
    """A parameter with the type UploadFile."""
    function = file.function(value)
    return function is not None and any(
        item.arg == last_name(value) and item.annotation is not None and "UploadFile" in names_in(item.annotation)
        for item in parameters(function)
    )


def _calls(file: ParsedFile, value: ast.expr, names: tuple[str, ...]) -> bool:
    """A call of one of these functions, or a variable that its function assigns only from such calls."""
    if isinstance(value, ast.Call):
        return file.name(value.func) in names
    if not isinstance(value, ast.Name):
        return False
    assignments = [
        node for node in walk_scope(file.scope(value)) if value.id in {last_name(item) for item in targets(node)}
    ]
    return bool(assignments) and all(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and file.name(node.value.func) in names
        and literal(keyword(node.value, "stream")) is not True
        for node in assignments
    )


def _opens_url(file: ParsedFile, value: ast.expr) -> bool:
    """`urlopen(...)` itself, or the variable of a `with urlopen(...)` around it."""
    if _calls(file, value, ("urllib.request.urlopen",)):
        return True
    if not isinstance(value, ast.Name):
        return False
    return any(
        isinstance(outer, ast.With)
        and any(
            isinstance(item.context_expr, ast.Call)
            and file.name(item.context_expr.func) == "urllib.request.urlopen"
            and last_name(item.optional_vars) == value.id
            for item in outer.items
        )
        for outer in file.ancestors(value)
    )
