"""Tensors: devices, shapes, copies, gradients, synchronisation."""

from __future__ import annotations

import ast
import re

from omnistage_review.registry import Hits, rule
from omnistage_review.syntax import (
    LOOPS,
    Function,
    ParsedFile,
    decorator_names,
    keyword,
    last_name,
    literal,
    method,
    names_in,
    targets,
    walk_scope,
)

_CUDA = re.compile(r"cuda(:\d+)?\Z")
_FACTORIES = {
    f"torch.{name}" for name in ("zeros", "ones", "empty", "full", "rand", "randn", "arange", "tensor", "cat", "stack")
}
_FRESH = _FACTORIES | {"torch.concat", "torch.zeros_like", "torch.empty_like"}
_SHAPES = {"view", "reshape", "expand", "unflatten"}
_SHAPED_FACTORIES = {f"torch.{name}" for name in ("zeros", "ones", "empty", "randn", "rand", "full")}
_GUARDS = {"no_grad", "inference_mode", "set_grad_enabled", "enable_grad"}
_MODELS = {"model", "transformer", "unet", "vae", "network", "net", "text_encoder", "vocoder", "language_model", "dit"}
_ENTRIES = {"generate", "predict", "infer", "sample", "transcribe", "synthesize", "main", "run", "__call__"} | {
    "execute_model", "inference", "embed", "classify",
}  # fmt: skip
_LOADERS = {"from_pretrained", "load_state_dict", "load_file", "load_model"}
MIN_DIMENSION = 33  # up to 32 a size is often one of the format: bits of a word, a patch, a warp


def _device_literal(node: ast.AST | None) -> bool:
    value = literal(node)
    return isinstance(value, str) and _CUDA.match(value) is not None


def _guarded_by_device(file: ParsedFile, node: ast.AST) -> bool:
    """Whether the branch or function around a node asked for CUDA first, or is about nothing else."""
    for outer in file.ancestors(node):
        test = outer.test if isinstance(outer, ast.If | ast.IfExp | ast.While) else None
        if test is not None and any("cuda" in name.lower() or "gpu" in name.lower() for name in _words(test)):
            return True
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and re.search(
            "cuda|gpu", outer.name, re.IGNORECASE
        ):
            return True
    return False


def _chosen_by_device(file: ParsedFile, node: ast.AST) -> bool:
    """Whether a condition anywhere in the scope asks for CUDA: the value may be replaced there."""
    tests = [inner.test for inner in walk_scope(file.scope(node)) if isinstance(inner, ast.If | ast.IfExp)]
    asks = any("cuda" in name.lower() or "gpu" in name.lower() for test in tests for name in _words(test))
    return asks or _guarded_by_device(file, node)


def _words(node: ast.AST) -> set[str]:
    texts = {
        inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
    }
    return names_in(node) | texts


@rule(
    "TEN01",
    "Hard-coded CUDA device",
    "high",
    "tensors",
    why="It fails on machines without CUDA, and with several GPUs it puts the tensor on the wrong one.",
    fix="Use the device of the model or of another tensor (`x.device`), or take it as a parameter.",
)
def hard_coded_device(file: ParsedFile) -> Hits:
    if not file.is_shipped or not file.uses_torch:
        return
    for call in file.nodes(ast.Call):
        name, message = method(call), ""
        if not isinstance(call.func, ast.Attribute):
            continue
        if (
            name == "cuda"
            and file.name(call.func) != "torch.cuda"
            and all(isinstance(item, ast.Constant) for item in call.args)
        ):
            message = "`.cuda()`"
        elif name == "to" and any(_device_literal(item) for item in call.args):
            message = '`.to("cuda")`'
        elif _device_literal(keyword(call, "device")):
            message = '`device="cuda"`'
        elif file.name(call.func) == "torch.set_default_device" and call.args and _device_literal(call.args[0]):
            message = '`torch.set_default_device("cuda")`'
        elif file.name(call.func) == "torch.device" and call.args and _device_literal(call.args[0]):
            if not all(isinstance(item, ast.Constant) for item in call.args):
                continue
            # Compared with, or a last resort, it chooses nothing.
            message = "" if isinstance(file.parent(call), ast.Compare | ast.BoolOp) else '`torch.device("cuda")`'
        if message and not _guarded_by_device(file, call):
            yield call, f"{message} is fixed in the code"
    for node in file.assignments():
        named = any(last_name(target).lower() == "device" for target in targets(node))
        if named and _device_literal(node.value) and not _chosen_by_device(file, node):
            yield node, f"`{ast.unparse(node)}` is fixed in the code"
    for function in file.functions():
        for default in (*function.args.defaults, *function.args.kw_defaults):
            if _device_literal(default) and default is not None and not _guarded_by_device(file, default):
                yield default, f"the default device of `{function.name}` is CUDA"


