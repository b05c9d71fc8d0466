"""Precision and quantisation."""

from __future__ import annotations

import ast

from omnistage_review.registry import Hits, rule
from omnistage_review.syntax import ParsedFile, keyword, last_name, method, walk_scope

_HALF = {"torch.float16", "torch.half", "torch.bfloat16"}
_SENSITIVE = {
    "softmax", "log_softmax", "logsumexp", "layer_norm", "rms_norm", "group_norm", "batch_norm",
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "kl_div", "binary_cross_entropy", "smooth_l1_loss",
    "var", "std", "cumsum", "cumprod",
}  # fmt: skip
_INTEGERS = {"torch.int8", "torch.uint8", "torch.int16", "torch.int4", "torch.qint8"}
_ROUNDING = {"round", "round_", "rint", "floor", "ceil", "trunc", "floor_divide", "clamp_round", "fix"}


def _casts_to_half(file: ParsedFile, node: ast.AST | None) -> bool:
    """`x.half()`, `x.bfloat16()`, `x.to(torch.float16)`, also with views behind it."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("half", "bfloat16") and not node.args:
            return True
        if node.func.attr in ("to", "type"):
            return any(file.name(item) in _HALF for item in (*node.args, *(word.value for word in node.keywords)))
        if node.func.attr not in (
            "view",
            "reshape",
            "transpose",
            "permute",
            "unsqueeze",
            "squeeze",
            "flatten",
            "contiguous",
        ):
            return False
        node = node.func.value
    return False


@rule(
    "NUM01",
    "Half-precision softmax, norm or loss",
    "high",
    "precision",
    why="Sums over many elements in 16 bits lose the small ones, and exponents overflow at 65504 in float16.",
    fix="Compute in float32 (`softmax(x, dim, dtype=torch.float32)`, `x.float()`) and convert the result back.",
)
def half_precision(file: ParsedFile) -> Hits:
    for call in file.nodes(ast.Call):
        name = method(call)
        if name not in _SENSITIVE:
            continue
        dtype = keyword(call, "dtype")
        if dtype is not None:
            if file.name(dtype) in _HALF:
                yield call, f"`{name}` with dtype={ast.unparse(dtype)}"
            continue
        operands: list[ast.expr] = [*call.args[:1], *(word.value for word in call.keywords if word.arg == "input")]
        full_name = file.name(call.func)
        if isinstance(call.func, ast.Attribute) and not full_name.startswith(("torch.", "numpy.")):
            operands = [call.func.value]
        if any(_casts_to_half(file, item) or _assigned_half(file, call, item) for item in operands):
            yield call, f"`{name}` of a tensor that was just converted to 16 bits"


def _assigned_half(file: ParsedFile, call: ast.Call, operand: ast.expr) -> bool:
    """Whether the last assignment before the call, in a block around it, converts the operand to 16 bits."""
    if not isinstance(operand, ast.Name):
        return False
    earlier = file.once(_assignments, file.scope(call)).get(operand.id, [])
    if not any(_casts_to_half(file, node.value) for node in earlier):
        return False
    before = [node for node in earlier if node.lineno < call.lineno and file.comes_before(node, call)]
    return bool(before) and _casts_to_half(file, before[-1].value)


def _assignments(scope: ast.AST) -> dict[str, list[ast.Assign]]:
    """The assignments of a scope by name, in the order of their lines."""
    assignments: dict[str, list[ast.Assign]] = {}
    nodes = [node for node in walk_scope(scope) if isinstance(node, ast.Assign)]
    for node in sorted(nodes, key=lambda node: node.lineno):
        for target in node.targets:
            assignments.setdefault(last_name(target), []).append(node)
    return assignments


@rule(
    "QNT01",
    "Quantisation without rounding",
    "high",
    "quantisation",
    why="Conversion to an integer type cuts towards zero: values are off by up to a whole step, always towards zero.",
    fix="Round and clamp first: `(x / scale).round().clamp(-128, 127).to(torch.int8)`.",
)
def no_rounding(file: ParsedFile) -> Hits:
    for call in file.nodes(ast.Call):
        if method(call) != "to" or not isinstance(call.func, ast.Attribute):
            continue
        if not any(file.name(item) in _INTEGERS for item in call.args):
            continue
        value = call.func.value
        scaled = [inner for inner in ast.walk(value) if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Div)]
        rounds = any(
            isinstance(inner, ast.Attribute | ast.Name) and last_name(inner) in _ROUNDING for inner in ast.walk(value)
        )
        halves = any(isinstance(inner, ast.Constant) and inner.value == 0.5 for inner in ast.walk(value))
        if (
            scaled
            and not rounds
            and not halves
            and any("scale" in ast.unparse(inner.right).lower() for inner in scaled)
        ):
            yield call, f"`{ast.unparse(scaled[0])}` becomes an integer without being rounded"
