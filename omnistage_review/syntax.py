"""A parsed Python file with the questions that rules ask of it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import TypeAlias, TypeVar

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
NodeT = TypeVar("NodeT", bound=ast.AST)
ResultT = TypeVar("ResultT")

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)
LOOPS = (ast.For, ast.AsyncFor, ast.While)

_TEST_PATH = re.compile(
    r"(^|/)(tests?|testing|test_utils)/|(^|/)(test_[^/]*|[^/]*_test|conftest|testing|testing_utils)\.py$"
)
_SIDE_PATH = re.compile(
    r"(^|/)(benchmarks?|bench|examples?|tools?|scripts?|docs?|training|train|notebooks)/|(^|/)setup\.py$"
)


def is_test(path: str) -> bool:
    return _TEST_PATH.search(path) is not None


def is_shipped(path: str) -> bool:
    """Whether a file is part of what users run: neither a test nor a benchmark, an example, a tool or training."""
    return not is_test(path) and _SIDE_PATH.search(path) is None


class ParsedFile:
    """The syntax tree of one file. `partial` says that only pieces of the file are known."""

    def __init__(self, path: str, text: str, *, partial: bool = False) -> None:
        self.path, self.text, self.partial = path, text, partial
        self.lines = text.split("\n")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the code under review are not ours to print
            self.tree = ast.parse(text)
        self._results: dict[tuple[object, ast.AST], object] = {}
        self._parents: dict[ast.AST, ast.AST] = {}
        self._by_type: dict[type[ast.AST], list[ast.AST]] = {}
        waiting: list[ast.AST] = [self.tree]
        while waiting:
            node = waiting.pop()
            self._by_type.setdefault(type(node), []).append(node)
            for child in ast.iter_child_nodes(node):
                self._parents[child] = node
                waiting.append(child)

    @property
    def is_test(self) -> bool:
        return is_test(self.path)

    @property
    def is_shipped(self) -> bool:
        return is_shipped(self.path)

    def nodes(self, kind: type[NodeT]) -> Iterator[NodeT]:
        yield from self._by_type.get(kind, ())  # type: ignore[misc]

    def once(self, compute: Callable[[ast.AST], ResultT], node: ast.AST) -> ResultT:
        """What a function of a node gives, computed once: a scope with thousands of findings is walked through once."""
        key = (compute, node)
        if key not in self._results:
            self._results[key] = compute(node)
        return self._results[key]  # type: ignore[return-value]

    def functions(self) -> Iterator[Function]:
        yield from self.nodes(ast.FunctionDef)
        yield from self.nodes(ast.AsyncFunctionDef)

    def assignments(self) -> Iterator[ast.Assign | ast.AnnAssign]:
        yield from self.nodes(ast.Assign)
        yield from self.nodes(ast.AnnAssign)

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._parents.get(node)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        current = self._parents.get(node)
        while current is not None:
            yield current
            current = self._parents.get(current)

    def scope(self, node: ast.AST) -> ast.AST:
        """The nearest function, lambda, class or module around a node."""
        return next((outer for outer in self.ancestors(node) if isinstance(outer, SCOPES)), self.tree)

    def function(self, node: ast.AST) -> Function | None:
        """The nearest function around a node."""
        return next((outer for outer in self.ancestors(node) if isinstance(outer, FUNCTIONS)), None)

    def comes_before(self, statement: ast.stmt, node: ast.AST) -> bool:
        """Whether a statement always runs before a node that follows it: it is in a block that holds both."""
        block, inner = self.parent(statement), node
        while (outer := self.parent(inner)) is not None:
            if outer is block:
                bodies = [value for _, value in ast.iter_fields(outer) if isinstance(value, list)]
                return any(statement in body and inner in body for body in bodies)
            inner = outer
        return False

    def class_of(self, function: ast.AST) -> ast.ClassDef | None:
        """The class whose method a function is."""
        parent = self.parent(function)
        return parent if isinstance(parent, ast.ClassDef) else None

    def is_public(self, function: Function, *, entries: bool = False) -> bool:
        """A function or method that other modules may call: no name on the way to it begins with an underscore.

        With `entries` constructors and `__call__` count too.
        """
        is_entry = function.name in ("__init__", "__call__") and entries
        if self.function(function) is not None or (function.name.startswith("_") and not is_entry):
            return False
        classes = [outer for outer in self.ancestors(function) if isinstance(outer, ast.ClassDef)]
        return not any(outer.name.startswith("_") for outer in classes)

    @cached_property
    def imports(self) -> dict[str, str]:
        """Names of the file that come from modules, with their full names."""
        names: dict[str, str] = {}
        for node in self.nodes(ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        for imported in self.nodes(ast.ImportFrom):
            for alias in imported.names:
                names[alias.asname or alias.name] = f"{imported.module or ''}.{alias.name}"
        return names

    @cached_property
    def uses_torch(self) -> bool:
        """Whether the file imports torch or a library of it. Of a partial file that is not known: then it may."""
        roots = {name.partition(".")[0] for name in self.imports.values()}
        return self.partial or bool(roots & {"torch", "transformers", "diffusers", "vllm", "torchaudio", "torchvision"})

    def name(self, node: ast.AST | None) -> str:
        """The dotted name of an expression with imports resolved (`np.load` is `numpy.load`), or nothing."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        parts.append(self.imports.get(node.id, node.id))
        return ".".join(reversed(parts))

    def comments(self) -> Iterator[tuple[int, str]]:
        """Comments with their lines."""
        if "#" not in self.text:
            return
        try:
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
                if token.type == tokenize.COMMENT:
                    yield token.start[0], token.string
        except (tokenize.TokenError, SyntaxError):
            return


