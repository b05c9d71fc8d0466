"""Event loops, locks and collectives."""

from __future__ import annotations

import ast
import re

from omnistage_review.registry import Hits, rule
from omnistage_review.syntax import FUNCTIONS, ParsedFile, last_name, method, names_in, walk_scope

_BLOCKING = {
    "time.sleep", "urllib.request.urlopen", "os.system", "os.popen", "socket.create_connection",
    "torch.cuda.synchronize", "subprocess.run", "subprocess.call", "subprocess.check_call",
    "subprocess.check_output", "requests.get", "requests.post", "requests.put", "requests.delete",
    "requests.head", "requests.patch", "requests.request", "httpx.get", "httpx.post", "httpx.put",
    "httpx.delete", "httpx.request",
}  # fmt: skip
_COLLECTIVES = {
    "all_reduce", "all_gather", "broadcast", "barrier", "reduce_scatter", "all_to_all",
    "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast_object_list", "all_gather_object",
}  # fmt: skip


@rule(
    "CON01",
    "Blocking call in async def",
    "high",
    "batching",
    why="The event loop stands still meanwhile: every other request, stream and health check waits.",
    fix="Use the asynchronous form (asyncio.sleep, an async client), or `await asyncio.to_thread(...)`.",
)
def blocking_call(file: ParsedFile) -> Hits:
    if file.is_test:
        return
    for call in file.nodes(ast.Call):
        name = file.name(call.func)
        if name in _BLOCKING and isinstance(file.scope(call), ast.AsyncFunctionDef):
            yield call, f"`{name}` in an async function"


@rule(
    "CON02",
    "Task without a reference",
    "medium",
    "batching",
    why="The event loop keeps tasks by weak references: one that nobody holds can vanish, and its error too.",
    fix="Keep the task, in a set or in a TaskGroup, and look at its result.",
)
def lost_task(file: ParsedFile) -> Hits:
    if file.is_test:
        return
    for node in file.nodes(ast.Expr):
        if isinstance(node.value, ast.Call) and file.name(node.value.func) in (
            "asyncio.create_task",
            "asyncio.ensure_future",
        ):
            yield node, f"the result of `{file.name(node.value.func)}` is not kept"


@rule(
    "CON03",
    "Lock of threads held over await",
    "high",
    "batching",
    why="The coroutine sleeps with the lock. Another one that wants it blocks the event loop: both deadlock.",
    fix="Use asyncio.Lock with `async with`, or leave the `with` before the await.",
)
def lock_over_await(file: ParsedFile) -> Hits:
    if file.is_test:
        return
    for node in file.nodes(ast.With):
        if not isinstance(file.scope(node), ast.AsyncFunctionDef):
            continue
        locks = [
            item.context_expr for item in node.items if re.search(r"(^|_)(lock|mutex)$", last_name(item.context_expr))
        ]
        if locks and any(isinstance(inner, ast.Await | ast.AsyncFor | ast.AsyncWith) for inner in walk_scope(node)):
            yield node, f"`{ast.unparse(locks[0])}` is held while the coroutine waits"


@rule(
    "PAR01",
    "Collective on some ranks only",
    "high",
    "parallelism",
    why="A collective waits for all ranks of its group. Ranks that never call it leave the others hanging.",
    fix="Call it on every rank, outside the branch; branch on what is sent or on what is done with the result.",
)
def collective_in_branch(file: ParsedFile) -> Hits:
    for call in file.nodes(ast.Call):
        name = file.name(call.func)
        if method(call) not in _COLLECTIVES or not re.search(r"(^|\.)(dist|distributed)\.", name):
            continue
        inner: ast.AST = call
        for outer in file.ancestors(call):
            if isinstance(outer, FUNCTIONS):
                break
            if isinstance(outer, ast.If) and _asks_for_rank(outer.test) and inner is not outer.test:
                if not _elsewhere(file, call, outer):
                    yield call, f"`{name}` is called only where `{ast.unparse(outer.test)}`"
                break
            inner = outer


def _asks_for_rank(test: ast.expr) -> bool:
    """`rank == 0`, `get_rank() != 0`, `is_main_process`; a group's size is the same on all ranks."""
    return any(
        re.search(r"(?<!per)(^|_)rank$|is_main|is_master|is_driver|is_first_rank|is_last_rank", name)
        for name in names_in(test)
    )


def _elsewhere(file: ParsedFile, call: ast.Call, branch: ast.If) -> bool:
    """Whether the same collective is called for the other ranks too: in the other branch, or in another condition."""
    scope = file.function(call) or file.tree
    others = [
        node
        for node in walk_scope(scope)
        if isinstance(node, ast.Call) and node is not call and method(node) == method(call)
    ]
    return bool(others) or bool(branch.body and isinstance(branch.body[-1], ast.Return | ast.Raise))
