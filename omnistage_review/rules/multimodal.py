"""Several modalities in one model: order, rates, channels."""

from __future__ import annotations

import ast
import re

from omnistage_review.registry import Hits, rule
from omnistage_review.syntax import (
    ParsedFile,
    has_star_kwargs,
    keyword,
    last_name,
    method,
    names_in,
    targets,
    walk_scope,
)

_MODALITIES = {
    "text": re.compile(r"(^|_)(text|txt|prompt|caption|token)s?(_|$)"),
    "image": re.compile(r"(^|_)(image|img|vision|visual|pixel|patch)(s|es)?(_|$)"),
    "audio": re.compile(r"(^|_)(audio|speech|wav|mel)s?(_|$)"),
    "video": re.compile(r"(^|_)(video|frame)s?(_|$)"),
}
_EMBEDDINGS = re.compile(r"embed|emb(_|$)|feature|feats?(_|$)|hidden|latent|states", re.IGNORECASE)
_ORDER = re.compile(
    r"pos(ition)?(_|s|$)|type_id|token_type|modality|segment|rope|rotary|freqs|_ids|mask|placeholder|offset",
    re.IGNORECASE,
)
_READERS = {
    "soundfile.read",
    "torchaudio.load",
    "librosa.load",
    "scipy.io.wavfile.read",
    "audioread.read",
    "librosa.core.load",
}


def _modality(node: ast.expr) -> str:
    name = last_name(node).lower()
    if not _EMBEDDINGS.search(name):
        return ""
    return next((kind for kind, pattern in _MODALITIES.items() if pattern.search(name)), "")


@rule(
    "MM01",
    "Modalities joined without type or position",
    "medium",
    "multimodal",
    why="The model cannot tell which rows are text and which are image or audio, and their positions overlap.",
    fix="Build position ids, type ids or a mask for the joined sequence in the same function, and pass them on.",
    whole_file=True,
)
def joined_modalities(file: ParsedFile) -> Hits:
    if not file.is_shipped:
        return
    for call in file.nodes(ast.Call):
        if file.name(call.func) not in ("torch.cat", "torch.concat") or not call.args:
            continue
        parts = call.args[0].elts if isinstance(call.args[0], ast.List | ast.Tuple) else []
        kinds = sorted({kind for kind in map(_modality, parts) if kind})
        if len(kinds) > 1 and not any(_ORDER.search(name) for name in names_in(file.function(call) or file.tree)):
            yield call, f"{' and '.join(kinds)} embeddings are joined, and nothing in the function says which is which"


@rule(
    "MM02",
    "Sample rate assumed",
    "high",
    "multimodal",
    why="Audio at another rate than the model's is too fast or too slow for it: wrong output without an error.",
    fix="Keep the rate that the reader returns, compare it with the model's and resample where they differ.",
)
def assumed_sample_rate(file: ParsedFile) -> Hits:
    if file.is_test:
        return
    for node in file.nodes(ast.Assign):
        if not isinstance(node.value, ast.Call) or file.name(node.value.func) not in _READERS:
            continue
        name = file.name(node.value.func)
        if name.startswith("librosa.") and keyword(node.value, "sr") is not None:
            continue  # it resamples
        if keyword(node.value, "samplerate") is not None or has_star_kwargs(node.value):
            continue  # raw samples, of a rate that the caller gives
        target = node.targets[0]
        rate_at = 0 if name.startswith("scipy.") else 1
        if isinstance(target, ast.Tuple) and len(target.elts) == 2 and last_name(target.elts[rate_at]).strip("_") == "":
            yield node, f"the sample rate that `{name}` returns is thrown away"
        elif isinstance(target, ast.Tuple) and len(target.elts) == 2 and _never_read(file, node, target.elts[rate_at]):
            yield node, f"`{last_name(target.elts[rate_at])}`, the rate that `{name}` returns, is never used"
    for subscript in file.nodes(ast.Subscript):
        if isinstance(subscript.value, ast.Call) and file.name(subscript.value.func) in _READERS - {
            "scipy.io.wavfile.read"
        }:
            is_first = isinstance(subscript.slice, ast.Constant) and subscript.slice.value == 0
            if is_first and keyword(subscript.value, "sr") is None:
                yield subscript, f"the sample rate that `{file.name(subscript.value.func)}` returns is thrown away"


def _never_read(file: ParsedFile, node: ast.AST, target: ast.expr) -> bool:
    """Whether a function's variable is assigned and not read."""
    function = file.function(node)
    return (
        function is not None
        and isinstance(target, ast.Name)
        and not any(
            isinstance(inner, ast.Name) and inner.id == target.id and isinstance(inner.ctx, ast.Load)
            for inner in ast.walk(function)
        )
    )


@rule(
    "MM03",
    "Channel order assumed",
    "medium",
    "multimodal",
    why="OpenCV gives blue first, and files may be grey, with alpha or by palette: colours are swapped, shapes differ.",
    fix="Convert: cv2.cvtColor(x, cv2.COLOR_BGR2RGB), or Image.open(path).convert('RGB').",
)
def assumed_channels(file: ParsedFile) -> Hits:
    if file.is_test:
        return
    for call in file.nodes(ast.Call):
        name = file.name(call.func)
        if name in ("cv2.imread", "cv2.imdecode"):
            scope = file.function(call) or file.tree
            if not any(_converts(file, node) for node in ast.walk(scope)) and len(call.args) < 2 and not call.keywords:
                yield call, f"`{name}` gives BGR, and the function does not convert it"
        elif name in ("numpy.array", "numpy.asarray") and call.args:
            inner = call.args[0]
            if _is_opened(file, inner):
                yield call, f"`{ast.unparse(call)[:60]}` without `.convert('RGB')`"


def _is_opened(file: ParsedFile, node: ast.expr) -> bool:
    """`Image.open(...)`, or a variable that the function assigns from it and converts nowhere."""
    if isinstance(node, ast.Call):
        return file.name(node.func) == "PIL.Image.open"
    scope = file.scope(node)
    if not isinstance(node, ast.Name) or any(method(inner) == "convert" for inner in walk_scope(scope)):
        return False
    assignments = [inner for inner in walk_scope(scope) if node.id in {last_name(item) for item in targets(inner)}]
    return bool(assignments) and all(
        isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Call) and _is_opened(file, inner.value)
        for inner in assignments
    )


def _converts(file: ParsedFile, node: ast.AST) -> bool:
    """A call of cvtColor, or a reversal of the last axis: `x[..., ::-1]`."""
    if method(node) in ("cvtColor", "flip", "split"):
        return True
    if isinstance(node, ast.Slice) and isinstance(node.step, ast.UnaryOp):
        return True
    return isinstance(node, ast.List) and ast.unparse(node) == "[2, 1, 0]"
