"""Small random checkpoints of a fixed sample of types, served as a user's would be: exact or refused, never wrong."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "tools" / "coverage.py"


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("coverage_tool", PATH)  # `coverage` is a package of its own
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["coverage_tool"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()
GROUPED = {"gptj", "falcon", "xglm", "bloom", "mpt", "doge", "llama4_text", "gemma3n_text", "bart"}
RECURRENT = {
    *("mamba", "mamba2", "qwen3_next", "qwen3_5", "lfm2", "falcon_h1", "jamba", "bamba", "nemotron_h", "zamba2"),
    *("granitemoehybrid", "kimi_linear"),
}
FALLBACK = {"rembert", "moshi", "deepseek_v32", "rwkv", "recurrent_gemma"}
OTHERS = {"xlnet": ("refused", "only causal models"), "emu3": ("unbuilt", "Unrecognized configuration class")}


@pytest.mark.parametrize("model_type", tool.SAMPLE)
def test_a_type_is_served_exactly_or_refused_with_its_reason(model_type: str) -> None:
    outcome = tool.cover(model_type)
    state, reason = OTHERS.get(model_type, ("fallback" if model_type in FALLBACK else "exact", ""))
    assert outcome.state == state, outcome
    assert reason in outcome.reason
    if state in ("exact", "fallback"):
        assert outcome.preemptions > 0 or model_type == "recurrent_gemma"  # which runs one request after the other
        assert (outcome.prefix_hits > 0) is (state == "exact" and not outcome.recurrent)
        assert outcome.in_groups is (model_type in GROUPED)
        assert outcome.recurrent is (model_type in RECURRENT)


def test_the_sample_is_large_enough() -> None:
    assert len(set(tool.SAMPLE)) >= 40


@pytest.mark.parametrize("model_type", ["gemma3_text", "doge", "phimoe", "mamba2", "qwen3_5"])
def test_outside_float32_too(model_type: str) -> None:
    outcome = tool.cover(model_type, dtype="float16")
    assert outcome.state == "exact", outcome


def test_a_difference_is_found() -> None:
    expected = [tool.Answer([5, 6, 7], [-1.0, -1.0, -1.0])]
    same = [tool.Answer([5, 6, 7], [-1.0, -1.0, -1.0])] * 2
    assert tool.judge("x", expected, same, "float32").state == "exact"
    other = [same[0], tool.Answer([5, 8, 7], [-1.0, -1.1, -1.0])]
    outcome = tool.judge("x", expected, other, "float32")
    assert (outcome.state, outcome.tokens) == ("wrong", 2)
    far = tool.Answer([5, 6, 7], [-1.0, -1.0, -3.0])
    assert tool.judge("x", expected * 2, [far, far, *same], "float16").state == "exact"  # one prompt, by its rounding
    assert tool.judge("x", expected * 2, [far, far, far, *same[:1]], "float16").state == "wrong"