def method(node: ast.AST) -> str:
    """The last name of what a call calls: `item` for `x[0].item()`, `f` for `f()`."""
    if not isinstance(node, ast.Call):
        return ""
    return last_name(node.func)


def last_name(node: ast.AST | None) -> str:
    """The last name of an expression: `b` for `a.b`, `a` for `a`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((item.value for item in call.keywords if item.arg == name), None)


def has_star_kwargs(call: ast.Call) -> bool:
    return any(item.arg is None for item in call.keywords)


def literal(node: ast.AST | None) -> object:
    """The value of a constant; none for all else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        return -value if isinstance(value, int | float) else None
    return node.value if isinstance(node, ast.Constant) else None


def names_in(node: ast.AST) -> set[str]:
    """All names and attributes inside a node."""
    return {last_name(inner) for inner in ast.walk(node) if isinstance(inner, ast.Name | ast.Attribute)}


def walk_scope(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes inside one, without those of functions, lambdas and classes in it."""
    waiting: list[ast.AST] = list(ast.iter_child_nodes(node))
    while waiting:
        inner = waiting.pop()
        yield inner
        if not isinstance(inner, SCOPES):
            waiting.extend(ast.iter_child_nodes(inner))


def parameters(function: Function) -> list[ast.arg]:
    arguments = function.args
    stars = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *stars]


def targets(node: ast.AST) -> list[ast.expr]:
    """What an assignment assigns to."""
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
        return [node.target]
    return []


def decorator_names(file: ParsedFile, function: Function) -> set[str]:
    """Full names of a function's decorators, called or not."""
    nodes: Iterable[ast.expr] = function.decorator_list
    return {file.name(node.func if isinstance(node, ast.Call) else node) for node in nodes}


def own_lines(node: ast.AST) -> range:
    """The lines that make a node: of a compound statement its header only."""
    line = getattr(node, "lineno", 1)
    end = getattr(node, "end_lineno", None) or line
    body = getattr(node, "body", None)
    if isinstance(body, list) and body and isinstance(node, ast.stmt | ast.ExceptHandler):
        end = max(line, min(end, body[0].lineno - 1))
    return range(line, end + 1)
