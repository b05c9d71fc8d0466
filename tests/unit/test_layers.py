"""The layers of the package: each imports those below it, and none above or beside it."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
if (folder := str(ROOT / "tools")) not in sys.path:
    sys.path.append(folder)

from code_report import upward_edges  # noqa: E402


def test_no_module_imports_a_layer_above_its_own() -> None:
    found = upward_edges(ROOT)
    assert not found, "\n".join((f"{len(found)} imports go up:", *map(str, found)))
