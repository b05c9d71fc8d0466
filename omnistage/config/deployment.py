"""Devices, queues, and groups of stages in processes of their own."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from omnistage.config.scalars import ConfigModel, Count, CountOrZero, DeviceName, Seconds, Size
from omnistage.core.types import DTypeName

AdapterName = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]


class GroupConfig(ConfigModel):
    """Stages that run together, in this process or in processes of their own."""

    stages: tuple[str, ...] = Field(min_length=1, description="Those of the group; edges between them stay inside.")
    kind: Literal["inline", "process", "ray"] = Field(
        default="process",
        description="inline: in this process; process: in a local process of their own; ray: in an actor on a cluster.",
    )
    replicas: Count = Field(default=1, description="Processes; each runs all stages of the group.")
    devices: tuple[DeviceName, ...] = Field(
        default=(), max_length=64, description="Of the processes in turn; empty: the stages' own."
    )
    torch_threads: Count | None = Field(
        default=None,
        description="CPU threads of torch in each process; null: the deployment's, else replicas share the cores.",
    )
    num_cpus: float = Field(default=1.0, ge=0.0, le=1024.0, description="That Ray reserves for each process.")
    num_gpus: float = Field(default=0.0, ge=0.0, le=1024.0, description="The same; less than 1 is a share of a GPU.")
    hang_seconds: Annotated[Seconds, Field(ge=0.1)] = Field(
        default=2.0, description="A process that has work and does not respond for this long is ended."
    )
    max_restarts: CountOrZero = Field(
        default=5, description="Restarts of a process that has ended, each within 10 minutes of the last."
    )
    standby: bool = Field(
        default=False,
        description="Keep one more process that has imported what the others have (about 0.5 GB), from which the next "
        "is forked when one is lost.",
    )
    restart_requests: bool = Field(
        default=True, description="Start requests again, once, that had given nothing when their process ended."
    )

    @model_validator(mode="after")
    def _inline_is_plain(self) -> Self:
        if self.kind == "inline" and (self.replicas > 1 or self.devices or self.torch_threads is not None):
            raise ValueError("replicas, devices and torch_threads are for processes; use kind: process or remove them")
        if self.kind != "ray" and self.model_fields_set & {"num_cpus", "num_gpus"}:
            raise ValueError("num_cpus and num_gpus are what Ray reserves; use kind: ray or remove them")
        if self.standby and self.kind != "process":
            raise ValueError("standby is for local processes; use kind: process or remove it")
        return self


class AdapterConfig(ConfigModel):
    """A LoRA adapter that is loaded at start. A folder alone is short for one."""

    folder: str = Field(
        min_length=1, max_length=4096, description="With `adapter_config.json` and safetensors, of PEFT or diffusers."
    )
    scale: float = Field(
        default=1.0, ge=-100.0, le=100.0, allow_inf_nan=False, description="Multiplies the adapter's own scale."
    )
    stage: str | None = Field(default=None, max_length=64, description="null: that of `deployment.adapter_stage`.")

    @model_validator(mode="before")
    @classmethod
    def _folder_alone(cls, value: object) -> object:
        return {"folder": value} if isinstance(value, str) else value


class DeploymentConfig(ConfigModel):
    """Devices and queues."""

    device: DeviceName = Field(default="auto", description="auto: CUDA where there is one, else CPU.")
    dtype: DTypeName = Field(default="auto", description="auto: bfloat16 on CUDA, float32 elsewhere.")
    gpu_memory: Size | None = Field(
        default=None, description="Memory of a GPU that this process may take; null: what is free when it starts."
    )
    concurrency: Count = Field(default=16, description="Requests at once that memory is planned for.")
    context: Count = Field(default=8192, description="Tokens of each of them that memory is planned for.")
    max_inflight: Count = Field(
        default=256, description="Requests running or queued, counted by their answers, before new ones are refused."
    )
    trace_history: CountOrZero = Field(default=1024, description="Traces of finished requests that are kept.")
    output_buffer: Count = Field(default=1024, description="Chunks buffered for a slow reader.")
    torch_threads: Count | None = Field(default=None, description="CPU threads of torch; null: torch's choice.")
    max_step_seconds: Seconds | None = Field(
        default=120.0,
        description="A stage that is in one step for longer is reported and takes no new requests; null: no limit.",
    )
    max_rebuilds: CountOrZero = Field(
        default=3, description="Attempts to rebuild a stage that has failed, each within 10 minutes of the last."
    )
    voices: dict[str, str] = Field(
        default_factory=dict,
        description="Other names for the model's voices, like `{alloy: Chelsie}`; OpenAI's mean its voices in turn.",
    )
    ray_address: str | None = Field(
        default=None,
        max_length=300,
        description="Ray cluster of groups with kind: ray; null: that of RAY_ADDRESS, or a new one on this machine.",
    )
    adapters: dict[AdapterName, AdapterConfig] = Field(
        default_factory=dict, max_length=1000, description="LoRA adapters by name, see [adapters](adapters.md)."
    )
    adapter_stage: str | None = Field(
        default=None, max_length=64, description="Their stage; null: the one that gives text, else `denoise`."
    )
    adapter_slots: Annotated[Count, Field(le=256)] = Field(
        default=8, description="Adapters on the device at once; requests that need others wait."
    )
    adapter_rank: Annotated[Count, Field(le=1024)] | None = Field(
        default=None, description="Largest rank; null: that of the configured ones, with `adapter_folders` at least 16."
    )
    adapter_memory: Size = Field(
        default=2 * 2**30, description="Host memory for each stage's adapters, and the largest file of one."
    )
    adapter_folders: tuple[str, ...] = Field(
        default=(), max_length=64, description="Where adapters may be loaded from at run time; empty: they may not."
    )
    placement: dict[str, GroupConfig] = Field(
        default_factory=dict, description="Groups of stages by name, see below; all others run in this process."
    )
