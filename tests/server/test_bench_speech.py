"""`omnistage bench serve` on models that speak: one that also writes, and one that only reads aloud."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnistage.omni import AsyncOmni
from tests.server.harness import SERVE_LIMITS, Running, make
from tests.server.test_bench_serve import SMALL, bench, report

LIMITS = {
    "qwen3_omni_moe": ("thinker.kv_blocks=256", "talker.kv_blocks=256", "talker.max_tokens=20"),
    "csm": ("backbone.max_tokens=20", "codec.max_hold_seconds=0"),
}


@pytest.fixture(scope="module", params=LIMITS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, AsyncOmni]]:
    folder = make(request.param, tmp_path_factory.mktemp("served") / "model")
    overrides = (*SERVE_LIMITS, *LIMITS[request.param])
    model = AsyncOmni(folder, device="cpu", dtype="float32", overrides=overrides, progress=False)
    yield {request.param: model}
    asyncio.run(model.shutdown(drain=False))


def test_speech_is_measured(server: Running, models: dict[str, AsyncOmni], tmp_path: Path) -> None:
    (name,) = models
    load = ("--mix", "speech=1", "--requests", 3, "--concurrency", 2)
    result = bench(server.url, *load, *SMALL, "--warmup", 0, "--out", tmp_path)
    assert "time to first audio" in result.output
    value = report(tmp_path)
    assert value["settings"]["models"] == {"speech": name}
    assert (value["summary"]["succeeded"], value["summary"]["errors"]) == (3, {})
    for row in value["requests"]:
        assert row["audio_seconds"] > 0
        assert 0 < row["ttfa"] <= row["latency"]
        assert bool(row["text_tokens"]) == (name != "csm")
