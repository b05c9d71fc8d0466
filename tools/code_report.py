"""Figures of the code: sizes, layers, the path of a request and of a token, habits, the largest pieces.

python tools/code_report.py                               this checkout
python tools/code_report.py --root A --against B          A, each figure as "B → A" where they differ: B is the earlier
python tools/code_report.py --no-hot-path                 without running anything: seconds instead of a minute
python tools/code_report.py --list-hot-path               also every function on the path of a request and of a token

`hot_path.py` says how the path of a request and of a token is counted.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import io
import json
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hot_path import Call, hot_path

# A layer may import those of a lower rank and itself; layers of one rank do not import each other.
LAYERS: dict[str, int] = {
    "core": 0,
    "compat": 10,
    "media": 11,
    "quantisation": 11,
    "config": 12,
    "engines": 20,
    "models": 30,
    "placement": 35,
    "pipeline": 40,
    "omni": 50,
    "bench": 60,
    "server": 60,
    "cli": 70,
    "package": 80,  # omnistage/__init__.py: the public names
}
# Modules below the package whose layer has another name; the first group is the layout before core/ was there.
PLACES: dict[str, str] = {
    **dict.fromkeys(("types", "params", "errors", "record", "verify"), "core"),
    **dict.fromkeys(("chat", "batch"), "pipeline"),
    "loadtest": "bench",
    "hf": "compat",
    "__main__": "package",
}
STARTER = "starter"  # its own distribution, or what becomes it: no layer, and in no total
STARTER_PLACES = ("models/starter", "parts")
FREE_NAMES = frozenset({"__version__"})  # of the package: a constant, which any layer may read

FUNCTION_LIMITS, FILE_LIMIT, TOP = (60, 80), 450, 15


@dataclass(frozen=True, slots=True)
class Source:
    """A file of the package or of the starter."""

    path: str  # from the root
    module: str
    folder: str
    layer: str
    text: str
    tree: ast.Module


@dataclass(frozen=True, slots=True)
class Edge:
    """One module imports another, at the first of its lines that do."""

    path: str
    line: int
    kind: str  # module, lazy (in a function), typing (under TYPE_CHECKING)
    source: str  # layers
    target: str
    module: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.source} -> {self.target}: {self.module} ({self.kind})"


@dataclass(frozen=True, slots=True)
class Report:
    """All figures of one checkout."""

    root: str
    sizes: dict[str, list[int]]  # folder: files, lines, code lines
    habits: dict[str, list[int]]  # folder: in the order of HABITS
    edges: list[Edge]
    functions: dict[str, int]  # "path:line name": lines, the longest first
    files: dict[str, int]
    request: list[Call]
    token: list[Call]


# ---------------------------------------------------------------------------------------------------------- reading


def read_sources(root: Path, package: str) -> list[Source]:
    """Every Python file of the package and the starter. Raises `SystemExit` if there is no such package."""
    if not (root / package / "__init__.py").is_file():
        raise SystemExit(f"error: {root} has no package {package}")
    return [*_sources(root, root / package, package), *_sources(root, root / STARTER / f"{package}_starter", package)]


def _sources(root: Path, folder: Path, package: str) -> Iterator[Source]:
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder).as_posix()
        name = ".".join((folder.name, *inside.removesuffix(".py").split("/"))).removesuffix(".__init__")
        layer = layer_of(name, package)
        top = inside.split("/")[0] if "/" in inside else "(top level)"
        text = path.read_text(encoding="utf-8")
        place = STARTER if layer == STARTER else top
        yield Source(path.relative_to(root).as_posix(), name, place, layer, text, ast.parse(text))


def layer_of(module: str, package: str = "omnistage") -> str:
    """The layer of a module. Raises `KeyError` for one that `LAYERS` and `PLACES` do not know."""
    if module.split(".")[0] == f"{package}_starter":
        return STARTER
    inside = module.removeprefix(package).lstrip(".").replace(".", "/")
    if any(f"{inside}/".startswith(f"{place}/") for place in STARTER_PLACES):
        return STARTER
    top = inside.split("/")[0] or "package"
    layer = PLACES.get(top, top)
    if layer not in LAYERS:
        raise KeyError(f"{module} has no layer; add it to LAYERS in tools/code_report.py")
    return layer


def code_lines(source: Source) -> int:
    """Lines that hold code: neither blank, nor only a comment, nor part of a docstring."""
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in quiet:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def function_sizes(source: Source) -> dict[str, int]:
    """Lines of each function, from `def` to its end, by "path:line name"; those inside count in the outer one too."""
    found: dict[str, int] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{prefix}{child.name}."
                if not isinstance(child, ast.ClassDef):
                    lines = (child.end_lineno or child.lineno) - child.lineno + 1
                    found[f"{source.path}:{child.lineno} {prefix}{child.name}"] = lines
            visit(child, inner)

    visit(source.tree, "")
    return found


HABITS = ("Any", "isinstance(", "getattr( with default", "except Exception")


def habits(source: Source) -> list[int]:
    """How often each of `HABITS` occurs; `Any` wherever it is used, so in aliases and casts as well as annotations."""
    found: Counter[str] = Counter()
    for node in ast.walk(source.tree):
        match node:
            case ast.Name(id="Any") | ast.Attribute(attr="Any"):
                found[HABITS[0]] += 1
            case ast.Call(func=ast.Name(id="isinstance")):
                found[HABITS[1]] += 1
            case ast.Call(func=ast.Name(id="getattr"), args=[_, _, _]):
                found[HABITS[2]] += 1
            case ast.ExceptHandler(type=ast.expr() as caught):
                kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
                found[HABITS[3]] += any(isinstance(kind, ast.Name) and kind.id == "Exception" for kind in kinds)
    return [found[habit] for habit in HABITS]


# ----------------------------------------------------------------------------------------------------------- layers


def import_edges(sources: Sequence[Source], package: str) -> list[Edge]:
    """Which module imports which, once a pair: module-level, lazy and typing imports, and literal `import_module`."""
    modules = {source.module for source in sources}
    edges: dict[tuple[str, str], Edge] = {}
    for source in sources:
        for node, kind in _import_nodes(source.tree, "module"):
            for target in _targets(node, source, modules):
                if target != source.module and target.split(".")[0] in (package, f"{package}_starter"):
                    edge = Edge(source.path, node.lineno, kind, source.layer, layer_of(target, package), target)
                    edges.setdefault((source.module, target), edge)
    return list(edges.values())


def _import_nodes(node: ast.AST, kind: str) -> Iterator[tuple[ast.Import | ast.ImportFrom | ast.Call, str]]:
    for child in ast.iter_child_nodes(node):
        inner = kind
        if isinstance(child, ast.Import | ast.ImportFrom | ast.Call):
            yield child, kind
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = "lazy"
        elif isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            inner = "typing"
        yield from _import_nodes(child, inner)


def _targets(node: ast.Import | ast.ImportFrom | ast.Call, source: Source, modules: set[str]) -> list[str]:
    """The modules that an import names; a name that is no module stands for the module it is taken from."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Call):
        if not ast.unparse(node.func).endswith("import_module") or not node.args:
            return []
        text = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
        literal = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
        return [literal if literal in modules else literal.rpartition(".")[0]]
    base = node.module or ""
    if node.level:
        parts = source.module.split(".")
        kept = len(parts) - node.level + source.path.endswith("__init__.py")
        base = ".".join(filter(None, (*parts[:kept], base)))
    names = [alias.name for alias in node.names if "." in base or alias.name not in FREE_NAMES]
    return list(dict.fromkeys(f"{base}.{name}" if f"{base}.{name}" in modules else base for name in names))


