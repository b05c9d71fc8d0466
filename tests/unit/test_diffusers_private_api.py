"""What we use of diffusers beyond its public API is there, with the parameters that we rely on."""

from __future__ import annotations

import ast
import inspect
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest

from omnistage import models
from omnistage.models._diffusers import private_api
from omnistage.models._diffusers.loading import diffusers

MODELS = Path(models.__file__).parent
PRIVATE = {name for path in private_api.NAMES for name in path.split(".") if name.startswith("_")}


def resolve(path: str) -> object:
    """The object of a dotted name inside diffusers: exported by it, or by the longest module of that name."""
    names = path.split(".")
    start = next((n for n, name in enumerate(names) if name[0].isupper() or name == names[-1]), len(names))
    owner = import_module(".".join(("diffusers", *names[:start]))) if start else diffusers()
    return reduce(getattr, names[start:], owner)


@pytest.mark.parametrize("path", private_api.NAMES)
def test_a_private_name_of_diffusers_is_where_we_use_it(path: str) -> None:
    version = diffusers().__version__
    try:
        value = resolve(path)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"diffusers {version} has no {path} ({error}); adapt omnistage/models/_diffusers/private_api.py")
    expected = private_api.NAMES[path]
    if expected is None:
        return
    assert callable(value), f"diffusers {version}: {path} is no longer a function"
    taken = tuple(inspect.signature(value).parameters)
    if inspect.isclass(value):
        taken = tuple(name for name in taken if name != "self")
    assert taken == expected, (
        f"diffusers {version}: {path} takes ({', '.join(taken)}), not ({', '.join(expected)}); "
        "adapt omnistage/models/_diffusers/private_api.py"
    )


def test_no_other_file_of_the_families_uses_a_private_name_of_diffusers() -> None:
    own = MODELS / "_diffusers" / "private_api.py"
    uses = [
        f"{path.relative_to(MODELS)}:{node.lineno} {node.attr}"
        for path in sorted(MODELS.rglob("*.py"))
        if path != own
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE and not is_self(node.value)
    ]
    deep = [
        f"{path.relative_to(MODELS)}:{node.lineno} {node.module}"
        for path in sorted(MODELS.rglob("*.py"))
        if path != own
        for node in ast.walk(without_typing(ast.parse(path.read_text(encoding="utf-8"))))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("diffusers.")
    ]
    assert uses + deep == []


def without_typing(tree: ast.Module) -> ast.Module:
    """The module without what is imported for annotations only."""
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    return tree


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_every_private_name_in_the_file_is_listed() -> None:
    tree = ast.parse((MODELS / "_diffusers" / "private_api.py").read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("_")}
    assert used == PRIVATE
