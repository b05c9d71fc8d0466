"""Tests that depend on the clock."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from omnistage_review.registry import Hits, rule
from omnistage_review.syntax import ParsedFile, last_name, literal, method, targets, walk_scope

_CLOCKS = {
    "time.time", "time.perf_counter", "time.monotonic", "time.perf_counter_ns", "time.monotonic_ns",
    "time.time_ns", "timeit.default_timer", "timeit.timeit",
}  # fmt: skip


def _reads_clock(file: ParsedFile, node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Call) and file.name(inner.func) in _CLOCKS for inner in ast.walk(node))


def _durations(file: ParsedFile, scope: ast.AST) -> tuple[set[str], set[str]]:
    """Variables of a function that are differences of a clock's readings, and those that are such readings."""
    nodes = [node for node in walk_scope(scope) if isinstance(node, ast.Assign)]
    clocks = {last_name(target) for node in nodes if _is_clock(file, node.value) for target in targets(node)} - {""}
    spans = {last_name(target) for node in nodes if _measures(file, node.value, clocks) for target in targets(node)}
    return spans - {""}, clocks


def _is_clock(file: ParsedFile, node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and file.name(node.func) in _CLOCKS


def _measures(file: ParsedFile, node: ast.expr, clocks: set[str]) -> bool:
    """Whether an expression holds the difference of two readings of a clock."""
    return any(
        isinstance(inner, ast.BinOp)
        and isinstance(inner.op, ast.Sub)
        and (_reads_clock(file, inner) or {last_name(inner.left), last_name(inner.right)} <= clocks)
        for inner in ast.walk(node)
    )


def _upper_bounds(file: ParsedFile) -> Iterator[tuple[ast.AST, ast.expr]]:
    """What tests assert to be less than something, with the assertion. That something took long can always hold."""
    for node in file.nodes(ast.Assert):
        for test in ast.walk(node.test):
            if isinstance(test, ast.Compare):
                sides = [test.left, *test.comparators]
                for left, operator, right in zip(sides, test.ops, sides[1:], strict=False):
                    if isinstance(operator, ast.Lt | ast.LtE):
                        yield node, left
                    elif isinstance(operator, ast.Gt | ast.GtE):
                        yield node, right
    for call in file.nodes(ast.Call):
        if method(call) in ("assertLess", "assertLessEqual") and len(call.args) > 1:
            yield call, call.args[0]
        elif method(call) in ("assertGreater", "assertGreaterEqual") and len(call.args) > 1:
            yield call, call.args[1]


@rule(
    "TST02",
    "Duration asserted in a test",
    "medium",
    "tests",
    why="The machine that runs the tests is sometimes busy: the test fails without a defect, and nobody believes it.",
    fix="Count what costs time (calls, copies, tokens, launches) and assert that; keep durations in benchmarks.",
)
def asserted_duration(file: ParsedFile) -> Hits:
    if not file.is_test:
        return
    measured: dict[ast.AST, tuple[set[str], set[str]]] = {}
    for node, bounded in _upper_bounds(file):
        scope = file.scope(node)
        if scope not in measured:
            measured[scope] = _durations(file, scope)
        durations, clocks = measured[scope]
        if last_name(bounded) in durations or (isinstance(bounded, ast.BinOp) and _measures(file, bounded, clocks)):
            yield node, f"`{ast.unparse(bounded)[:80]}` has an upper bound, which fails on a busy machine"


@rule(
    "TST03",
    "Sleep in a test",
    "low",
    "tests",
    why="Too short on a busy machine, too long on all others.",
    fix="Wait for an event, or poll a condition with a deadline.",
)
def sleeps(file: ParsedFile) -> Hits:
    if not file.is_test:
        return
    for call in file.nodes(ast.Call):
        is_sleep = file.name(call.func) in ("time.sleep", "asyncio.sleep") and bool(call.args)
        if is_sleep and literal(call.args[0]) != 0 and not _polls(file, call):
            yield call, f"`{ast.unparse(call)}`"


def _polls(file: ParsedFile, call: ast.Call) -> bool:
    """Inside a loop the sleep is a pause between questions; in a helper it may be what is tested."""
    for outer in file.ancestors(call):
        if isinstance(outer, ast.While | ast.For | ast.AsyncFor):
            return True
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            return not outer.name.startswith("test_")
    return False