def _shape_arguments(call: ast.Call) -> list[ast.expr]:
    size = keyword(call, "size") or (call.args[0] if method(call) == "full" and call.args else None)
    if size is not None:
        return size.elts if isinstance(size, ast.Tuple | ast.List) else [size]
    if len(call.args) == 1 and isinstance(call.args[0], ast.Tuple | ast.List):
        return call.args[0].elts
    return call.args


@rule(
    "TEN02",
    "Hard-coded tensor dimension",
    "medium",
    "tensors",
    why="The number belongs to one checkpoint. Another size of the same model fails here, or is read with wrong axes.",
    fix="Take the size from the model's configuration or from a tensor's shape.",
)
def hard_coded_dimension(file: ParsedFile) -> Hits:
    if not file.is_shipped or not file.uses_torch:
        return
    for call in file.nodes(ast.Call):
        name = file.name(call.func)
        shapes = (
            method(call) in _SHAPES and isinstance(call.func, ast.Attribute) and not name.startswith(("numpy.", "jax."))
        )
        if not shapes and name not in _SHAPED_FACTORIES:
            continue
        sizes = [literal(item) for item in _shape_arguments(call) if not isinstance(item, ast.Starred)]
        large = [size for size in sizes if type(size) is int and size >= MIN_DIMENSION]
        if large and len(sizes) > 1:
            yield call, f"`{method(call)}` with the fixed size {large[0]}"


@rule(
    "TEN03",
    "Unchecked view(-1, n)",
    "low",
    "tensors",
    why="Minus one takes whatever is left: where the sizes do not fit, elements move between rows without an error.",
    fix="Write the other sizes out, or check that the last axis has the expected size before.",
)
def unchecked_view(file: ParsedFile) -> Hits:
    if not file.is_shipped or not file.uses_torch:
        return
    for call in file.nodes(ast.Call):
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("view", "reshape"):
            continue
        sizes = _shape_arguments(call)
        if len(sizes) != 2 or literal(sizes[0]) != -1 or literal(sizes[1]) == 1:
            continue
        if names_in(sizes[1]) & {"shape", "size"} or ast.unparse(call.func.value) in file.once(
            _checked_tensors, file.scope(call)
        ):
            continue
        yield call, f"`.{call.func.attr}({', '.join(map(ast.unparse, sizes))})` without a check of the sizes"


def _checked_tensors(scope: ast.AST) -> set[str]:
    """Tensors whose shape a condition or an assertion of the scope asks for."""
    tests = [node.test for node in walk_scope(scope) if isinstance(node, ast.If | ast.Assert | ast.IfExp)]
    return {
        ast.unparse(inner.value)
        for test in tests
        for inner in ast.walk(test)
        if isinstance(inner, ast.Attribute) and inner.attr in ("shape", "numel", "size", "ndim")
    }


