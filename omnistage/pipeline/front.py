"""The base of `Omni` and `AsyncOmni`: the parts of a model, and the orchestrator over them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from omnistage.config import DeploymentConfig, LimitsConfig, OmniEngineArgs
from omnistage.core.cancellation import Cancellation, cancellation_scope
from omnistage.core.family import AnyProcessor, Bridge
from omnistage.core.graph import PipelineGraph
from omnistage.core.params import StageParams
from omnistage.core.stage import Stage
from omnistage.core.types import Modality
from omnistage.core.voices import VoiceNames
from omnistage.pipeline.adapters import Adapters
from omnistage.pipeline.build import EngineParts, Report, build_parts
from omnistage.pipeline.health import OrchestratorStats, StageHealth
from omnistage.pipeline.intake import ParamsLike, Prompt, RequestFactory, RequestOptions, known_request_id
from omnistage.pipeline.orchestrator import Orchestrator
from omnistage.pipeline.outputs import Trace
from omnistage.pipeline.request import RequestPlan
from omnistage.placement.replicas import ReplicaStats


class Front:
    """The base of both: the parts, built from a model or given, and the orchestrator over them."""

    def __init__(
        self,
        model: str | Path,
        *,
        config: Path | None = None,
        overrides: Sequence[str] = (),
        device: str | None = None,
        dtype: str | None = None,
        gpu_memory: str | int | None = None,
        quantize: str | None = None,
        ray: str | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        progress: bool | Report = True,
    ) -> None:
        """Load `model`: a folder, or a name in the local hub cache. Raises before loading if it cannot be served.

        `adapters`: folders of LoRA adapters by name; parameters choose by `lora`.
        """
        values = {"model": str(model), "config": config, "overrides": overrides, "gpu_memory": gpu_memory}
        settings = [f"{name}={folder}" for name, folder in (adapters or {}).items()]
        values |= {"device": device, "dtype": dtype, "quantize": quantize, "ray": ray, "adapters": settings}
        self._open(build_parts(OmniEngineArgs.parse(values), progress=progress))

    @classmethod
    def from_parts(
        cls,
        graph: PipelineGraph,
        stages: Mapping[str, Stage],
        bridges: Mapping[str, Bridge],
        defaults: Mapping[str, StageParams],
        processor: AnyProcessor,
        *,
        deployment: DeploymentConfig | None = None,
        limits: LimitsConfig | None = None,
    ) -> Self:
        """An engine over stages that exist already, for tests and for embedding."""
        self = cls.__new__(cls)
        deployment, limits = deployment or DeploymentConfig(), limits or LimitsConfig()
        self._open(EngineParts(graph, stages, bridges, defaults, processor, deployment, limits))
        return self

    def _open(self, parts: EngineParts) -> None:
        deployment = parts.deployment
        self.processor = parts.processor
        self.memory = parts.memory
        self.adapters = Adapters(parts.deployment, parts.adapters)
        self.start_times = parts.times
        self._groups = parts.groups
        self.media_limits = parts.limits.media
        self.modalities: tuple[Modality, ...] = tuple(parts.graph.outputs)
        """What this model gives."""
        self.orchestrator = Orchestrator(
            parts.graph,
            parts.stages,
            parts.bridges,
            parts.defaults,
            max_inflight=deployment.max_inflight,
            trace_history=deployment.trace_history,
            model=parts.model,
            rebuilds=parts.rebuilds,
            max_step_seconds=deployment.max_step_seconds,
            max_rebuilds=deployment.max_rebuilds,
            links=parts.links,
        )
        params_types = {name: stage.params_type for name, stage in parts.stages.items()}
        speaks = Modality.AUDIO in self.modalities
        self.voices = VoiceNames(parts.processor.voices(), deployment.voices, speaks=speaks)
        self._requests = RequestFactory(
            parts.graph, params_types, parts.processor, parts.limits, parts.defaults, voices=self.voices
        )
        self._output_buffer = deployment.output_buffer
        self._preparing: dict[str, Cancellation] = {}
        """Requests that the orchestrator does not know yet, by id."""
        # Stage threads keep the orchestrator alive: an engine that is dropped without being closed must stop them.
        self._finalizer = weakref.finalize(self, self.orchestrator.shutdown, False)

    def _plan(
        self, prompt: Prompt, params: ParamsLike, options: RequestOptions, request_id: str | None = None
    ) -> RequestPlan:
        arrival = time.monotonic()
        with cancellation_scope() as cancellation:
            cancellation.deadline = self._requests.deadline(arrival, options.timeout)
            return self.orchestrator.plan(self._requests.build(prompt, params, options, request_id, arrival))

    def tokens(self, prompt: Prompt, options: RequestOptions) -> tuple[int, ...] | int:
        """The tokens of a prompt; their number alone where some stand for media or embeddings."""
        return self._requests.tokens(prompt, options)

    def abort(self, request_id: str) -> bool:
        """End a request; whether it was running."""
        if self.orchestrator.abort(known_request_id(request_id)):
            return True
        preparing = self._preparing.get(request_id)
        if preparing is not None:
            preparing.cancel()
        return preparing is not None

    def trace(self, request_id: str) -> Trace | None:
        """What ran when, for a running or recent request."""
        return self.orchestrator.trace(known_request_id(request_id))

    def stats(self) -> OrchestratorStats:
        return replace(self.orchestrator.stats(), replicas=tuple(self.replicas()))

    def health(self) -> dict[str, StageHealth]:
        """By stage: whether it takes requests."""
        return self.orchestrator.health()

    def replicas(self) -> list[ReplicaStats]:
        """The processes that stages run in, other than this one."""
        return [replica for group in self._groups for replica in group.replicas()]
