"""What the parity tests of the Qwen-Omni families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file

from omnistage.models._qwen_omni.verify import Answer, Case, ReferenceOutput, compare


def check_answers(
    all_cases: Sequence[Case],
    expected: Sequence[ReferenceOutput],
    answers: Sequence[Answer],
    cases: Sequence[int] | None = None,
) -> None:
    """Every answer equals the reference's: same tokens, same codes, the same sound within the tolerance."""
    chosen = range(len(all_cases)) if cases is None else cases
    rows = [
        row
        for index, answer in zip(chosen, answers, strict=True)
        for row in compare(all_cases[index].name, answer, expected[index])
    ]
    assert [row for row in rows if not row.ok] == []
    assert len(rows) == 3 * len(answers)


def scale_rows(folder: Path, factors: Mapping[str, tuple[int, float]]) -> None:
    """Multiply one row of each of these weights: replies and speech then end by themselves now and then."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in factors.keys() & tensors.keys():
            row, factor = factors[name]
            tensors[name][row] *= factor
        save_file(tensors, path, metadata={"format": "pt"})
