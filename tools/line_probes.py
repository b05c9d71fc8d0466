"""Coverage of lines and branches by probes in the imported code; `line_probes_plugin.py` is pytest's plugin of it.

Tracing, as coverage.py does it before Python 3.12, slows every instruction of the process, those of torch and
transformers too: on three test files it cost 28 % more processor time than no measuring, the probes 15 %
(docs/testing.md). Here the modules of `[tool.coverage.run] source` are imported with a probe before each statement,
`__probes__[line] = None`, and nothing else is slower. At the end of the session the lines become coverage.py's own data
in `.coverage`; `coverage report` reads that with its own settings.

Branches: a body that ran was entered. That an `if`, `for` or `while` went on past its body is seen by a probe in its
`else`, under the negative line. For `case`, `except`, `with` and one-line bodies a way between two executed lines
counts as taken.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

import pytest
from coverage import Coverage, CoverageData
from coverage.parser import PythonParser

ROOT = Path(__file__).resolve().parent.parent
NAME = "__probes__"
LINES: defaultdict[str, dict[int, None]] = defaultdict(dict)
"""By file: the lines that ran, and negative those whose condition was false or whose loop came to its end."""


def instrument(source: bytes | str, path: str) -> CodeType:
    """The module's code with its probes."""
    tree = ast.parse(source, path)
    _Probes().visit(tree)
    return compile(tree, path, "exec", dont_inherit=True)


def first_line(statement: ast.stmt) -> int:
    return min([statement.lineno, *_decorator_lines(statement)])


def _decorator_lines(statement: ast.stmt) -> list[int]:
    decorators: Sequence[ast.expr] = getattr(statement, "decorator_list", ())
    return [decorator.lineno for decorator in decorators]


def _probe(line: int, at: ast.stmt | ast.expr | ast.excepthandler) -> ast.stmt:
    place = ast.Subscript(ast.Name(NAME, ast.Load()), ast.Constant(line), ast.Store())
    probe = ast.Assign([place], ast.Constant(None))
    for node in ast.walk(probe):
        ast.copy_location(node, at)
    return probe


class _Probes(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                setattr(node, field, self._with_probes(block, documented=field == "body"))
        return node

    def _with_probes(self, block: list[ast.stmt], documented: bool) -> list[ast.stmt]:
        probed: list[ast.stmt] = []
        waiting: list[int] = []  # nothing may stand before an import of the future
        for i, statement in enumerate(block):
            waiting += sorted({statement.lineno, *_decorator_lines(statement)})
            text = i == 0 and documented and isinstance(statement, ast.Expr) and _is_text(statement.value)
            if not text and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
                probed += [_probe(line, statement) for line in waiting]
                waiting = []
            probed.append(statement)
        return probed + [_probe(line, block[-1]) for line in waiting]

    def visit_branch(self, node: ast.If | ast.For | ast.AsyncFor | ast.While) -> ast.AST:
        self.generic_visit(node)
        node.orelse = [_probe(-node.lineno, node), *node.orelse]
        return node

    visit_If = visit_For = visit_AsyncFor = visit_While = visit_branch

    def visit_handlers(self, node: ast.Try | ast.TryStar) -> ast.AST:
        """Where a handler runs, those before it were looked at."""
        self.generic_visit(node)
        for i, handler in enumerate(node.handlers):
            handler.body = [_probe(each.lineno, handler) for each in node.handlers[: i + 1]] + handler.body
        return node

    visit_Try = visit_TryStar = visit_handlers

    def visit_Match(self, node: ast.Match) -> ast.AST:
        self.generic_visit(node)
        for i, case in enumerate(node.cases):
            looked_at = [each.pattern.lineno for each in node.cases[: i + 1]]
            case.body = [_probe(line, case.pattern) for line in looked_at] + case.body
        return node


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return instrument(self.get_data(path), path)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[NAME] = LINES[self.path]
        super().exec_module(module)


class Finder(MetaPathFinder):
    def __init__(self, packages: Iterable[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        for finder in (each for each in sys.meta_path if each is not self):
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                break
        else:
            return None
        if type(spec.loader) is not SourceFileLoader or spec.origin is None:
            return spec
        places = spec.submodule_search_locations
        return importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=_Loader(fullname, spec.origin), submodule_search_locations=places
        )


def arcs_of(source: str, lines: Iterable[int]) -> set[tuple[int, int]]:
    """The ways through a file that the probes have seen, in coverage.py's terms."""
    seen = set(lines)
    parser = PythonParser(text=source)
    parser.parse_source()
    ran = {parser.first_line(line) for line in seen if line > 0}
    passed = {parser.first_line(-line) for line in seen if line < 0}
    bodies = {
        parser.first_line(node.lineno): parser.first_line(first_line(node.body[0]))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.If, ast.For, ast.AsyncFor, ast.While))
    }
    ways: defaultdict[int, set[int]] = defaultdict(set)
    for start, end in parser.arcs():
        ways[start].add(end)
    taken = {(-1, line) for line in ran}
    for start, ends in ways.items():
        if start > 0 and start not in ran:
            continue
        for end in ends:
            body = bodies.get(start)
            if len(ends) > 1 and body not in (None, start, end):
                went = start in passed
            else:
                went = end < 0 or end in ran
            if went:
                taken.add((start, end))
    return taken


def write_data(place: Path, lines: Mapping[str, Iterable[int]], measured: Iterable[str]) -> None:
    """Coverage.py's data file. Files of the packages that were never imported are in it too, with nothing that ran."""
    place.unlink(missing_ok=True)
    data = CoverageData(basename=str(place))
    data.add_arcs({path: arcs_of(Path(path).read_text(), seen) for path, seen in lines.items()})
    for name in measured:
        spec = importlib.util.find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or ():
            data.touch_files([str(path) for path in sorted(Path(folder).rglob("*.py")) if str(path) not in lines])
    data.write()


def packages() -> list[str]:
    named = Coverage(config_file=str(ROOT / "pyproject.toml"), data_file=None).get_option("run:source")
    if not isinstance(named, list):
        raise ValueError("pyproject.toml: [tool.coverage.run] source must list the packages to measure")
    return named


class Recorder:
    """Workers send their lines to the session that started them; it writes the data."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_sessionfinish(self) -> None:
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output["line_probes"] = {path: sorted(lines) for path, lines in LINES.items()}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        for path, lines in getattr(node, "workeroutput", {}).get("line_probes", {}).items():
            LINES[path].update(dict.fromkeys(lines))

    def pytest_terminal_summary(self) -> None:
        if not hasattr(self._config, "workeroutput"):
            write_data(ROOT / ".coverage", LINES, packages())
