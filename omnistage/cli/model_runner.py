"""What `omnistage verify` hands to a family: a checkpoint with the pipeline that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from omnistage.config import OmniEngineArgs, ResolvedConfig, resolve
from omnistage.core.errors import InternalError
from omnistage.core.family import Bridge, LoadContext
from omnistage.core.params import DiffusionParams, StageParams
from omnistage.core.stage import Stage
from omnistage.core.types import DiffusionInput
from omnistage.core.verification import ChatOutput, ModelRunner
from omnistage.models.registry import REGISTRY
from omnistage.omni import Omni
from omnistage.pipeline.build import build_parts, build_stage, load_component
from omnistage.pipeline.outputs import OmniRequestOutput
from omnistage.placement.devices import resolve_device


class OmniRunner(ModelRunner):
    """Runs a checkpoint in float32, its pipeline on the CPU. `overrides` are as in `Omni`."""

    def __init__(self, folder: Path, overrides: Sequence[str] = ()) -> None:
        self._args = OmniEngineArgs(model=str(folder), device="cpu", dtype="float32", overrides=tuple(overrides))
        self._stages: Mapping[str, Stage] = {}

    @cached_property
    def _resolved(self) -> ResolvedConfig:
        return resolve(self._args, registry=REGISTRY)

    @property
    def folder(self) -> Path:
        return self._resolved.model.folder

    @property
    def stage_names(self) -> Sequence[str]:
        return self._resolved.graph.order

    @property
    def stages(self) -> Mapping[str, Stage]:
        return self._stages

    def load_component(self, stage: str, *, device: str = "cpu") -> object:
        settings = self._resolved.config.pipeline.stages[stage]
        return load_component(LoadContext(self._resolved.model, stage, settings, resolve_device(device), torch.float32))

    def build_stage(self, stage: str) -> Stage:
        config = self._resolved.config
        return build_stage(self._resolved.model, stage, config.pipeline.stages[stage], config.deployment)

    def chat(
        self,
        chats: Sequence[Sequence[Mapping[str, object]]],
        params: Sequence[Mapping[str, StageParams]],
        *,
        bridges: Mapping[str, Bridge] | None = None,
    ) -> list[ChatOutput]:
        with self._open(bridges or {}) as omni:
            modalities = [modality.value for modality in omni.modalities]
            outputs = omni.chat(
                list(chats), list(params), modalities=modalities, use_audio_in_video=True, progress=False
            )
        return [_chat_output(output) for output in outputs]

    def draw(self, requests: Sequence[tuple[DiffusionInput, DiffusionParams]]) -> list[np.ndarray]:
        with self._open({}) as omni:
            prompts = [_prompt(payload) for payload, _ in requests]
            outputs = omni.generate(prompts, [params for _, params in requests], progress=False)
        return [_pixels(output) for output in outputs]

    def _open(self, bridges: Mapping[str, Bridge]) -> Omni:
        parts = build_parts(self._args, progress=False)
        self._stages = parts.stages
        return Omni.from_parts(
            parts.graph,
            parts.stages,
            {**parts.bridges, **bridges},
            parts.defaults,
            parts.processor,
            deployment=parts.deployment,
            limits=parts.limits,
        )


def _prompt(payload: DiffusionInput) -> dict[str, object]:
    prompt: dict[str, object] = {"prompt": payload.prompt}
    if payload.images:
        prompt["images"] = list(payload.images)
    if payload.mask is not None:
        prompt["mask"] = payload.mask
    return prompt


def _chat_output(output: OmniRequestOutput) -> ChatOutput:
    if output.error is not None:
        raise output.error
    return ChatOutput(output.request_id, output.token_ids, None if output.audio is None else output.audio.samples)


def _pixels(output: OmniRequestOutput) -> np.ndarray:
    if output.error is not None:
        raise output.error
    if output.video is not None:
        return output.video.frames
    if not output.images:
        raise InternalError("the pipeline returned neither a picture nor a video")
    return output.images[0].pixels
