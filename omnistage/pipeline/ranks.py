"""A stage over several ranks: the others are processes, spawned beside the one that runs the stage."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from omnistage.config import ARStageConfig, DiffusionStageConfig
from omnistage.core.errors import ConfigError, StageLostError, UnsupportedModelError
from omnistage.core.failures import log_defect
from omnistage.core.family import LoadContext
from omnistage.core.stage import Stage
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.parallel import FollowingComponent, ParallelStage
from omnistage.engines.ar.sharding import RankGroup
from omnistage.engines.ar.step_plan import Forward, Logits
from omnistage.engines.diffusion.step_plan import TransformerCall
from omnistage.engines.ranks import ComputeGroup, FollowingRank
from omnistage.models.registry import REGISTRY
from omnistage.pipeline.build import load_component
from omnistage.placement.devices import resolve_device
from omnistage.placement.messages import Failed, Message, Ready, Serve, StartRank, Stop
from omnistage.placement.silence import LOOK_SECONDS
from omnistage.placement.worker_process import LocalProcess, Worker

_COMMAND = ("-m", "omnistage.pipeline.rank")
_NOTICE_SECONDS = 1.0
"""For the end of a rank to be noticed that a step has failed of."""
HANG_SECONDS = 2.0
"""Without a heartbeat, after which a rank is taken for hung. One that waits for another sends them, too: they come
from a thread of their own."""


RankedConfig = ARStageConfig | DiffusionStageConfig
Load = Callable[[LoadContext], object]


def parallel_stage(context: LoadContext, stage_cfg: RankedConfig, load: Load) -> Stage:
    """Load a stage over several ranks, of which this process is the first."""
    with ExitStack() as undo:
        if isinstance(stage_cfg, ARStageConfig):
            stage, ranks = _tensor_parallel(context, stage_cfg, load, undo)
        else:
            stage, ranks = _context_parallel(context, stage_cfg, load, undo)
        ranks.on_lost = lambda: stage.wake() if stage.wake is not None else None
        undo.pop_all()
    return stage


def _tensor_parallel(
    context: LoadContext, stage_cfg: ARStageConfig, load: Load, undo: ExitStack
) -> tuple[Stage, Ranks]:
    group = RankGroup(0, stage_cfg.tensor_parallel)
    ranks = Ranks(context, stage_cfg, group)
    undo.callback(ranks.close)
    component = load_share(context, group, load)
    ranks.wait_loaded()
    return ParallelStage(context.stage_name, component, stage_cfg.budget, ranks), ranks


def _context_parallel(
    context: LoadContext, stage_cfg: DiffusionStageConfig, load: Load, undo: ExitStack
) -> tuple[Stage, Ranks]:
    from omnistage.engines.diffusion.context_parallel import ContextGroup, ParallelDenoiseStage, divisible

    denoiser = divisible(load(context), stage_cfg.budget, stage_cfg.context_parallel)
    group = ContextGroup(0, stage_cfg.context_parallel)
    ranks = Ranks(context, stage_cfg, group)
    undo.callback(ranks.close)
    ranks.wait_loaded()
    name, params = context.stage_name, stage_cfg.params
    return ParallelDenoiseStage(name, denoiser, stage_cfg.budget, params, ranks, group), ranks


def following_rank(context: LoadContext, stage_cfg: RankedConfig, rank: int) -> FollowingRank:
    """What a process of ranks 1 and up computes."""
    load = partial(load_component, registry=REGISTRY)
    if isinstance(stage_cfg, ARStageConfig):
        group = RankGroup(rank, stage_cfg.tensor_parallel)
        return FollowingComponent(load_share(context, group, load), group, stage_cfg.budget)
    from omnistage.engines.diffusion.context_parallel import ContextGroup, FollowingDenoiser, divisible

    denoiser = divisible(load(context), stage_cfg.budget, stage_cfg.context_parallel)
    return FollowingDenoiser(denoiser, ContextGroup(rank, stage_cfg.context_parallel), context.device)


def load_share(context: LoadContext, group: RankGroup, load: Load) -> ARComponent:
    """One rank's share of a component: loaded in host memory, since the whole may be too large for a device."""
    component = load(replace(context, device=torch.device("cpu"), target=context.device))
    if not isinstance(component, ARComponent):
        raise UnsupportedModelError(f"{type(component).__name__} cannot run on several ranks; set tensor_parallel: 1")
    component.shard(group, context.device)
    return component


def rank_devices(device: torch.device, size: int, param: str) -> list[torch.device]:
    """The device of each rank: the CPU for all, or one GPU each from the stage's own on."""
    if device.type == "cpu":
        return [device] * size
    if device.type != "cuda":
        raise ConfigError(f"ranks run on the CPU or on CUDA, not on {device}; set it to 1", param=param)
    first = device.index or 0
    return [resolve_device(f"cuda:{first + rank}", param=param) for rank in range(size)]


