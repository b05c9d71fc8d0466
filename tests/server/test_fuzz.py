"""Random changes of valid requests, from `tools/fuzz_http.py`: never a 500, never a request without a response."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from omnistage.omni import AsyncOmni
from tests.server.harness import Running

TOOLS = Path(__file__).parents[2] / "tools"
CASES = 400


@pytest.mark.usefixtures("ending")
def test_no_broken_request_is_an_internal_error(
    server: Running, models: dict[str, AsyncOmni], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(TOOLS)
    monkeypatch.delitem(sys.modules, "fuzz_http", raising=False)
    import fuzz_http

    assert fuzz_http.FAMILIES.keys() == models.keys()
    report = asyncio.run(fuzz_http.fuzz(server.url, iter([fuzz_http.case(7, number) for number in range(CASES)])))
    assert report.failures == []
    assert sum(report.statuses.values()) == CASES
    assert {status for _, status in report.statuses} >= {200, 400}