def upward(edges: Iterable[Edge]) -> list[Edge]:
    """The imports that go to a layer above, or beside; those from and to the starter are left out."""
    known = [edge for edge in edges if STARTER not in (edge.source, edge.target) and edge.source != edge.target]
    return [edge for edge in known if LAYERS[edge.target] >= LAYERS[edge.source]]


def upward_edges(root: Path, package: str = "omnistage") -> list[Edge]:
    """What `upward` finds in a checkout."""
    return upward(import_edges(read_sources(root, package), package))


# ----------------------------------------------------------------------------------------------------------- report


def measure(root: Path, package: str, *, run: bool) -> Report:
    """All figures of a checkout; `run` tells whether to count the path of a request and of a token."""
    sources = read_sources(root, package)
    sizes: dict[str, list[int]] = {}
    found: dict[str, list[int]] = {}
    functions: dict[str, int] = {}
    files: dict[str, int] = {}
    for source in sources:
        files[source.path] = len(source.text.splitlines())
        functions |= function_sizes(source)
        _add(sizes, source.folder, [1, files[source.path], code_lines(source)])
        _add(found, source.folder, habits(source))
    request, token = hot_path(root, package) if run else ([], [])
    edges = import_edges(sources, package)
    return Report(str(root), sizes, found, edges, _largest(functions), _largest(files), request, token)


def _add(table: dict[str, list[int]], folder: str, values: list[int]) -> None:
    table[folder] = [old + new for old, new in zip(table.get(folder, [0] * len(values)), values, strict=True)]


def _largest(sizes: dict[str, int]) -> dict[str, int]:
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, slots=True)
class Table:
    """Rows by their first cell."""

    title: str
    head: tuple[str, ...]
    rows: Mapping[str, Sequence[int | str]]


def figures(report: Report) -> list[Table]:
    """The tables that two checkouts are compared in."""
    order = [*LAYERS, STARTER]
    pairs = Counter((edge.source, edge.target) for edge in report.edges)
    matrix = {row: [pairs[row, column] for column in order] for row in order}
    bad = Counter(edge.kind for edge in upward(report.edges))
    kinds = ("module", "lazy", "typing")
    sizes = {f"functions > {limit} lines": [_over(report.functions, limit)] for limit in FUNCTION_LIMITS}
    sizes[f"files > {FILE_LIMIT} lines"] = [_over(report.files, FILE_LIMIT)]
    tables = [
        Table("Lines", ("folder", "files", "lines", "code lines"), _with_total(report.sizes)),
        Table("Imports between modules, from row to column", ("layer", *order), matrix),
        Table("Upward imports", ("", "all", *kinds), {"edges": [bad.total(), *(bad[kind] for kind in kinds)]}),
        Table("Habits", ("folder", *HABITS), _with_total(report.habits)),
        Table("Large pieces, the starter's too", ("", "number"), sizes),
    ]
    return [*tables, _path_table(report)] if report.request else tables