class Ranks:
    """The processes of ranks 1 and up, from their start to their end. One that ends is the end of all."""

    def __init__(self, context: LoadContext, stage_cfg: RankedConfig, group: ComputeGroup) -> None:
        """They load while this process does."""
        size, self.group = group.size, group
        self.failure: StageLostError | None = None
        self.on_lost: Callable[[], None] = lambda: None
        self._name, self._device = context.stage_name, context.device
        key = "tensor_parallel" if isinstance(stage_cfg, ARStageConfig) else "context_parallel"
        devices = rank_devices(context.device, size, f"pipeline.stages.{self._name}.{key}")
        self._backend = "nccl" if len({str(device) for device in devices}) == size else "gloo"
        self._folder = Path(tempfile.mkdtemp(prefix="omnistage-ranks-"))
        self._lock, self._ended, self._closing = threading.Lock(), threading.Event(), False
        self._workers: list[Worker] = []
        try:
            for rank in range(1, size):
                closed = partial(self._rank_ended, rank)
                worker = Worker(f"{self._name}-rank-{rank}", LocalProcess(_COMMAND), _receive, closed)
                self._workers.append(worker)
                worker.send(self._start_message(context, stage_cfg, rank, devices[rank]))
        except BaseException:
            self.close()
            raise

    def _start_message(
        self, context: LoadContext, stage_cfg: RankedConfig, rank: int, device: torch.device
    ) -> StartRank:
        return StartRank(
            folder=str(context.model.folder),
            family=context.model.family,
            model=context.model.name,
            stage=self._name,
            config=stage_cfg.model_dump_json(),
            rank=rank,
            device=str(device),
            dtype=str(context.dtype).removeprefix("torch."),
            requested_dtype=context.requested_dtype,
            torch_threads=context.torch_threads or max(1, (os.cpu_count() or 1) // self.group.size),
            backend=self._backend,
            store=self._store,
            log_level=logging.getLogger("omnistage").getEffectiveLevel(),
        )

    @property
    def _store(self) -> str:
        return str(self._folder / "store")

    def pids(self) -> list[int]:
        """The processes of ranks 1 and up."""
        return [worker.host.pid for worker in self._workers]

    def wait_loaded(self) -> None:
        """Returns once all ranks are loaded. Raises why one is not."""
        for worker in self._workers:
            worker.wait_started()

    # ------------------------------------------------------------------------------------------------- steps

    def serve(self, kv_blocks: int = 0) -> None:
        for worker in self._workers:
            worker.send(Serve(kv_blocks))
        self.group.connect(self._backend, self._store, self._device)
        shutil.rmtree(self._folder, ignore_errors=True)
        threading.Thread(target=self._watch, name=f"omnistage-{self._name}-ranks", daemon=True).start()

    def send(self, step: Forward | Logits | TransformerCall) -> None:
        for worker in self._workers:
            worker.send(step)

    def fail(self, error: BaseException) -> StageLostError:
        if not self._ended.wait(_NOTICE_SECONDS):
            log_defect(f"a step of stage {self._name!r} on rank 0", error)
        failure = self._lose(f"a step failed on rank 0 of stage {self._name!r} with {type(error).__name__}")
        for worker in self._workers:
            worker.kill()
        return failure

    # ------------------------------------------------------------------------------------------------ ending

    def _watch(self) -> None:
        """Until the end: end a rank that does not respond, which then is a rank that has ended."""
        while not self._ended.wait(LOOK_SECONDS):
            for rank, worker in enumerate(self._workers, start=1):
                if worker.hangs(HANG_SECONDS):
                    self._lose(f"rank {rank} of stage {self._name!r} has not responded for {HANG_SECONDS:g} s")
                    worker.kill()

    def _rank_ended(self, rank: int, worker: Worker) -> None:
        """From the thread of its channel."""
        if not self._closing:
            self._lose(f"rank {rank} of stage {self._name!r} has ended ({worker.ending()})")
            self.group.abort()
            self.on_lost()

    def _lose(self, why: str) -> StageLostError:
        """Note why the stage cannot go on; the first reason counts."""
        with self._lock:
            if self.failure is None:
                self.failure = StageLostError(f"{why}; the stage is being rebuilt, try again later")
            self._ended.set()
            return self.failure

    def close(self) -> None:
        """End the processes."""
        self._closing = True
        self._ended.set()
        for worker in self._workers:  # all at once, then each is waited for
            worker.send(Stop())
        for worker in self._workers:
            worker.stop()
        self.group.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _receive(worker: Worker, message: Message) -> None:
    if isinstance(message, Ready):
        worker.started()
    elif isinstance(message, Failed):
        worker.started(message.error)
