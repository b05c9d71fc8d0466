"""Names that are bare participles, or that STYLE's glossary forbids: `python tools/names.py [FOLDER ...]`.

A thing is named by a noun (`matches`, not `found`; `checkpoint`, not `made`). What is true or false may be a participle
(`closed`, `required`), as in the standard library: such names are known by their annotation or by the expression that
they get, and are not counted.

    python tools/names.py                a line for each name, then the count by folder
    python tools/names.py --count        only the counts
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("omnistage", "starter/omnistage_starter", "omnistage_review")

_WORDS = """
asked arrived begun bought broken brought built caught chosen counted drawn done fallen felt fitted forgotten
found given gone got gotten grown handed heard held kept known laid led left listed lost made meant met missed
moved named needed offered opened owned paid picked placed promised ran reached refused said seen sent served
shown sold sought spent spoken stolen taken taught thought thrown told torn turned understood used wanted
waited woken worn written
"""
PARTICIPLES = frozenset(_WORDS.split())
"""Those that say nothing of the thing that they name. What says how a tensor was made (`padded`, `encoded`, `hidden`,
`scaled`) is what PyTorch's own code says, and is not counted."""
FORBIDDEN = re.compile(r"(^|_)(lacking|mends?|quicken|misfit|ears?|eyes|goodbye|welcome|stranger|stray|whoever)(_|$)")
EXTREMES = re.compile(r"(^|_)(MOST|LEAST)_")


@dataclass(frozen=True, slots=True)
class Binding:
    """A name where it is first bound in a scope."""

    path: str
    line: int
    scope: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.scope or '(module)'} {self.name}"


def is_participle(name: str) -> bool:
    return name.strip("_").lower() in PARTICIPLES


def is_boolean(value: ast.expr | None) -> bool:
    """Whether an expression or an annotation says that a name is true or false."""
    match value:
        case ast.Constant(value=bool()) | ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.BoolOp(values=values):
            return all(is_boolean(part) for part in values)
        case ast.Call(func=ast.Name(id=name)):
            return name in ("bool", "isinstance", "any", "all", "callable", "hasattr")
        case ast.Name(id=name):
            return name == "bool"
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):  # bool | None
            return is_boolean(left) or is_boolean(right)
        case ast.IfExp(body=body, orelse=orelse):
            return is_boolean(body) and is_boolean(orelse)
    return False


class Names(ast.NodeVisitor):
    """Collects what a module binds, once a scope."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.bindings: dict[tuple[str, str], Binding] = {}
        self._scope: list[str] = []
        self._booleans: set[tuple[str, str]] = set()
        self._sides: set[str] = set()
        """Scopes in which `left` is a side."""

    def suspects(self) -> list[Binding]:
        return [
            binding
            for key, binding in self.bindings.items()
            if key not in self._booleans and not (key[1] == "left" and key[0] in self._sides)
        ]

    def _bind(self, name: str, line: int, value: ast.expr | None = None) -> None:
        key = ".".join(self._scope), name
        if is_boolean(value):
            self._booleans.add(key)
        if name in ("right", "top"):
            self._sides.add(key[0])
        if is_participle(name) or FORBIDDEN.search(name.lower()) or EXTREMES.search(name):
            self.bindings.setdefault(key, Binding(self.path, line, *key))

    def _targets(self, target: ast.expr, value: ast.expr | None) -> None:
        match target:
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
                self._bind(name, target.lineno, value)
            case ast.Starred(value=inner):
                self._targets(inner, None)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                values: Sequence[ast.expr | None] = [None] * len(targets)
                if isinstance(value, ast.Tuple) and len(value.elts) == len(targets):
                    values = value.elts
                for each, of_each in zip(targets, values, strict=True):
                    self._targets(each, of_each)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._targets(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._targets(node.target, node.value if is_boolean(node.value) else node.annotation)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._targets(node.target, node.value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._targets(node.target, None)
        self.generic_visit(node)

    visit_AsyncFor = visit_For

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._targets(node.target, None)
        self.generic_visit(node)

    def visit_withitem(self, node: ast.withitem) -> None:
        if node.optional_vars is not None:
            self._targets(node.optional_vars, None)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._bind(node.name, node.lineno, node.returns)
        self._scope.append(node.name)
        arguments = node.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
            if each is not None:
                self._bind(each.arg, each.lineno, each.annotation)
        self.generic_visit(node)
        self._scope.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()


def suspects(folder: Path, root: Path = ROOT) -> Iterator[Binding]:
    for path in sorted(folder.rglob("*.py")):
        names = Names(path.relative_to(root).as_posix())
        names.visit(ast.parse(path.read_text(encoding="utf-8")))
        yield from names.suspects()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    parser.add_argument("--count", action="store_true", help="only the counts")
    options = parser.parse_args()
    matches = [binding for folder in options.folders for binding in suspects(ROOT / folder)]
    for binding in () if options.count else matches:
        print(binding)
    by_folder = Counter("/".join(binding.path.split("/")[:2]) for binding in matches)
    for folder, number in sorted(by_folder.items()):
        print(f"{number:5} {folder}")
    print(f"{len(matches):5} in all")


if __name__ == "__main__":
    main()
