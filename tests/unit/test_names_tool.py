"""`tools/names.py`: which names it counts."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

if (folder := str(Path(__file__).parents[2] / "tools")) not in sys.path:
    sys.path.append(folder)

from names import Names


def suspects(source: str) -> list[str]:
    names = Names("a.py")
    names.visit(ast.parse(source))
    return [binding.name for binding in names.suspects()]


@pytest.mark.parametrize(
    "source",
    [
        "found = search()",
        "found: list[int] = []",
        "a, found = 1, 2",
        "for found in range(3): pass",
        "x = [found for found in y]",
        "if (found := search()): pass",
        "with x as found: pass",
        "def f(found: int): pass",
        "def found() -> int: pass",
        "def f():\n    self.found = search()",
        "class A:\n    found: int = 0",
        "MOST_TOKENS = 3",
        "async def f():\n    async for found in x: pass",
    ],
)
def test_a_participle_that_names_a_thing_is_counted_once(source: str) -> None:
    assert len(suspects(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "matches = search()",
        "found = x is not None",
        "found = False\nfound = search()",
        "found: bool = search()",
        "def f(found: bool | None): pass",
        "def found() -> bool: pass",
        "found = not x and isinstance(y, int)",
        "padded = pad(x)",
        "num_found = 3",
        "left, right = x",
        "left, top = x",
    ],
)
def test_what_is_true_or_false_and_what_has_a_noun_is_not_counted(source: str) -> None:
    assert suspects(source) == []
