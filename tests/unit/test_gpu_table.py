"""What the GPU benchmarks make of figures and answers: the table with its peers, and the verdicts of the full load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture(scope="module", autouse=True)
def _benchmarks_are_importable() -> Iterator[None]:
    """As when a script of theirs is run: beside each other."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))
    for name in set(sys.modules) - before:  # their names are short: `serve` is not to be found by others
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(FOLDER)):
            del sys.modules[name]


@pytest.fixture(scope="module")
def table() -> ModuleType:
    import table

    return table


@pytest.fixture(scope="module")
def full_load() -> ModuleType:
    import full_load

    return full_load


def load(*, requests: float = 1.0, tokens: float = 0.0, seconds: float = 1.0, stutter: float | None = None) -> Any:
    """A report of `omnistage bench serve`, as far as the table reads it."""
    spread = {"count": 8, "mean": seconds, "p50": seconds, "largest": 2 * seconds}
    summary = {
        "sent": 8,
        "succeeded": 8,
        "throughput": {"requests": requests, "output_tokens": tokens},
        "spreads": {"latency": spread, "ttfa": None if stutter is None else spread},
        "stutter": None if stutter is None else {"requests_share": stutter},
    }
    return {"schema": "omnistage.bench_serve/1", "summary": summary}


SERVE = {
    "ready_seconds": 20.0,
    "text_64_temperature_0": load(tokens=8000.0),
    "text_64_temperature_1": load(tokens=7800.0),
    "speech_1": load(seconds=0.15, stutter=0.0),
    "speech_8": load(requests=3.5, seconds=0.5, stutter=0.0),
    "speech_24": load(requests=4.0, stutter=0.25),
}
TEXT = {
    "device": "NVIDIA H200",
    "compiled": {
        "1x(128+128) greedy": {"tokens_per_second": 215.0, "ms_per_token": 4.6},
        "64x(128+128) greedy": {"tokens_per_second": 10000.0, "ms_per_token": 5.1},
    },
}
DIFFUSION = {"diffusers": "0.42", "sd3": {"diffusers_one_by_one": 8.0, "compiled, graphs": {"together": 4.0}}}


REFUSAL = (
    "error: omni does not fit: for one request it needs 14.4 GiB on cuda, of which 9.0 GiB are weights, and 6.0\n"
    "GiB are available; use a GPU with at least 15 GiB"
)


def write(folder: Path, **contents: Any) -> list[Path]:
    files = []
    for name, content in contents.items():
        files.append(folder / f"{name}.json")
        files[-1].write_text(json.dumps(content), encoding="utf-8")
    return files


