"""Our pipeline against stock `transformers` on the same chats, for `omnistage verify` and the parity tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from omnistage.core.errors import CheckpointError
from omnistage.core.verification import ModelRunner, Progress, VerifyRow
from omnistage.engines.codec.stage import CodecStage
from omnistage.models._qwen_omni.verify import Answer, Case, ReferenceOutput, run_cases, run_pipeline
from omnistage.models.qwen2_5_omni.reference import Reference
from omnistage.models.qwen2_5_omni.token2wav import Token2Wav

_SEED = 1234


def run(runner: ModelRunner, *, cases: int = 8, seed: int = 0, progress: Progress | None = None) -> list[VerifyRow]:
    """Compare random chats of all kinds; float32 on the CPU."""
    noises: list[Callable[[int], torch.Tensor]] = []

    def ours(chats: Sequence[Case]) -> list[Answer]:
        answers, noise = run_ours(runner, chats)
        noises.append(noise)
        return answers

    def load_reference() -> Callable[[Case], ReferenceOutput]:
        reference = Reference(runner.folder)
        return lambda case: run_reference(reference, case, noises[0])

    return run_cases(cases, seed, progress, ours, load_reference)


def run_reference(reference: Reference, case: Case, noise: Callable[[int], torch.Tensor]) -> ReferenceOutput:
    return reference.run(case.messages, max_tokens=case.max_tokens, max_codes=case.max_codes, noise=noise)


def run_ours(runner: ModelRunner, cases: Sequence[Case]) -> tuple[list[Answer], Callable[[int], torch.Tensor]]:
    """Greedy answers of all cases in one batch, and the initial noise of their speech."""
    return run_pipeline(runner, cases, "token2wav", _SEED), _noise_of(runner.stages["token2wav"])


def _noise_of(stage: object) -> Callable[[int], torch.Tensor]:
    if not isinstance(stage, CodecStage) or not isinstance(stage.component, Token2Wav):
        raise CheckpointError("this pipeline has no token2wav stage to compare")
    component = stage.component
    return lambda frames: component.noise_for(_SEED, frames)
