"""Validation and exceptions."""

from __future__ import annotations

import ast

from omnistage_review.registry import Hits, rule
from omnistage_review.syntax import FUNCTIONS, ParsedFile, decorator_names, method, parameters

_BROAD = {"Exception", "BaseException", "builtins.Exception", "builtins.BaseException"}
_MUTABLE_CALLS = {"list", "dict", "set", "collections.defaultdict", "collections.deque", "collections.OrderedDict"}


def _narrows_type(test: ast.expr) -> bool:
    """`x is not None`, `isinstance(x, T)`, a bare name: for type checkers rather than for users."""
    if isinstance(test, ast.BoolOp):
        return all(_narrows_type(value) for value in test.values)
    if isinstance(test, ast.Compare):
        return all(isinstance(operator, ast.Is | ast.IsNot) for operator in test.ops)
    return isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id in ("isinstance", "callable")


@rule(
    "ERR01",
    "Validation by assert",
    "high",
    "security",
    why="`python -O` removes assertions, and a user who meets one sees no message.",
    fix="Raise ValueError or an error class of the project, with a message that says what to change.",
)
def assert_validation(file: ParsedFile) -> Hits:
    if not file.is_shipped:
        return
    for node in file.nodes(ast.Assert):
        function = file.function(node)
        if function is None or not file.is_public(function, entries=True) or _narrows_type(node.test):
            continue
        if any("jit" in name.rpartition(".")[2] for name in decorator_names(file, function)):
            continue  # a kernel's assertions are run by its compiler
        names = {item.arg for item in parameters(function)} - {"self", "cls"}
        names_in_test = {inner.id for inner in ast.walk(node.test) if isinstance(inner, ast.Name)}
        # What the function has computed itself is an invariant rather than an argument.
        if names_in_test & names and not names_in_test & file.once(_local_names, function):
            names_text = ", ".join(f"`{name}`" for name in sorted(names_in_test & names))
            yield node, f"`{function.name}` checks its argument {names_text} with assert"


def _local_names(function: ast.AST) -> set[str]:
    """Names that the function binds: assignments, loops, handlers."""
    names = {
        inner.id for inner in ast.walk(function) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }
    return names | {inner.name for inner in ast.walk(function) if isinstance(inner, ast.ExceptHandler) and inner.name}


def _reraises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(inner, ast.Raise) for inner in ast.walk(handler))


@rule(
    "ERR02",
    "Bare except",
    "high",
    "security",
    why="It also catches KeyboardInterrupt, SystemExit and asyncio's CancelledError: a process that cannot be stopped, "
    "a request that cannot be cancelled.",
    fix="Name the exceptions that are expected; at a boundary write `except Exception` and record what was caught.",
)
def bare_except(file: ParsedFile) -> Hits:
    for handler in file.nodes(ast.ExceptHandler):
        if handler.type is None and not _reraises(handler):
            yield handler, "bare `except:` that does not re-raise"


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _does_nothing(body: list[ast.stmt]) -> bool:
    """`pass`, `...`, `continue`, `return`: an exception leaves no trace."""
    return all(
        isinstance(node, ast.Pass | ast.Continue)
        or (isinstance(node, ast.Return) and (node.value is None or _is_none(node.value)))
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in body
    )


def _broad(file: ParsedFile, node: ast.expr | None) -> bool:
    if isinstance(node, ast.Tuple):
        return any(_broad(file, item) for item in node.elts)
    return file.name(node) in _BROAD


@rule(
    "ERR03",
    "Swallowed exception",
    "high",
    "security",
    why="A failure becomes a wrong result or a hang, and nothing says where it began.",
    fix="Catch the exceptions that are expected, or log the error and end the request that caused it.",
)
def swallowed(file: ParsedFile) -> Hits:
    if file.is_test:
        return
    for handler in file.nodes(ast.ExceptHandler):
        excused = _in_cleanup(file, handler) or _probes_import(file, handler)
        if _broad(file, handler.type) and _does_nothing(handler.body) and not excused:
            yield handler, f"`except {ast.unparse(handler.type or ast.Name('Exception'))}` with an empty body"
    for call in file.nodes(ast.Call):
        if file.name(call.func) == "contextlib.suppress" and any(_broad(file, item) for item in call.args):
            yield call, "`contextlib.suppress` of every exception"


def _probes_import(file: ParsedFile, handler: ast.ExceptHandler) -> bool:
    """Whether the `try` asks if something can be imported: any failure is the answer no."""
    outer = file.parent(handler)
    return isinstance(outer, ast.Try) and any(
        isinstance(node, ast.Import | ast.ImportFrom) or method(node).startswith("import_")
        for statement in outer.body
        for node in ast.walk(statement)
    )


def _in_cleanup(file: ParsedFile, node: ast.AST) -> bool:
    """Inside `__del__`, or in the handler of another exception: there the first error is what counts."""
    for outer in file.ancestors(node):
        if isinstance(outer, FUNCTIONS):
            return outer.name == "__del__"
        if isinstance(outer, ast.ExceptHandler):
            return True
    return False


@rule(
    "ERR04",
    "Mutable default argument",
    "medium",
    "memory",
    why="The default is made once and shared by all calls: what one request appends, the next one sees.",
    fix="Use None or an empty tuple as the default and make the object inside the function.",
)
def mutable_default(file: ParsedFile) -> Hits:
    for function in file.functions():
        for default in (*function.args.defaults, *function.args.kw_defaults):
            literal = isinstance(default, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)
            if default is not None and (
                literal or (isinstance(default, ast.Call) and file.name(default.func) in _MUTABLE_CALLS)
            ):
                yield default, f"`{function.name}` has a mutable default: `{ast.unparse(default)}`"
