"""The devices of a deployment: which ones, with which dtype, and how much of their memory this process may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.config import DeploymentConfig, LocalStageConfig
from omnistage.core.errors import ConfigError
from omnistage.core.types import DTypeName
from omnistage.placement.memory_plan import CUDA_CONTEXT

if TYPE_CHECKING:
    import torch


def resolve_device(name: str, *, param: str = "deployment.device") -> torch.device:
    """`auto` is CUDA where there is one, else the CPU. MPS must be asked for by name."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        usable = torch.cuda.device_count()
        raise ConfigError(f"{name} was requested, but {usable} CUDA devices are usable; use cpu or auto", param=param)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("mps was requested, but it is not available here; use cpu or auto", param=param)
    return device


def resolve_dtype(name: DTypeName, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and float32 elsewhere."""
    import torch

    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]


def place(name: str, stage: LocalStageConfig, deployment: DeploymentConfig) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of a stage."""
    device = resolve_device(stage.device or deployment.device, param=f"pipeline.stages.{name}.device")
    return device, resolve_dtype(stage.dtype or deployment.dtype, device)


def place_anywhere(
    name: str, stage: LocalStageConfig, deployment: DeploymentConfig
) -> tuple[torch.device, torch.dtype]:
    """The same for a machine that is not this one: `gpu_memory` says that it has a GPU."""
    import torch

    name = stage.device or deployment.device
    if name == "auto":
        has_gpu = deployment.gpu_memory is not None or torch.cuda.is_available()
        device = torch.device("cuda" if has_gpu else "cpu")
    else:
        device = torch.device(name)
    return device, resolve_dtype(stage.dtype or deployment.dtype, device)


def available_memory(device: str, deployment: DeploymentConfig) -> int | None:
    """Bytes for a model and the driver on a device, those of this process's other models taken off; None: unknown."""
    import torch

    from omnistage.core.memory import free_host_memory

    kind = torch.device(device)
    if kind.type == "cpu":
        return free_host_memory()
    if kind.type != "cuda":
        return None
    limit = deployment.gpu_memory
    if not torch.cuda.is_available():
        return limit
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()  # what models that are gone have left to the allocator
    free, _total = torch.cuda.mem_get_info(kind)  # the driver's own share is taken by now
    free += CUDA_CONTEXT
    return free if limit is None else min(free, limit - torch.cuda.memory_reserved(kind))


def limit_process(device: torch.device, deployment: DeploymentConfig) -> None:
    """Let the allocator take no more of a GPU than the deployment allows."""
    import torch

    if deployment.gpu_memory is None or device.type != "cuda":
        return
    _free, total = torch.cuda.mem_get_info(device)
    share = max(0, deployment.gpu_memory - CUDA_CONTEXT) / total
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), device.index or 0)  # it takes no device without one
