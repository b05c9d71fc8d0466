"""The benchmark: its verdicts, its report, and that every section runs at the smallest size."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from omnistage.bench import offline as bench
from omnistage.bench.offline import Result
from omnistage.models.causal_lm import tiny as tiny_lm


def quiet() -> Console:
    return Console(file=io.StringIO(), width=160)


# ------------------------------------------------------------------------------------------------ verdicts


@pytest.mark.parametrize(
    ("value", "target", "at_least", "ok"),
    [
        (3.0, 3.0, True, True),
        (2.9, 3.0, True, False),
        (1.0, 1.0, False, True),
        (1.1, 1.0, False, False),
        (0.0, None, True, True),
        (float("nan"), 1.0, True, False),
        (float("nan"), 1.0, False, False),
    ],
)
def test_a_result_is_ok_on_the_right_side_of_its_target(value, target, at_least, ok) -> None:
    assert Result("what", value, "x", target, at_least).ok is ok


def fake_sections(monkeypatch: pytest.MonkeyPatch, results: list[Result]) -> list[bool]:
    """Every section gives `results` instead of measuring; notes whether it was asked to be quick."""
    asked: list[bool] = []

    def section(_scratch: Path, quick: bool) -> list[Result]:
        asked.append(quick)
        return results

    for name in ("_causal_lm", "_omni", "_overhead", "_memory"):
        monkeypatch.setattr(bench, name, section)
    return asked


@pytest.mark.parametrize(("value", "code"), [(2.0, 0), (0.5, 1)])
def test_the_exit_code_says_whether_all_targets_were_met(monkeypatch, value: float, code: int) -> None:
    asked = fake_sections(monkeypatch, [Result("free", 0.1, "x"), Result("bound", value, "x", 1.0)])
    assert bench.run(quick=True, console=quiet()) == code
    assert asked == [True] * 4


def test_the_report_is_written_into_the_folder_and_printed(monkeypatch, tmp_path: Path) -> None:
    fake_sections(monkeypatch, [Result("speed", 2.5, "x", 1.0), Result("size", 9.0, "MiB", 4.0, at_least=False)])
    console = quiet()
    # A folder, as `omnistage bench --out DIR` says: one that is there already, and one that is not.
    for folder in (tmp_path, tmp_path / "new" / "folder"):
        assert bench.run(out=folder, console=console) == 1
        report = json.loads((folder / "bench.json").read_text())
        assert report["machine"]["torch"] == torch.__version__
        assert len(report["results"]) == 8
        assert report["results"][0] == {"name": "speed", "value": 2.5, "unit": "x", "target": 1.0, "at_least": True}
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2.50 x" in printed
    assert "missed" in printed
    assert "≤ 4" in printed


# ------------------------------------------------------------------------------------------------- helpers


def test_functions_take_turns_after_a_warm_up_and_give_their_medians() -> None:
    calls: list[str] = []
    times = bench._alternate([lambda: calls.append("a"), lambda: calls.append("b")], rounds=3)
    assert "".join(calls) == "ab" + "ababab"
    assert len(times) == 2
    assert all(seconds >= 0 for seconds in times)


def test_prompts_are_reproducible_and_within_bounds() -> None:
    prompts = bench._prompts(50, 20, 3, 9)
    assert prompts == bench._prompts(50, 20, 3, 9)
    assert prompts != bench._prompts(50, 20, 3, 9, seed=1)
    assert all(3 <= len(prompt) < 9 and min(prompt) >= 0 and max(prompt) < 50 for prompt in prompts)


def test_a_padded_batch_is_padded_on_the_left() -> None:
    ids, mask = bench._padded([(1, 2, 3), (4,)])
    assert ids.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


# ------------------------------------------------------------------------------------------------ sections


@pytest.fixture
def smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests on the smallest networks, once each: whether the sections run, not how fast."""
    write, alternate = tiny_lm.write, bench._alternate
    monkeypatch.setattr(bench, "REQUESTS", 2)
    monkeypatch.setattr(tiny_lm, "write", lambda folder, **options: write(folder, **{**options, "scale": 0.0}))
    monkeypatch.setattr(bench, "_alternate", lambda functions, rounds: alternate(functions, rounds=1))


def check(results: list[Result], count: int) -> None:
    assert len(results) == count
    assert all(result.value == result.value for result in results)
    assert all(result.value > 0 for result in results if result.unit in ("x", "ms"))


def test_the_causal_lm_section_runs(smallest: None, tmp_path: Path) -> None:
    check(bench._causal_lm(tmp_path, quick=True), 3)


@pytest.mark.slow
def test_the_omni_section_runs(smallest: None, tmp_path: Path) -> None:
    check(bench._omni(tmp_path, quick=True), 4)


def test_overhead_and_memory_run_and_leave_the_component_as_it_was(
    smallest: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []
    build = bench.build_parts

    def spy(*args: Any, **options: Any) -> Any:
        built.append(build(*args, **options))
        return built[-1]

    monkeypatch.setattr(bench, "build_parts", spy)
    check(bench._overhead(tmp_path, quick=True), 2)
    component = built[0].stages["thinker"].component
    assert not {"embed", "forward", "logits"} & set(vars(component))
    check(bench._memory(tmp_path, quick=True), 2)
