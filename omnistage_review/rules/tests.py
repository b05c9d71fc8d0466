"""Tests that depend on the clock."""

from __future__ import annotations

import ast

from omnistage_review.registry import Hits, rule
from omnistage_review.syntax import ParsedFile, last_name, literal, targets, walk_scope

_CLOCKS = {
    "time.time", "time.perf_counter", "time.monotonic", "time.perf_counter_ns", "time.monotonic_ns",
    "time.time_ns", "timeit.default_timer", "timeit.timeit",
}  # fmt: skip


def _reads_clock(file: ParsedFile, node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Call) and file.name(inner.func) in _CLOCKS for inner in ast.walk(node))


def _durations(file: ParsedFile, scope: ast.AST) -> set[str]:
    """Variables of a function that are differences of a clock's readings."""
    nodes = sorted((node for node in walk_scope(scope) if isinstance(node, ast.Assign)), key=lambda node: node.lineno)
    names: set[str] = set()
    for node in nodes:
        subtracts = any(
            isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Sub) for inner in ast.walk(node.value)
        )
        if subtracts and _reads_clock(file, node.value):
            names |= {last_name(target) for target in targets(node)}
    return names - {""}


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
    measured: dict[ast.AST, set[str]] = {}
    for node in file.nodes(ast.Assert):
        if not isinstance(node.test, ast.Compare) or len(node.test.ops) != 1:
            continue
        left, operator, right = node.test.left, node.test.ops[0], node.test.comparators[0]
        if isinstance(operator, ast.Gt | ast.GtE):
            left, right = right, left
        elif not isinstance(operator, ast.Lt | ast.LtE):
            continue
        # Only an upper bound: that something took at least so long cannot fail on a busy machine.
        scope = file.scope(node)
        if scope not in measured:
            measured[scope] = _durations(file, scope)
        direct = isinstance(left, ast.BinOp) and isinstance(left.op, ast.Sub) and _reads_clock(file, left)
        if direct or last_name(left) in measured[scope]:
            yield node, f"`{ast.unparse(node.test)[:80]}` fails on a busy machine"


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