@rule(
    "TEN04",
    "Needless clone or contiguous",
    "low",
    "memory",
    why="It copies, or seems to promise a copy, where the tensor is already new or the next call copies by itself.",
    fix="Remove the call.",
)
def needless_copy(file: ParsedFile) -> Hits:
    for call in file.nodes(ast.Call):
        name = method(call)
        if name not in ("clone", "contiguous") or not isinstance(call.func, ast.Attribute) or call.args:
            continue
        inner = call.func.value
        if isinstance(inner, ast.Call) and file.name(inner.func) in _FRESH and not keyword(inner, "out"):
            yield call, f"`.{name}()` of a tensor that `{file.name(inner.func)}` has just made"
        elif isinstance(inner, ast.Call) and method(inner) == "clone" and not inner.args and not inner.keywords:
            if isinstance(inner.func, ast.Attribute) and name == "clone":
                yield call, "`.clone()` of a clone"
        elif name == "clone" and isinstance(inner, ast.BinOp):
            yield call, "`.clone()` of a result that is new"
        elif name == "contiguous" and not call.keywords:
            outer = file.parent(call)
            if isinstance(outer, ast.Attribute) and outer.attr == "reshape":
                yield call, "`.contiguous()` before `.reshape()`, which copies where it must"


def _has_guard(file: ParsedFile, node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Attribute | ast.Name) and last_name(inner) in _GUARDS for inner in ast.walk(node))


@rule(
    "TEN05",
    "Inference without inference_mode",
    "medium",
    "memory",
    why="Autograd keeps every activation of the forward until the output is freed: memory for nothing.",
    fix="Decorate the entry point with @torch.inference_mode(), or use it in a `with` around the call.",
    whole_file=True,
)
def no_inference_mode(file: ParsedFile) -> Hits:
    if not file.is_shipped or "torch" not in {name.partition(".")[0] for name in file.imports.values()}:
        return
    called = {method(call) for call in file.nodes(ast.Call)}
    if _has_guard(file, file.tree) or "backward" in called or not called & _LOADERS:
        return  # only where the file itself loads the model: otherwise a caller may have turned gradients off
    for function in file.functions():
        if (
            function.name not in _ENTRIES
            or _is_module(file, function)
            or decorator_names(file, function) & {"abc.abstractmethod"}
        ):
            continue
        for node in walk_scope(function):
            if (
                isinstance(node, ast.Call)
                and last_name(node.func) in _MODELS
                and not file.name(node.func).startswith("torch.")
            ):
                yield node, f"`{function.name}` calls `{ast.unparse(node.func)}` with gradients on"
                break


def _is_module(file: ParsedFile, function: Function) -> bool:
    """Methods of networks run inside another module's forward."""
    owner = file.class_of(function)
    return owner is not None and any(re.search("Module|Model|Layer|Block", last_name(base)) for base in owner.bases)


@rule(
    "TEN06",
    "Synchronisation inside a loop",
    "medium",
    "batching",
    why="Each `.item()` or `.cpu()` waits until the GPU is idle: a loop over rows or tokens waits once per turn.",
    fix="Move the whole tensor once (`x.tolist()` before the loop), or keep the value on the device.",
)
def sync_in_loop(file: ParsedFile) -> Hits:
    if not file.is_shipped or not file.uses_torch:
        return
    for call in file.nodes(ast.Call):
        is_sync = (
            method(call) in ("item", "cpu")
            and isinstance(call.func, ast.Attribute)
            and not call.args
            and not call.keywords
        )
        is_sync = is_sync or file.name(call.func) == "torch.cuda.synchronize"
        if is_sync and _repeats(file, call) and not _on_host(call):
            yield call, f"`{ast.unparse(call.func)}()` waits for the device in every turn of the loop"


def _on_host(call: ast.Call) -> bool:
    """A chain that was moved to the host before: `x.cpu().item()` waits once, at `.cpu()`."""
    node: ast.AST = call.func
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
        if isinstance(node, ast.Attribute) and node.attr in ("cpu", "numpy"):
            return True
        if isinstance(node, ast.Name) and node.id in ("np", "numpy"):
            return True
    return False


def _repeats(file: ParsedFile, node: ast.AST) -> bool:
    """Inside the body of a loop or the element of a comprehension of the same function."""
    inner = node
    for outer in file.ancestors(node):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return False
        if isinstance(outer, LOOPS) and inner is not getattr(outer, "iter", None) and inner not in outer.orelse:
            leaves = not isinstance(outer, ast.While) and isinstance(outer.body[-1], ast.Return | ast.Break | ast.Raise)
            return not leaves
        if isinstance(outer, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            first = outer.generators[0]
            return inner is not first or not any(part is node for part in ast.walk(first.iter))
        inner = outer
    return False