def _over(sizes: dict[str, int], limit: int) -> int:
    return sum(lines > limit for lines in sizes.values())


def _with_total(table: dict[str, list[int]]) -> dict[str, Sequence[int | str]]:
    """The folders in order, their total, and the starter, which is not in it."""
    rows: dict[str, Sequence[int | str]] = {name: table[name] for name in sorted(table) if name != STARTER}
    rows["total"] = [sum(column) for column in zip(*(table[name] for name in rows), strict=True)]
    return rows | {STARTER: table[STARTER]} if STARTER in table else rows


def _path_table(report: Report) -> Table:
    rows: dict[str, Sequence[int | str]] = {}
    for name, calls in (("request", report.request), ("token", report.token)):
        named = [call for call in calls if call.named]
        files = len({call.path for call in named})
        rows[name] = [len(named), files, round(sum(call.calls for call in named)), len(calls) - len(named)]
    return Table("Hot path", ("", "functions", "files", "calls", "lambdas and comprehensions beside"), rows)


def lists(report: Report) -> list[Table]:
    """The tables that belong to one checkout."""
    edges: dict[str, Sequence[int | str]] = {
        f"{edge.path}:{edge.line} {edge.module}": [f"{edge.source} → {edge.target}", edge.kind]
        for edge in upward(report.edges)
    }
    return [
        Table("Upward imports, each", ("import", "layers", "kind"), edges),
        Table(f"The {TOP} largest functions", ("function", "lines"), _top(report.functions)),
        Table(f"The {TOP} largest files", ("file", "lines"), _top(report.files)),
    ]


def _top(sizes: dict[str, int]) -> dict[str, Sequence[int | str]]:
    return {name: [lines] for name, lines in list(sizes.items())[:TOP]}


def markdown(table: Table, earlier: Table | None = None) -> str:
    """The table; cells that differ from the earlier one's are "earlier → now", and a row that only one has says so."""
    before = table.rows if earlier is None else earlier.rows
    lines = [f"## {table.title}", "", f"| {' | '.join(table.head)} |", f"| --- |{' ---: |' * (len(table.head) - 1)}"]
    last = ("total", STARTER)  # after the folders of both
    for name in sorted(dict.fromkeys((*before, *table.rows)), key=lambda name: name in last and 1 + last.index(name)):
        none = ["-"] * (len(table.head) - 1)
        pairs = zip(before.get(name, none), table.rows.get(name, none), strict=True)
        cells = [str(now) if old == now else f"{old} → {now}" for old, now in pairs]
        lines.append(f"| {' | '.join((name, *cells))} |")
    return "\n".join([*lines, ""])


def path_list(title: str, calls: Iterable[Call]) -> str:
    """Functions by file, which says how many have a name, each with its first line and how often it was called."""
    lines = [f"## {title}"]
    files: dict[str, list[Call]] = {}
    for call in sorted(calls, key=lambda call: (call.path, call.line, call.name)):
        files.setdefault(call.path, []).append(call)
    for path, inside in files.items():
        lines += ["", f"{path} ({sum(call.named for call in inside)})"]
        lines += [f"{call.line:6} {call.calls:9.2f}  {call.name}" for call in inside]
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what `arguments`, those of the command line unless given, ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout to report on")
    parser.add_argument("--against", type=Path, metavar="ROOT", help="an earlier checkout to compare it with")
    parser.add_argument("--package", default="omnistage")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    parser.add_argument("--no-hot-path", action="store_true", help="do not run anything")
    parser.add_argument("--list-hot-path", action="store_true", help="print the functions of a request and of a token")
    given = parser.parse_args(arguments)
    roots = [root.resolve() for root in (given.root, given.against) if root is not None]
    reports = [measure(root, given.package, run=not given.no_hot_path) for root in roots]
    now, earlier = reports[0], reports[-1]
    print(f"# {now.root}" if now is earlier else f"# {earlier.root} → {now.root}", end="\n\n")
    for table, old in zip(figures(now), figures(earlier), strict=True):
        print(markdown(table, old))
    for report in reversed(reports):
        if len(reports) > 1:
            print(f"# {report.root}", end="\n\n")
        for table in lists(report):
            print(markdown(table))
        if given.list_hot_path and report.request:
            print(path_list("A token: line, calls, function", report.token))
            print(path_list("A request: line, calls, function", report.request))
    if given.json is not None:
        given.json.write_text(json.dumps([dataclasses.asdict(report) for report in reports], indent=1) + "\n")


if __name__ == "__main__":
    main()
