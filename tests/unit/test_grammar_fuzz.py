"""Random constraints, from `tools/fuzz_grammars.py`: compiled or refused in time, and followed without a stop."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("xgrammar")

TOOLS = Path(__file__).parents[2] / "tools"
CASES = 200


def test_no_random_constraint_crashes_or_holds_the_caller_s_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(TOOLS)
    monkeypatch.delitem(sys.modules, "fuzz_grammars", raising=False)
    import fuzz_grammars

    report = fuzz_grammars.fuzz(fuzz_grammars.small_tokenizer(), 3, range(CASES), tokens=8)
    assert report.defects == []
    assert sum(report.outcomes.values()) == CASES
    assert {"finished", "too large", "wrong"} <= report.outcomes.keys()
