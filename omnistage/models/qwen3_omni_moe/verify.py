"""Our pipeline against stock `transformers` on the same chats, for `omnistage verify` and the parity tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from omnistage.core.verification import ModelRunner, Progress, VerifyRow
from omnistage.models._qwen_omni.verify import Answer, Case, ReferenceOutput, run_cases, run_pipeline
from omnistage.models.qwen3_omni_moe.reference import Reference


def run(runner: ModelRunner, *, cases: int = 8, seed: int = 0, progress: Progress | None = None) -> list[VerifyRow]:
    """Compare random chats of all kinds; float32 on the CPU."""

    def load_reference() -> Callable[[Case], ReferenceOutput]:
        return partial(run_reference, Reference(runner.folder))

    return run_cases(cases, seed, progress, partial(run_ours, runner), load_reference)


def run_reference(reference: Reference, case: Case) -> ReferenceOutput:
    max_codes = case.max_codes if reference.model.has_talker else 0
    return reference.run(case.messages, max_tokens=case.max_tokens, max_codes=max_codes)


def run_ours(runner: ModelRunner, cases: Sequence[Case]) -> list[Answer]:
    """Greedy answers of all cases in one batch."""
    return run_pipeline(runner, cases, "code2wav" if "talker" in runner.stage_names else None)
