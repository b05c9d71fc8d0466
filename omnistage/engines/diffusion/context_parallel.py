"""A denoising stage over several ranks: each computes a share of a picture's patches, attention all of its heads'.

The model's own plan (`_cp_plan` of diffusers) says where a forward is divided and put together again, and diffusers'
hooks and attention do it (Ulysses: a rank has all patches for a share of the heads). `enable_parallelism` would apply
them, but only where there is an accelerator: it counts the machine's and divides by their number. What it does beyond
that is done here, for the CPU and for CUDA alike.
"""

from __future__ import annotations

import ast
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from omnistage.config.schema import DiffusionBudget
from omnistage.core.errors import CapacityError, ConfigError, InternalError, UnsupportedModelError
from omnistage.core.params import DiffusionParams
from omnistage.engines.diffusion.component import Denoiser
from omnistage.engines.diffusion.runner import fast_attention
from omnistage.engines.diffusion.stage import DenoiseStage
from omnistage.engines.diffusion.step_plan import TensorShape, TransformerCall
from omnistage.engines.ranks import OtherRanks, RankedStage

if TYPE_CHECKING:
    from diffusers import ParallelConfig

_PLAIN_STEPS = {"cuda_graphs": False, "compile": False}
"""Ranks are told what to compute call by call, so no step may be captured."""
_COLLECTIVE_SECONDS = 300.0
"""For all ranks to come to the same point of a step."""


class ContextGroup:
    """The ranks of one stage: torch's default process group, which diffusers' hooks need, so one stage a process."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._connected = False

    def connect(self, backend: str, store: str, device: torch.device) -> None:
        """Meet the other ranks through a file that all of them name, which is not needed once this returns."""
        timeout = timedelta(seconds=_COLLECTIVE_SECONDS)
        options: dict[str, Any] = {"rank": self.rank, "world_size": self.size, "timeout": timeout}
        if backend == "nccl":  # pragma: no cover  (needs two GPUs)
            # Else torch ends this process, with all its stages, when a collective fails.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            options["device_id"] = device
        with _loopback():
            dist.init_process_group(backend, store=FileStore(store, self.size), **options)
            self._connected = True
            shape, names = (1, self.size), ("ring", "ulysses")
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
            self.config = _parallel_config(self.rank, self.size, device, mesh)
            probe = torch.zeros(1, device=device)
            dist.all_reduce(probe)
            probe.item()  # waits for the device

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite the tensor with rank 0's."""
        dist.broadcast(tensor, 0)

    def abort(self) -> None:
        """End what waits for a rank that is gone; from any thread. Gloo notices by itself."""
        if self._connected and dist.get_backend() == "nccl":  # pragma: no cover  (needs two GPUs)
            dist.distributed_c10d._abort_process_group()

    def close(self) -> None:
        """Leave the group, so that another can be made."""
        if self._connected and dist.is_initialized():
            dist.destroy_process_group()
        self._connected = False


def _parallel_config(rank: int, size: int, device: torch.device, mesh: DeviceMesh) -> ParallelConfig:
    from diffusers import ContextParallelConfig, ParallelConfig

    config = ParallelConfig(context_parallel_config=ContextParallelConfig(ulysses_degree=size, mesh=mesh))
    config.setup(rank, size, device, mesh=mesh)
    return config


@contextmanager
def _loopback() -> Iterator[None]:
    """Gloo inside the block uses the loopback interface, unless the user has named another."""
    name, before = "GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME")
    loopback = next((interface for _, interface in socket.if_nameindex() if interface.startswith("lo")), None)
    if before is None and loopback is not None:
        os.environ[name] = loopback
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


def divisible(component: object, budget: DiffusionBudget, size: int) -> Denoiser:
    """The component, where this process can compute it with others. Raises what is in the way."""
    if not isinstance(component, Denoiser):
        raise UnsupportedModelError(
            f"{type(component).__name__} does not denoise step by step, so it cannot run on several ranks; set "
            "context_parallel: 1 for its stage"
        )
    for transformer in component.transformers:
        plan_of(transformer, size)
    if budget.cache is not None:
        raise ConfigError(
            f"a step cache ({budget.cache}) cannot be combined with context parallelism; remove cache, or set "
            "context_parallel: 1"
        )
    if dist.is_initialized():
        raise ConfigError(
            "this process has a process group of torch already, of another context parallel stage or of the program "
            "itself; run this stage in a process of its own (deployment.placement), or set context_parallel: 1"
        )
    return component


