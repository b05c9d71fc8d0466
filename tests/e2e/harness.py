"""A pipeline driven turn by turn in the test's own thread, and what tests ask of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from omnistage.core.params import CodecParams, SamplingParams, StageParams
from omnistage.core.types import StageChunk, TokenChunk
from omnistage.engines.ar.stage import ARStage
from omnistage.omni import Omni
from omnistage.pipeline.build import EngineParts
from omnistage.pipeline.intake import RequestFactory, RequestOptions
from omnistage.pipeline.orchestrator import Orchestrator
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk

SMALL_POOLS = ("thinker.kv_blocks=256", "talker.kv_blocks=256")
"""The planner would take a tenth of the machine's memory, which these models cannot use."""


def open_door(parts: EngineParts, door: type[Any] = Omni, **changes: Any) -> Any:
    """A front door over parts, some of them exchanged."""
    given = {"bridges": parts.bridges, "stages": parts.stages, **changes}
    return door.from_parts(
        parts.graph,
        given["stages"],
        given["bridges"],
        parts.defaults,
        parts.processor,
        deployment=parts.deployment,
        limits=parts.limits,
    )


def assert_empty(orchestrator: Orchestrator) -> None:
    """No request, deadline, command or stage state is left, and every block of the KV pools is free again."""
    orchestrator.check_idle()
    for stage in orchestrator.stages.values():
        if isinstance(stage, ARStage):
            stage.check_integrity()
            pool = stage.scheduler.pool
            assert pool.free_blocks == pool.num_blocks, stage.name
            assert not stage.runner.keys()


@dataclass(frozen=True)
class SpeechModel:
    """What tests know of a family that speaks."""

    family: str
    codec: str
    """The stage that makes sound of codes."""
    code_samples: int
    """Samples of a code or frame."""
    missing_samples: int
    """That the end of an utterance lacks."""
    first_codes: int
    """Codes from which the first sound comes at the latest."""
    codebooks: int
    codebook_size: int
    control_ids: tuple[int, ...]
    """Of the talker's vocabulary, the last of them its end."""

    def greedy(self, tokens: int = 6, codes: int = 20, **codec: Any) -> dict[str, StageParams]:
        """A reply of exactly `tokens` tokens and speech of exactly `codes` codes, the same every time."""
        params = greedy(tokens, codes, **codec)
        params[self.codec] = params.pop("token2wav")
        return params

    def frame(self, code: int) -> int | tuple[int, ...]:
        """A code, or a frame that has it last."""
        return code if self.codebooks == 1 else (*(0,) * (self.codebooks - 1), code)

    def samples(self, codes: int) -> int:
        return codes * self.code_samples - self.missing_samples


SPEECH_MODELS = {
    "qwen2_5_omni": SpeechModel("qwen2_5_omni", "token2wav", 480, 0, 48, 1, 8194, (8242, 8293, 8296, 8447)),
    "qwen3_omni_moe": SpeechModel("qwen3_omni_moe", "code2wav", 1920, 555, 8, 4, 2048, (2100, 2149, 2301, 3071)),
}
every_speech_model = pytest.mark.parametrize("speech", SPEECH_MODELS, indirect=True, scope="session")
"""Runs a test with the small checkpoint of each family; others use the first."""


def greedy(tokens: int = 6, codes: int = 20, **codec: Any) -> dict[str, StageParams]:
    """`SpeechModel.greedy` of Qwen2.5-Omni."""
    return {
        "thinker": SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        "talker": SamplingParams(temperature=0.0, max_tokens=codes, min_tokens=codes),
        "token2wav": CodecParams(**{"seed": 3, "num_steps": 3, **codec}),
    }


@contextmanager
def tokens_of(omni: Omni, stage: str) -> Iterator[list[int]]:
    """What a stage generates inside the block, wherever it runs."""
    tokens: list[int] = []
    running = omni.orchestrator._loops[stage].stage
    step = running.step

    def noting_step() -> list[StageChunk]:
        chunks = step()
        for chunk in chunks:
            if isinstance(chunk.payload, TokenChunk):
                tokens.extend(chunk.payload.token_ids)
        return chunks

    running.step = noting_step  # type: ignore[method-assign]
    yield tokens
    running.step = step  # type: ignore[method-assign]


def say(text: str, *parts: dict[str, object]) -> list[dict[str, object]]:
    """A conversation of one message: media, then text."""
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


class PipelineHarness:
    """A pipeline that runs only when told to, all in this thread: every interleaving is the test's own.

    `changes` exchange parts of the orchestrator (`bridges`, `max_inflight`, `clock`).
    """

    def __init__(self, parts: EngineParts, **changes: Any) -> None:
        options = {"bridges": parts.bridges, **changes}
        self.parts = parts
        self.orchestrator = Orchestrator(parts.graph, parts.stages, defaults=parts.defaults, threads=False, **options)
        types = {name: stage.params_type for name, stage in parts.stages.items()}
        clock = {"clock": changes["clock"]} if "clock" in changes else {}
        self.requests = RequestFactory(parts.graph, types, parts.processor, parts.limits, **clock)

    def submit(self, request_id: str, prompt: Any, params: Any = None, **options: Any) -> list[OutputChunk]:
        """Admit a request; its stream items arrive in the returned list."""
        items: list[OutputChunk] = []
        request = self.requests.build(prompt, params, RequestOptions(**options), request_id)
        self.orchestrator.submit(request, items.append)
        return items

    def turns(self, count: int) -> None:
        for _ in range(count):
            assert self.orchestrator.run_once(), "nothing was left to run"

    def finish(self) -> None:
        """Run to the end; nothing may be left then."""
        self.orchestrator.run_until_idle()
        assert_empty(self.orchestrator)


def final_of(items: list[OutputChunk]) -> OmniRequestOutput:
    """The output of a request that must have ended, exactly once and last."""
    assert [item.final is not None for item in items] == [False] * (len(items) - 1) + [True]
    output = items[-1].final
    assert output is not None
    return output
