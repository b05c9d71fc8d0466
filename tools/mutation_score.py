"""How many small defects the tests notice: `python tools/mutation_score.py scheduler pool sampler keys limits`.

Each mutant is one module with one small change (a comparison, a constant, a condition, a statement that is gone). The
tests named for that module run against it in a forked process; a mutant that they pass has survived. A fork per mutant
instead of an interpreter per mutant, because importing torch takes longer than most of these tests: that is why this is
not mutmut or cosmic-ray.

Messages are not mutated, nor annotations, docstrings and `zip(strict=...)`. Where a module has more mutants than
`--sample`, that many are drawn with `--seed`. Scores as measured, with the survivors: docs/testing.md.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import math
import os
import pickle
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = (
    "torch",
    "transformers",
    "numpy",
    "hypothesis",
    "pydantic",
    "PIL.Image",
    "soundfile",
    "av",
    "httpx",
    "rich",
)
PRIVATE = ("omnistage", "tests", "conftest", "test_")
"""Modules that are imported anew in each fork, because the mutant may be one of them or be imported by them."""


@dataclass(frozen=True)
class Target:
    """A module and the tests that are meant to notice its defects."""

    module: str
    tests: tuple[str, ...]
    skip: tuple[str, ...] = ()
    """Functions and classes that are not this target's subject."""


TARGETS = {
    "scheduler": (Target("omnistage.engines.ar.scheduler", ("tests/unit/test_scheduler.py",)),),
    "pool": (Target("omnistage.engines.ar.block_pool", ("tests/unit/test_block_pool.py",)),),
    "sampler": (
        Target("omnistage.engines.ar.sampling.sampler", ("tests/unit/test_sampler.py",)),
        Target("omnistage.engines.ar.sampling.processors", ("tests/unit/test_sampler.py",)),
        Target("omnistage.engines.ar.sampling.selection", ("tests/unit/test_sampler.py",)),
    ),
    "codec": (Target("omnistage.engines.codec.scheduler", ("tests/unit/test_codec_scheduler.py",)),),
    "keys": (Target("omnistage.server.access.keys", ("tests/unit/test_keyring.py",)),),
    "limits": (
        Target("omnistage.media.limits", ("tests/unit/test_media_limits.py",)),
        Target(
            "omnistage.media.source",
            ("tests/unit/test_media_limits.py", "tests/unit/test_media_source.py"),
        ),
        Target("omnistage.media.image", ("tests/unit/test_media_limits.py", "tests/unit/test_media_image.py")),
    ),
}

