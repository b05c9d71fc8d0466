"""What a service and the processes that run its stages say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from omnistage.core.errors import OmniError
from omnistage.core.params import StageParams
from omnistage.core.stage import StageStats, StepSeconds
from omnistage.core.types import DTypeName, StageChunk, StageFeed, StageInput
from omnistage.engines.ar.step_plan import Forward, Logits
from omnistage.engines.diffusion.step_plan import TransformerCall
from omnistage.placement.device_memory import Region

WINDOW = 64
"""Batches of chunks of one stage that may be on their way; then the stage waits for the service to take them."""


# --------------------------------------------------------------------------------------------- to a process


@dataclass(frozen=True, slots=True)
class Start:
    """Build these stages; the first message of all. `arguments` are `OmniEngineArgs` as JSON."""

    arguments: str
    stages: tuple[str, ...]
    device: str | None
    torch_threads: int | None
    beat_seconds: float
    log_level: int
    devices: tuple[str, ...] = ()
    """UUIDs of the GPUs that the service uses."""
    boot: str = ""
    """Of its machine, see `clock`."""
    now: float = 0.0
    """When it sent this, by its clock."""


@dataclass(frozen=True, slots=True)
class StartRank:
    """Load one rank of a stage that several compute; the first message of all. `Serve`, then steps follow."""

    folder: str
    family: str
    model: str
    """Its name."""
    stage: str
    config: str
    """The stage's `ARStageConfig` or `DiffusionStageConfig` as JSON."""
    rank: int
    device: str
    dtype: str
    requested_dtype: DTypeName
    torch_threads: int
    backend: str
    """Of the group of ranks: gloo or nccl."""
    store: str
    """The file that they meet through."""
    log_level: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Meet the other ranks, and allocate a KV pool of so many blocks where the engine has one."""

    kv_blocks: int


@dataclass(frozen=True, slots=True)
class Submit:
    """A request for a stage. `key` stands for it in all that follows, whatever its id."""

    stage: str
    key: int
    stage_input: StageInput


@dataclass(frozen=True, slots=True)
class Feed:
    stage: str
    key: int
    request_id: str
    feed: StageFeed


@dataclass(frozen=True, slots=True)
class Abort:
    stage: str
    key: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Check:
    """Ask a stage whether it can run an input, or parameters alone; `Checked` answers with the same number."""

    number: int
    stage: str
    stage_input: StageInput | None = None
    params: StageParams | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """The service has taken so many batches of a stage's chunks."""

    stage: str
    batches: int


@dataclass(frozen=True, slots=True)
class Copied:
    """Tensors in shared device memory have been read; from either side, to the channel's other end itself."""

    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Close the stages and end."""


# ------------------------------------------------------------------------------------------- from a process


@dataclass(frozen=True, slots=True)
class Loading:
    """What is being done for a stage, and the share of its start that is done."""

    doing: str
    fraction: float


@dataclass(frozen=True, slots=True)
class Ready:
    """All stages are built and warm."""

    devices: tuple[str, ...] = ()
    """UUIDs of the GPUs that the process uses."""
    modules: tuple[str, ...] = ()
    """Those that it has imported."""


@dataclass(frozen=True, slots=True)
class Failed:
    """They cannot be built; the process ends."""

    error: OmniError


@dataclass(frozen=True, slots=True)
class Checked:
    number: int
    error: OmniError | None = None


@dataclass(frozen=True, slots=True)
class Chunks:
    """What one step of a stage gave, each chunk with its request's key."""

    stage: str
    keys: tuple[int, ...]
    chunks: tuple[StageChunk, ...]


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life, with the counters of the stages."""

    stats: Mapping[str, StageStats] = field(default_factory=dict)
    steps: Mapping[str, StepSeconds] = field(default_factory=dict)
    overdue: str | None = None
    """A stage that has been in one step for too long."""


ToRank = StartRank | Serve | Forward | Logits | TransformerCall
ToWorker = Start | Submit | Feed | Abort | Check | Taken | Stop
FromWorker = Loading | Ready | Failed | Checked | Chunks | Beat
Message = ToWorker | ToRank | FromWorker | Copied
