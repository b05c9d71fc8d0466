"""Diffusion: timesteps and guidance."""

from __future__ import annotations

import ast
import re

from omnistage_review.registry import Hits, rule
from omnistage_review.syntax import ParsedFile, last_name, method, targets, walk_scope

_LINEAR = {"linspace", "arange", "range"}
_UNCONDITIONAL = re.compile(r"uncond|(^|_)(neg|negative|null|un)(_|$)", re.IGNORECASE)
_CONDITIONAL = re.compile(
    r"(^|_)(cond|conditional|conditioned|text|pos|positive|prompt)(_|$)|_cond\b|cond$", re.IGNORECASE
)


@rule(
    "DIF01",
    "Linear timesteps in place of the schedule",
    "medium",
    "diffusion",
    why="Models are trained on the spacing, shift and order of their scheduler; others give worse pictures.",
    fix="Call scheduler.set_timesteps(n) and use scheduler.timesteps; pass own sigmas through it.",
)
def linear_timesteps(file: ParsedFile) -> Hits:
    if not file.is_shipped:
        return
    nodes: list[ast.Assign | ast.For] = [*file.nodes(ast.Assign), *file.nodes(ast.For)]
    for node in nodes:
        value = node.value if isinstance(node, ast.Assign) else node.iter
        if not isinstance(value, ast.Call) or method(value) not in _LINEAR:
            continue
        places = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = r"(all_)?timesteps?|time_steps|ts" if isinstance(node, ast.Assign) else r"t|ts|timestep|time_step"
        matches = [last_name(target) for target in places if re.fullmatch(names, last_name(target))]
        scope = file.scope(node)
        if not matches or not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        owner = file.class_of(scope)
        if (owner is not None and "scheduler" in owner.name.lower()) or "timesteps" in scope.name:
            continue
        calls = [inner for inner in walk_scope(scope) if isinstance(inner, ast.Call)]
        steps = [inner for inner in calls if method(inner) == "step" and "scheduler" in ast.unparse(inner.func)]
        sets = [inner for inner in calls if method(inner) in ("set_timesteps", "retrieve_timesteps")]
        if isinstance(node, ast.For):
            steps = [inner for inner in steps if any(last_name(item) == matches[0] for item in inner.args)]
        if steps and not sets:
            yield node, f"`{matches[0]}` is `{ast.unparse(value)[:60]}`, and the scheduler's own are not used"


def _branch(node: ast.expr) -> str:
    """`uncond` or `cond` by the name of a prediction; empty where it says neither."""
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    name = last_name(node)
    if _UNCONDITIONAL.search(name):
        return "uncond"
    return "cond" if _CONDITIONAL.search(name) else ""


@rule(
    "DIF02",
    "Guidance with swapped branches",
    "high",
    "diffusion",
    why="Guidance then pushes away from the prompt: pictures ignore it, and a larger scale makes it worse.",
    fix="Compute `uncond + scale * (cond - uncond)`, and unpack `chunk(2)` in the order of the concatenation.",
)
def swapped_guidance(file: ParsedFile) -> Hits:
    for node in file.nodes(ast.BinOp):
        if not isinstance(node.op, ast.Add | ast.Sub):
            continue
        wrong = ("uncond", "cond") if isinstance(node.op, ast.Add) else ("cond", "uncond")
        for product in (node.left, node.right) if isinstance(node.op, ast.Add) else (node.right,):
            if not isinstance(product, ast.BinOp) or not isinstance(product.op, ast.Mult):
                continue
            for factor, scale in ((product.left, product.right), (product.right, product.left)):
                if not isinstance(factor, ast.BinOp) or not isinstance(factor.op, ast.Sub):
                    continue
                if (_branch(factor.left), _branch(factor.right)) == wrong and _is_scale(scale):
                    yield (
                        node,
                        f"`{ast.unparse(node)[:80]}` goes from the conditional prediction to the unconditional one",
                    )
    yield from _swapped_chunks(file)


def _is_scale(node: ast.expr) -> bool:
    """Not `1 - scale`, which makes the swapped difference right again."""
    return not any(isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Sub) for inner in ast.walk(node))


def _swapped_chunks(file: ParsedFile) -> Hits:
    """`cond, uncond = x.chunk(2)` where the function concatenates `[uncond, cond]`, or the reverse."""
    for node in file.nodes(ast.Assign):
        target = targets(node)[0]
        if not isinstance(target, ast.Tuple) or len(target.elts) != 2 or method(node.value) != "chunk":
            continue
        order = [_branch(item) for item in target.elts]
        if sorted(order) != ["cond", "uncond"]:
            continue
        orders = []
        for call in walk_scope(file.scope(node)):
            if method(call) in ("cat", "concat", "stack") and isinstance(call, ast.Call) and call.args:
                parts = call.args[0].elts if isinstance(call.args[0], ast.List | ast.Tuple) else []
                orders.append([_branch(item) for item in parts])
        pairs = [item for item in orders if sorted(item) == ["cond", "uncond"]]
        if pairs and all(item != order for item in pairs):
            yield node, f"unpacked as ({', '.join(order)}), but concatenated as ({', '.join(pairs[0])})"