EQUIVALENT = {
    "omnistage.engines.ar.sampling.selection": {
        "columns = min(max(_COLUMNS, 4 * largest), vocab_size // 2)": (
            ".*",
            "fewer or more columns: it finds the same",
        ),
        "self._too_narrow = columns < 2 * largest": (".*", "both ways find the same tokens"),
        "used = np.arange(max(1, np.maximum.reduce(lengths, axis=None))) < lengths": (
            "1 -> 2",
            "a column of padding more",
        ),
        "UNCOVERED = -2": ("2 -> 3", "another number that no token has"),
        "shape = len(array), 1": ("1 -> 2", "a second column that is never read"),
        "keys = (bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))).astype(np.int64)": (
            "31 -> 32",
            "of the sign alone, as numpy shifts",
        ),
        "clear = (kth > candidates.floor / self._temperature)[:, 0].tolist()": ("0 -> -1", "the only column"),
        "lengths, floors, tops = candidates.lengths[:, 0].tolist(), candidates.floor[:, 0].tolist(), "
        "best[:, 0].tolist()": (
            "0 -> -1",
            "the only column",
        ),
        "scaled = row if temperature == 1 else np.divide(row, np.float32(temperature), out=shares)": (
            "1 -> 0",
            "divided by 1",
        ),
        "masses = mass.tolist() if width <= _SHORT else mass": (".*", "the same numbers, as a list or as an array"),
        "_CANDIDATES = (128, 4096)": (".*", "what the first ones do not settle is looked at again"),
        "_COLUMNS = 512": (".*", "fewer or more columns: it finds the same"),
        "_PIECE = 512": (".*", "sums of other pieces of a row"),
        "_SHORT = 1024": (".*", "the same numbers, as a list or as an array"),
        "self._weighed = [i for i, rule in enumerate(self._rules) if rule.top_p < 1 and not rule.limited]": (
            "1 -> 2|Lt -> LtE",
            "one sum more, which leaves the row whole",
        ),
    },
    "omnistage.engines.ar.sampling.processors": {
        "self._apply_places(x.reshape(-1))": ("1 -> 2", "numpy infers the size for any negative number"),
        "flat[places] = np.where(values < 0, values * factor, values / factor)": ("Lt -> LtE", "0 stays 0 both ways"),
        "changed = torch.where(rows < 0, rows * factor, rows / factor)": ("Lt -> LtE", "0 stays 0 both ways"),
    },
    "omnistage.engines.ar.sampling.sampler": {
        "if not (plan.constrained or logprobs or min(tokens) < 0):": (
            "0 -> 1|Lt -> LtE",
            "token 0 goes the longer way",
        ),
        "count = min(state.params.logprobs or 0, plan.tops)": ("0 -> -1", "no alternatives either"),
    },
}
"""Lines of which these mutants leave every result as it is, and why: such survivors are listed and not counted."""

# ------------------------------------------------------------------------------------------------------ mutants

Change = Callable[[], None]

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One change: the number of the node in the order of `ast.walk`, and which of its changes."""

    line: int
    what: str
    node: int
    choice: int
    in_function: bool
    """Whether it can be exchanged without a new import."""


def changes(node: ast.AST, parent: ast.AST | None) -> Iterator[tuple[str, Change]]:
    """What can be changed at a node; each change is made in place."""
    match node:
        case ast.Compare(ops=operators):
            for index, operator in enumerate(operators):
                for other in COMPARISONS[type(operator)]:
                    name = f"{type(operator).__name__} -> {other.__name__}"
                    yield name, lambda i=index, o=other: operators.__setitem__(i, o())
        case ast.BoolOp():
            other_op = ast.Or if isinstance(node.op, ast.And) else ast.And
            yield f"{type(node.op).__name__} -> {other_op.__name__}", lambda: setattr(node, "op", other_op())
        case ast.UnaryOp(op=ast.Not()):
            yield "not x -> bool(x)", lambda: setattr(node, "op", ast.UAdd()) or _as_bool(node)
        case ast.BinOp(op=operator) if type(operator) in OPERATORS and not isinstance(node.left, ast.JoinedStr):
            other_kind = OPERATORS[type(operator)]
            yield f"{type(operator).__name__} -> {other_kind.__name__}", lambda: setattr(node, "op", other_kind())
        case ast.AugAssign(op=operator) if type(operator) in OPERATORS:
            other_kind = OPERATORS[type(operator)]
            yield f"{type(operator).__name__}= -> {other_kind.__name__}=", lambda: setattr(node, "op", other_kind())
        case ast.Constant(value=bool() as value):
            yield f"{value} -> {not value}", lambda: setattr(node, "value", not value)
        case ast.Constant(value=int() | float() as number):
            yield f"{number} -> {number + 1}", lambda: setattr(node, "value", number + 1)
            yield f"{number} -> {number - 1}", lambda: setattr(node, "value", number - 1)
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield f"{name} -> {CALLS[name]}", lambda: setattr(node.func, "id", CALLS[name])
        case ast.Return(value=value) if value is not None and not _is_falsy(value):
            yield "return -> return None", lambda: setattr(node, "value", ast.Constant(None))
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
        yield "condition negated", lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))


def _as_bool(node: ast.UnaryOp) -> None:
    node.op = ast.Not()
    node.operand = ast.UnaryOp(ast.Not(), node.operand)


def _is_falsy(node: ast.AST) -> bool:
    """None itself, or False: that is changed to True, and None in its place is as false."""
    return isinstance(node, ast.Constant) and (node.value is None or node.value is False)


def _deletable(node: ast.stmt) -> bool:
    """Statements without which the rest still runs: no mutant that dies of a NameError alone."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Delete | ast.Continue | ast.Break)