def plan_of(transformer: nn.Module, size: int) -> Mapping[str, Any]:
    """The model's own plan. Raises where it has none, or where its heads cannot be divided."""
    name, plan = type(transformer).__name__, getattr(transformer, "_cp_plan", None)
    if not plan:
        raise UnsupportedModelError(f"{name} has no plan for context parallelism in diffusers; set context_parallel: 1")
    heads: int = transformer.config.num_attention_heads  # type: ignore[union-attr, assignment]
    if heads % size:
        raise ConfigError(
            f"{name} has {heads} attention heads, which {size} ranks cannot divide evenly; use context_parallel: "
            + " or ".join(str(n) for n in range(1, min(heads, 16) + 1) if heads % n == 0)
        )
    return plan  # type: ignore[no-any-return]


def divide(transformer: nn.Module, group: ContextGroup) -> None:
    """Have the transformer compute its rank's share of each forward."""
    from diffusers.hooks import apply_context_parallel

    plan = plan_of(transformer, group.size)
    for module in transformer.modules():
        processor = getattr(module, "processor", None)
        if processor is not None and hasattr(processor, "_parallel_config"):
            processor._parallel_config = group.config
    apply_context_parallel(transformer, group.config.context_parallel_config, plan)


class ParallelDenoiseStage(RankedStage, DenoiseStage):
    """A denoising stage whose forwards several ranks compute. It fails as a whole with any of them."""

    def __init__(
        self,
        name: str,
        denoiser: Denoiser,
        budget: DiffusionBudget,
        params: DiffusionParams,
        ranks: OtherRanks,
        group: ContextGroup,
    ) -> None:
        self._ranks = ranks
        self._size = denoiser.text_multiple = group.size
        ranks.serve()
        for number, transformer in enumerate(denoiser.transformers):
            divide(transformer, group)
            transformer.forward = partial(self._lead, number, transformer, transformer.forward)
        super().__init__(name, denoiser, budget.model_copy(update=_PLAIN_STEPS), params)

    def _lead(
        self, number: int, transformer: nn.Module, forward: Callable[..., Any], *args: object, **arguments: object
    ) -> Any:
        """A transformer's forward, with the other ranks."""
        if args:
            raise InternalError(f"{type(transformer).__name__} was called with arguments that have no names")
        if self._ranks.failure is not None:
            raise self._ranks.failure
        self._check_divisible(transformer, arguments)
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in arguments.items() if name not in tensors}
        shapes = (TensorShape(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items())
        try:
            self._ranks.send(TransformerCall(number, tuple(shapes), repr(others)))
            for tensor in tensors.values():
                self._ranks.group.broadcast(tensor.contiguous())
            return forward(**arguments)
        except BaseException as error:  # the boundary of a step that others compute, too
            raise self._ranks.fail(error) from error

    def _check_divisible(self, transformer: nn.Module, arguments: Mapping[str, object]) -> None:
        """Refuse a forward that cannot be divided before it is sent to the other ranks."""
        for part in plan_of(transformer, self._size).values():
            for name, split in part.items() if isinstance(part, Mapping) else ():
                value = arguments.get(name) if isinstance(name, str) else None
                if isinstance(value, Tensor) and value.ndim == split.expected_dims:
                    text = name.startswith(("encoder", "txt"))
                    self._check_length(value.shape[split.split_dim], "tokens of text" if text else "latent patches")

    def _check_length(self, length: int, what: str) -> None:
        if length % self._size:
            raise CapacityError(
                f"{length} {what} cannot be divided evenly by {self._size} ranks; use another size of picture or text, "
                f"or set {self.name}.context_parallel: 1"
            )

    def _check_size(self, width: int, height: int, num_frames: int) -> None:
        super()._check_size(width, height, num_frames)
        self._check_length(self.denoiser.tokens(width, height, num_frames), "latent patches")


class FollowingDenoiser:
    """Another rank's transformers: compute what rank 0 says."""

    def __init__(self, denoiser: Denoiser, group: ContextGroup, device: torch.device) -> None:
        self._transformers: Sequence[nn.Module] = denoiser.transformers
        self.group = group
        self._device = device

    def serve(self, kv_blocks: int) -> None:
        del kv_blocks
        for transformer in self._transformers:
            divide(transformer, self.group)

    @torch.inference_mode()
    def run(self, call: TransformerCall) -> None:
        arguments = dict(ast.literal_eval(call.others))
        for each in call.tensors:
            tensor = torch.empty(each.shape, dtype=getattr(torch, each.dtype), device=self._device)
            self.group.broadcast(tensor)
            arguments[each.name] = tensor
        with fast_attention(self._device.type == "cuda"):
            self._transformers[call.number](**arguments)