def rows_of(text: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {line[0]: line[1:] for line in lines[2:]}


def test_the_table_has_ours_beside_the_peers_and_says_what_is_met(table: ModuleType, tmp_path: Path) -> None:
    again = {"ready_seconds": 12.0}
    figures = table.read(write(tmp_path, serve=SERVE, serve_again=again, text=TEXT, diffusion=DIFFUSION))
    text = table.markdown(figures)
    rows = rows_of(text)
    assert rows["8 at once, text + speech"][0].startswith("- / 0.51 /s")
    assert rows["8 at once, text + speech"][2:5] == ["3.50 /s", "≥ 3.00 /s", "**yes**"]
    assert rows["first sound, 1 at once"][2:5] == ["0.15 s (slowest 0.30)", "≤ 0.20 s", "**yes**"]
    assert rows["first sound, 8 at once"][2:5] == ["0.50 s (slowest 1.00)", "≤ 0.40 s", "no"]
    assert rows["text, 1 request, a token"][1:] == ["4.73 ms", "4.60 ms", "≤ 4.90 ms", "**yes**", "3.54 ms"]
    assert rows["`serve`, 64 text streams, greedy, of the engine alone"][2:5] == [
        "80 % (8,000 of 10,000 tokens/s)",
        "≥ 92 %",
        "no",
    ]
    assert rows["`serve`, 24 spoken answers at once: requests that stutter"][2:5] == ["25 %", "0 %", "no"]
    assert [rows[f"ready, 7B from disk, {n} start"][4] for n in ("first", "second")] == ["no", "**yes**"]
    pictures = rows["Stable Diffusion 3, 512 px, 16 at once, against diffusers one by one"]
    assert pictures[2] == "2.00 times (compiled, graphs)"
    assert "were not measured" in text


def test_what_was_not_measured_stays_empty_with_the_reason(table: ModuleType, tmp_path: Path) -> None:
    nothing = load()
    nothing["summary"] |= {"succeeded": 0, "spreads": {}}
    files = write(tmp_path, serve={"ready_seconds": 9.0, "speech_8": nothing, "speech_1": {}})
    rows = rows_of(table.markdown(table.read(files, {"text": "text.py took more than 400 s"})))
    assert rows["text, 1 request, a token"][2:5] == ["-", "≤ 4.90 ms", "not measured (text.py took more than 400 s)"]
    assert rows["8 at once, text + speech"][2:5:2] == ["-", "not measured (not in the files)"]
    assert rows["1 request, text + speech"][2] == "-"
    assert rows["ready, 7B from disk, first start"][4] == "**yes**"


def test_failed_requests_are_named_beside_a_figure(table: ModuleType, tmp_path: Path) -> None:
    some = load(requests=9.0)
    some["summary"]["succeeded"] = 6
    rows = rows_of(table.markdown(table.read(write(tmp_path, serve={"ready_seconds": 9.0, "speech_8": some}))))
    assert rows["8 at once, text + speech"][2] == "9.00 /s (2 of 8 requests failed)"


def test_bounds_lie_beyond_what_must_be_reached(table: ModuleType) -> None:
    for row in table.ROWS:
        if row.bound is not None:
            assert row.met(row.bound), row.title


def test_a_page_gets_the_table_between_its_markers(table: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n", encoding="utf-8")
    table.update_docs(page, "new\n")
    assert page.read_text(encoding="utf-8") == f"before\n{table.BEGIN}\nnew\n{table.END}\nafter\n"
    page.write_text("nothing", encoding="utf-8")
    with pytest.raises(SystemExit, match="add them"):
        table.update_docs(page, "new\n")


def test_the_plot_is_written_with_and_without_figures(table: ModuleType, tmp_path: Path) -> None:
    for name, files in (("all", write(tmp_path, serve=SERVE, text=TEXT)), ("none", [])):
        file = tmp_path / f"{name}.png"
        table.plot(table.read(files), file)
        assert file.read_bytes().startswith(b"\x89PNG")


def test_a_script_that_fails_or_hangs_is_a_reason(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "GRACE", 0.2)
    bad, slow, pid = tmp_path / "bad.py", tmp_path / "slow.py", tmp_path / "pid"
    bad.write_text("raise SystemExit(3)", encoding="utf-8")
    slow.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n",
        encoding="utf-8",
    )
    assert table.run([str(bad)], 60, dict(os.environ)) == "bad.py ended with 3"
    assert table.run([str(slow)], 3, dict(os.environ)) == "slow.py took more than 3 s"
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid.read_text()], capture_output=True, text=True).stdout
    assert state.strip()[:1] in ("", "Z")


@pytest.mark.parametrize(
    ("status", "streamed", "body", "expected"),
    [
        (200, True, b'data: {"choices": []}\n\ndata: [DONE]\n\n', "answered"),
        (200, True, b'data: {"choices": []}\n\n', "failed"),
        (200, True, b'data: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n', "failed"),
        (200, False, b'{"choices": [{}]}', "answered"),
        (429, True, b'{"error": {"message": "too many requests"}}', "refused 429"),
        (400, False, b'{"error": {"message": ""}}', "failed"),
        (500, False, b'{"error": {"message": "out of memory"}}', "failed"),
        (503, False, b"<html>", "failed"),
    ],
)
def test_an_answer_counts_only_if_it_is_whole_and_a_refusal_if_it_has_a_reason(
    full_load: ModuleType, status: int, streamed: bool, body: bytes, expected: str
) -> None:
    result = full_load.outcome(status, streamed, body)
    assert result == expected or (expected == "failed" and result.startswith("failed"))


@pytest.mark.parametrize(
    ("code", "log", "expected"),
    [
        (1, f"loading omni\n{REFUSAL}", True),
        (0, REFUSAL, False),
        (1, f"thinker: weights 2.4 s\n{REFUSAL}", False),
        (1, "CUDA out of memory", False),
    ],
)
def test_a_refusal_says_what_would_fit_and_comes_before_the_weights(
    full_load: ModuleType, tmp_path: Path, code: int, log: str, expected: bool
) -> None:
    file = tmp_path / "log.txt"
    file.write_text(log, encoding="utf-8")
    process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
    assert full_load.refused_before_loading(process, file, 30)[0] is expected