class _Nodes:
    """The nodes of a module that are mutated, in a fixed order, with their parents."""

    def __init__(self, tree: ast.Module, skip: Sequence[str]) -> None:
        self._skip = skip
        self.found: list[tuple[ast.AST, ast.AST | None]] = []
        self.in_function: list[bool] = []
        self._visit(tree, None, False)

    def _visit(self, node: ast.AST, parent: ast.AST | None, inside: bool) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name in self._skip:
            return
        self.found.append((node, parent))
        self.in_function.append(inside)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not self._ignored(child, node):
                    self._visit(child, node, inside)

    @staticmethod
    def _ignored(child: ast.AST, parent: ast.AST) -> bool:
        if isinstance(child, ast.JoinedStr | ast.Import | ast.ImportFrom):
            return True
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            return True
        if isinstance(child, ast.keyword) and child.arg in ("strict", "slots", "description"):
            return True
        return isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)


def mutants_of(source: str, skip: Sequence[str]) -> list[Mutant]:
    found = []
    nodes = _Nodes(ast.parse(source), skip)
    for number, (node, parent) in enumerate(nodes.found):
        inside = nodes.in_function[number]
        line = getattr(node, "lineno", 0)
        names = [name for name, _ in changes(node, parent)]
        found += [Mutant(line, name, number, choice, inside) for choice, name in enumerate(names)]
        if isinstance(node, ast.stmt) and _deletable(node):
            found.append(Mutant(line, f"deleted: {ast.unparse(node)[:60]}", number, -1, inside))
    return found


def mutated(source: str, mutant: Mutant, skip: Sequence[str]) -> ast.Module:
    tree = ast.parse(source)
    node, parent = _Nodes(tree, skip).found[mutant.node]
    if mutant.choice >= 0:
        list(changes(node, parent))[mutant.choice][1]()
    else:
        for _, value in ast.iter_fields(parent):  # type: ignore[arg-type]
            if isinstance(value, list) and node in value:
                value[value.index(node)] = ast.copy_location(ast.Pass(), node)
    return ast.fix_missing_locations(tree)


# ------------------------------------------------------------------------------------------------------ running


class _Loader(importlib.machinery.SourceFileLoader):
    code: CodeType

    def get_code(self, fullname: str) -> CodeType:
        return self.code


class _Finder(importlib.abc.MetaPathFinder):
    """Imports a mutant in the place of its module."""

    def __init__(self, module: str, path: Path, tree: ast.Module) -> None:
        self._module, self._path = module, path
        self._code = compile(tree, str(path), "exec")

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> object:
        if fullname != self._module:
            return None
        loader = _Loader(fullname, str(self._path))
        loader.code = self._code
        return importlib.util.spec_from_file_location(fullname, self._path, loader=loader)


def exchange(live: object, mutant: object) -> None:
    """Give every function of a module or class the code of its mutant, so that all who imported it run that."""
    for name, new in list(vars(mutant).items()):
        old = vars(live).get(name)
        old, new = (getattr(part, "__func__", part) for part in (old, new))
        if isinstance(old, property) and isinstance(new, property):
            old, new = old.fget, new.fget
        old, new = inspect.unwrap(old) if callable(old) else old, inspect.unwrap(new) if callable(new) else new
        if isinstance(old, FunctionType) and isinstance(new, FunctionType):
            if old.__module__ == new.__module__ and len(old.__code__.co_freevars) == len(new.__code__.co_freevars):
                old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__
        elif isinstance(old, type) and isinstance(new, type) and old.__module__ == new.__module__ and old is not new:
            exchange(old, new)


