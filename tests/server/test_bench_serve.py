"""`omnistage bench serve` against a real service: what it finds is what the service did."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from omnistage.cli import app
from omnistage.server.access.keys import Holder, Keyring, digest_of
from omnistage.server.service import Service
from tests.server.harness import Running, make, serving

SMALL = ("--prompt-tokens", "24..40", "--max-tokens", "4..8", "--warmup", "1", "--image-size", "64x64", "--steps", "2")


def bench(*arguments: object, code: int = 0) -> Result:
    environment = {"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"}
    result = CliRunner().invoke(app, ["bench", "serve", *map(str, arguments)], env=environment)
    assert result.exit_code == code, result.output
    return result


def report(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "bench_serve.json").read_text())
    return value


def test_text_speech_and_pictures_are_asked_for_and_measured(server: Running, tmp_path: Path) -> None:
    models = {name: model.omni for name, model in server.service.models.items()}
    before = {name: omni.stats().admitted for name, omni in models.items()}
    mix = ("--mix", "text=2,speech=1,image=1", "--requests", 4, "--concurrency", 4)
    result = bench(server.url, *mix, *SMALL, "--warmup", 0, "--out", tmp_path, "--goodput", "ttft:600")
    assert "time to first audio" in result.output
    assert "a player that starts with the first audio" in result.output

    value = report(tmp_path)
    assert value["settings"]["models"] == {"text": "lm", "speech": "omni", "image": "draw"}
    assert {kind: own["sent"] for kind, own in value["kinds"].items()} == {"text": 2, "speech": 1, "image": 1}
    assert (value["summary"]["succeeded"], value["summary"]["errors"]) == (4, {})
    assert value["summary"]["goodput"]["share"] == 1.0
    rows = value["requests"]
    assert all(4 <= row["text_tokens"] <= 8 for row in rows if row["kind"] != "image")
    assert all(24 <= row["prompt_tokens"] <= 40 for row in rows if row["kind"] == "text")
    assert all(row["pictures"] == 1 for row in rows if row["kind"] == "image")
    for row in rows:
        if row["kind"] == "speech":
            assert row["audio_seconds"] > 0
            assert 0 < row["ttft"] < row["ttfa"] <= row["latency"]
            assert row["sounds"][0][0] == pytest.approx(row["ttfa"], abs=1e-5)
        assert bool(row["token_times"]) == (row["kind"] != "image")
    # What was measured, two to learn how the model counts, and nothing else.
    admitted = {name: omni.stats().admitted - before[name] for name, omni in models.items()}
    assert admitted == {"lm": 2 + 2, "omni": 1, "draw": 1}
    assert (tmp_path / "bench_serve.png").read_bytes().startswith(b"\x89PNG")


def test_requests_at_their_own_times_and_a_comparison(server: Running, tmp_path: Path) -> None:
    load = (server.url, "--model", "lm", "--rate", 40, "--requests", 12, *SMALL)
    bench(*load, "--out", tmp_path, "--no-plot")
    value = report(tmp_path)
    assert value["generator"]["lag"]["count"] == 12
    assert not (tmp_path / "bench_serve.png").exists()
    result = bench(*load, "--compare", tmp_path / "bench_serve.json")
    assert "compared with the older report" in result.output
    assert "the two runs differ" not in result.output


def test_refusals_are_counted_and_are_no_failure(service: Service, tmp_path: Path) -> None:
    service.keyring = Keyring([Holder("ann", digest_of("a-key-for-tests"), rate=9)])
    with serving(service) as server:
        arguments = (server.url, "--model", "lm", "--rate", 50, "--requests", 12, *SMALL, "--no-plot")
        refused = bench(*arguments, code=2)
        assert "status 401" in refused.output
        bench(*arguments, "--api-key", "a-key-for-tests", "--out", tmp_path)
    summary = report(tmp_path)["summary"]
    assert summary["refused"] == summary["by_status"]["429"] > 0
    assert summary["errors"] == {"429 rate_limit_exceeded": summary["refused"]}
    assert summary["succeeded"] == 12 - summary["refused"] > 0
    assert "a-key-for-tests" not in (tmp_path / "bench_serve.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give the address of a running service"),
        (("http://x", "--serve", "m"), "give the address of a running service"),
        (("http://x", "--rate", "1", "--concurrency", "2"), "--rate: excludes --concurrency"),
        (("http://x", "--requests", "1", "--seconds", "2"), "--requests: excludes --seconds"),
        (("http://x", "--rate", "0"), "--rate: must be above 0"),
        (("http://x", "--seconds", "nan"), "--seconds: must be above 0"),
        (("http://x", "--mix", "poem"), "--mix: 'poem' is not a kind"),
        (("http://x", "--max-tokens", "9..3"), "--max-tokens: '9..3'"),
        (("http://x", "--goodput", "speed:1"), "--goodput: 'speed'"),
        (("http://x", "--set", "a=b"), "are for a service that --serve starts"),
        (("http://x", "--model", "a", "--model", "b"), "--model: one model for all kinds"),
        (("http://x", "--model", "image=a"), "--model: 'image=a': image is not in --mix"),
        (("http://x", "--compare", "/nowhere.json"), "--compare: /nowhere.json cannot be read"),
        (("host:8000",), "URL: 'host:8000' is not an address"),
        (("http://127.0.0.1:1",), "no response from 127.0.0.1:1"),
        (("--serve", "/nowhere"), "--serve: the service did not start"),
    ],
)
def test_what_cannot_be_run_says_what_to_change(arguments: tuple[str, ...], says: str) -> None:
    assert says in " ".join(bench(*arguments, code=2).output.split())


def test_options_of_the_other_benchmark_are_not_for_this_one() -> None:
    result = CliRunner().invoke(app, ["bench", "--quick", "serve", "http://x"])
    assert result.exit_code == 2
    assert "put --out after serve" in result.output


def test_it_starts_a_service_of_its_own_and_stops_it(tmp_path: Path) -> None:
    folder = make("causal_lm", tmp_path / "lm")
    command = [sys.executable, "-c", "from omnistage.cli import app; app()", "bench", "serve", "--serve", str(folder)]
    load = ("--requests", "4", *SMALL, "--device", "cpu", "--set", "thinker.max_running=2", "--no-plot")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "OMNISTAGE_API_KEY": "a-key-for-tests"}
    done = subprocess.run(
        [*command, *load, "--out", str(tmp_path)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    value = report(tmp_path)
    assert value["settings"]["models"] == {"text": "lm"}
    assert value["summary"]["by_status"] == {"200": 4}
    port = re.fullmatch(r"http://127\.0\.0\.1:(\d+)", value["settings"]["url"])
    assert port is not None
    assert "no response from" in bench(value["settings"]["url"], code=2).output  # it is gone
