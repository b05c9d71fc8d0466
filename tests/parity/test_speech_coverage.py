"""Small random checkpoints of some speech types, served as a user's would be: exact, never wrong."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "tools" / "speech_coverage.py"


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("speech_coverage", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["speech_coverage"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()


@pytest.mark.parametrize("model_type", ["moonshine", "speech_to_text", "hubert", "parakeet_ctc", "parakeet_tdt"])
def test_a_recognition_type_writes_what_transformers_writes(model_type: str) -> None:
    outcome = tool.cover_recognition(model_type)
    assert outcome.state == "exact", outcome


@pytest.mark.parametrize("model_type", ["bark", "musicgen"])
def test_a_synthesis_type_speaks_as_in_transformers(model_type: str) -> None:
    outcome = tool.cover_synthesis(model_type)
    assert outcome.state == "exact", outcome


def test_texts_and_samples_that_differ_are_wrong() -> None:
    import numpy as np

    assert tool._same_texts(["a", "b"], ["a", "c"]) == "1 of 2 texts differ"
    assert tool._same_texts(["", ""], ["", ""])
    one = np.zeros(3, np.float32)
    one[0] = 0.5
    assert tool._same_samples([one], [one]) == ""
    assert tool._same_samples([one], [one + 1e-4])
    assert tool._same_samples([one], [one[:2]])
    assert tool._same_samples([one], [one * np.nan])