def apply(target: Target, tree: ast.Module) -> None:
    live = sys.modules[target.module]
    fresh = ModuleType(target.module)
    fresh.__file__ = live.__file__
    sys.modules[target.module] = fresh  # dataclasses look their module up
    try:
        exec(compile(tree, str(live.__file__), "exec"), vars(fresh))
    finally:
        sys.modules[target.module] = live
    exchange(live, fresh)


def in_fork(work: Callable[[], int], limit: float = 600) -> int:
    """What `work` gives in a forked process that may compute for `limit` seconds; 70 where it died, or waits for ever.

    The processor's seconds, so that other load on the machine kills no mutant.
    """
    child = os.fork()
    if child == 0:
        status = 70
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit), math.ceil(limit) + 1))
            signal.alarm(900)
            status = work()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 70


class _Collected:
    """A pytest plugin: instead of running the tests it hands them to `use`, as a function that runs them."""

    def __init__(self, use: Callable[[Callable[[], int]], None]) -> None:
        self._use = use

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        def run() -> int:
            for place, item in enumerate(session.items):
                following = session.items[place + 1] if place + 1 < len(session.items) else None
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.testsfailed:
                    return 1
            return 0

        self._use(run)
        return True


def pytest_main(tests: Sequence[str], plugins: Sequence[object] = ()) -> int:
    """Run pytest without a word, and without chance or shrinking in property tests."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutation", derandomize=True, database=None, deadline=None, phases=phases)
    hypothesis.settings.load_profile("mutation")
    off = [part for name in ("cacheprovider", "xdist", "cov", "schemathesis") for part in ("-p", f"no:{name}")]
    return int(pytest.main(["-x", "-q", *off, "--no-header", *tests], plugins=list(plugins)))


class Run:
    """One module's mutants against its tests."""

    def __init__(self, target: Target, chosen: Sequence[Mutant], source: str, path: Path) -> None:
        self.target, self.source, self.path = target, source, path
        self.inner = [mutant for mutant in chosen if mutant.in_function]
        self.outer = [mutant for mutant in chosen if not mutant.in_function]
        self.survivors: list[Mutant] = []
        self.complete = False
        """Whether all mutants in functions ran, with tests that pass without one."""
        self.out = os.dup(1)

    def say(self, text: str) -> None:
        os.write(self.out, f"{text}\n".encode())

    def _note(self, mutant: Mutant, status: int) -> None:
        if status == 0:
            self.survivors.append(mutant)
            reason = self.reason(mutant)
            verdict = "survived " if reason is None else f"equivalent ({reason})"
            self.say(f"  {verdict} {self.path.relative_to(ROOT)}:{mutant.line}: {mutant.what}")

    def reason(self, mutant: Mutant) -> str | None:
        """Why a mutant of this line may leave every result as it is."""
        line = self.source.splitlines()[mutant.line - 1].strip()
        mutants, reason = EQUIVALENT.get(self.target.module, {}).get(line, ("", ""))
        return reason if re.fullmatch(mutants, mutant.what) else None

    def _tree(self, mutant: Mutant) -> ast.Module:
        return mutated(self.source, mutant, self.target.skip)

    def functions(self, run: Callable[[], int]) -> None:
        """Mutants within functions, each in a fork of the process that has collected the tests."""
        begun = os.times()
        if in_fork(run) != 0:
            raise SystemExit(f"{self.target.module}: its tests fail without a mutant")
        usual = os.times().children_user - begun.children_user
        self.say(f"{self.target.module}: {len(self.inner)} mutants in functions, tests compute for {usual:.1f} s")

        def mutated_run(mutant: Mutant) -> int:
            apply(self.target, self._tree(mutant))
            return run()

        for mutant in self.inner:
            self._note(mutant, in_fork(lambda one=mutant: mutated_run(one), 3 + 4 * usual))  # type: ignore[misc]
        if in_fork(run) != 0:  # or whatever changed under our feet seems to have killed them
            raise SystemExit(f"{self.target.module}: its tests no longer pass without a mutant")
        self.complete = True

    def all(self) -> list[Mutant]:
        """Mutants of constants and class bodies need a new import, so each has a pytest of its own."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            pytest_main(self.target.tests, [_Collected(self.functions)])
            with os.fdopen(write, "wb") as pipe:
                pickle.dump((self.complete, self.survivors), pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            data = pipe.read()
        os.waitpid(child, 0)
        if data:
            self.complete, self.survivors = pickle.loads(data)  # review: allow[SEC04] from our own child, a pipe
        if not self.complete:
            raise SystemExit(f"{self.target.module}: no score: its tests do not pass without a mutant")
        self.say(f"  {len(self.outer)} mutants outside functions")
        for mutant in self.outer:
            finder = _Finder(self.target.module, self.path, self._tree(mutant))

            def fresh(finder: _Finder = finder) -> int:
                sys.meta_path.insert(0, finder)
                return pytest_main(self.target.tests)

            self._note(mutant, in_fork(fresh))
        if self.outer and in_fork(lambda: pytest_main(self.target.tests)) != 0:
            raise SystemExit(f"{self.target.module}: its tests no longer pass without a mutant")
        return self.survivors


def preload() -> None:
    """Import what does not change, once: each fork then starts with it."""
    from omnistage.compat import prepare_torchvision

    prepare_torchvision(required=False)
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in [name for name in sys.modules if name.startswith(PRIVATE)]:
        del sys.modules[name]
    gc.collect()
    gc.freeze()


def score(target: Target, sample: int | None, seed: int, only: str | None) -> tuple[int, int]:
    path = ROOT / (target.module.replace(".", "/") + ".py")
    source = path.read_text(encoding="utf-8")
    chosen = mutants_of(source, target.skip)
    total = len(chosen)
    if sample is not None and sample < total:
        chosen = sorted(random.Random(seed).sample(chosen, sample), key=lambda mutant: (mutant.line, mutant.node))
    if only is not None:
        low, _, high = only.partition("-")
        chosen = [mutant for mutant in chosen if int(low) <= mutant.line <= int(high or low)]
    begun = time.perf_counter()
    run = Run(target, chosen, source, path)
    survivors = run.all()
    equivalent = sum(run.reason(mutant) is not None for mutant in survivors)
    killed, counted = len(chosen) - len(survivors), len(chosen) - equivalent
    seconds = time.perf_counter() - begun
    share = killed / max(counted, 1)
    print(f"  {killed}/{counted} = {share:.1%} of {total}, {equivalent} equivalent, {seconds:.0f} s", flush=True)
    return killed, counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("targets", nargs="+", choices=[*TARGETS, "all"])
    parser.add_argument("--sample", type=int, help="mutants of each module at most; all of them without it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--module", help="only the module whose name ends so")
    parser.add_argument("--lines", help="only mutants of a line, or of lines FROM-TO")
    parser.add_argument("--list", action="store_true", help="only count the mutants")
    given = parser.parse_args()
    os.chdir(ROOT)
    preload()
    names = list(TARGETS) if "all" in given.targets else given.targets
    for name in names:
        killed = ran = 0
        for target in TARGETS[name]:
            if given.module is not None and not target.module.endswith(given.module):
                continue
            if given.list:
                source = (ROOT / (target.module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
                print(target.module, len(mutants_of(source, target.skip)))
                continue
            one, chosen = score(target, given.sample, given.seed, given.lines)
            killed, ran = killed + one, ran + chosen
        if ran:
            print(f"{name}: {killed}/{ran} = {killed / ran:.1%}", flush=True)
    gc.unfreeze()  # or triton complains of what is left at the end


if __name__ == "__main__":
    main()
