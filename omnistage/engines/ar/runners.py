"""Which runner computes a component's sequences."""

from __future__ import annotations

from omnistage.engines.ar.component import ARSpec
from omnistage.engines.ar.group_runner import GroupRunner
from omnistage.engines.ar.own_state import OwnStateRunner
from omnistage.engines.ar.recurrent_runner import RecurrentRunner
from omnistage.engines.ar.runner import Runner
from omnistage.engines.ar.whole_prompt_runner import WholePromptRunner


def runner_of(spec: ARSpec) -> type[Runner]:
    if spec.own_state is not None:
        return OwnStateRunner
    if spec.grouped:
        return WholePromptRunner if spec.whole_prompts else GroupRunner
    return RecurrentRunner if spec.states else Runner
