"""A rank's share of a `transformers` model, by the model's own tensor parallel plan.

The plan (`tp_plan`) says for each linear layer whether its outputs or its inputs are divided. `from_pretrained` with a
`DistributedConfig` would divide them over torch's default process group, of which a process has one for all its stages
and for good. Here layers hold plain slices of their weights, and each stage has a group of its own.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import nn

from omnistage.core.errors import ConfigError, InternalError, UnsupportedModelError
from omnistage.engines.ar.cpu_kernels import WeightFirstLinear

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel

_COLLECTIVE_SECONDS = 300.0
"""For all ranks to come to the same point of a step: the first may compile kernels."""
_WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise"})
"""Styles of what every rank computes with whole weights; the embedding is rank 0's alone."""
_MAX_ADVISED = 16
_GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})


class RankGroup:
    """The ranks of one stage, which compute together. Tensors without data, for a memory plan, need no others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group: ProcessGroup | None = None

    def connect(self, backend: str, store: str, device: torch.device) -> None:
        """Meet the other ranks through a file that all of them name, which is not needed once this returns."""
        from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]

        meeting, timeout = FileStore(store, self.size), timedelta(seconds=_COLLECTIVE_SECONDS)
        if backend == "nccl":  # pragma: no cover  (needs two GPUs)
            from torch.distributed import ProcessGroupNCCL

            # Else torch ends this process, with all its stages, when a collective fails.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            options = ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = ProcessGroupNCCL(meeting, self.rank, self.size, options)  # type: ignore[assignment]
        else:
            local = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            local._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # other machines are not heard
            local._timeout = timeout
            self._group = ProcessGroupGloo(meeting, self.rank, self.size, local)  # type: ignore[assignment]
        met = torch.zeros(1, device=device)
        self.all_reduce(met)
        met.item()  # waits for the device

    @property
    def _connected(self) -> ProcessGroup:
        if self._group is None:
            raise InternalError("a tensor parallel layer ran before its ranks were connected")
        return self._group

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Add the tensors of all ranks up, in place."""
        if not tensor.is_meta:
            self._connected.allreduce([tensor]).wait()

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, in their order."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        if not tensor.is_meta:
            self._connected.allgather([parts], [tensor]).wait()
        return parts

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite the tensor with rank 0's."""
        self._connected.broadcast(tensor, 0).wait()

    def abort(self) -> None:
        """End what waits for a rank that is gone; from any thread. Gloo notices by itself."""
        if self._group is not None and self._group.name() == "nccl":  # pragma: no cover  (needs two GPUs)
            self._group.abort()

    def close(self) -> None:
        """It ends with its last reference."""


class RowParallelLinear(nn.Module):
    """A linear layer over a share of its inputs: the ranks' outputs are added up."""

    def __init__(self, linear: nn.Linear, group: RankGroup) -> None:
        super().__init__()
        self.linear = linear
        self.bias, linear.bias = linear.bias, None  # type: ignore[assignment]  # once, not once a rank
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        self._group.all_reduce(out)
        return out if self.bias is None else out + self.bias


class GatheredLinear(nn.Module):
    """A linear layer with a share of its outputs: each rank gets all of them."""

    def __init__(self, linear: nn.Linear, group: RankGroup, out_features: int) -> None:
        super().__init__()
        self.linear = linear
        self.out_features = out_features
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return torch.cat(self._group.all_gather(out), dim=-1)[..., : self.out_features]


def shard_model(model: PreTrainedModel, group: RankGroup, kv_heads: Sequence[int]) -> None:
    """Leave a rank its share of a model's weights. Raises, with the model unchanged, where that cannot be exact.

    `kv_heads`: of each layer, where they are known to be others than the config says.
    """
    rank, size = group.rank, group.size
    styles = _checked_styles(model, size, kv_heads)
    for name, style in styles.items():
        module = model.get_submodule(name)
        if not isinstance(module, nn.Linear):  # checked before
            continue
        if style == "colwise":
            _slice_outputs(module, rank, size)
        elif style == "rowwise":
            _slice_inputs(module, rank, size)
            model.set_submodule(name, RowParallelLinear(module, group))
        else:
            outputs = module.out_features
            _slice_outputs(module, rank, size)
            model.set_submodule(name, GatheredLinear(module, group, outputs))
    embedding = model.get_input_embeddings()
    if rank and isinstance(embedding, nn.Embedding):
        embedding.weight = nn.Parameter(embedding.weight.new_empty(0, embedding.embedding_dim), requires_grad=False)


def _checked_styles(model: PreTrainedModel, size: int, kv_heads: Sequence[int]) -> dict[str, str]:
    """The linear layers to divide, and how."""
    kind, config = type(model).__name__, model.config.get_text_config()
    if getattr(model.config, "quantization_config", None) is not None:
        raise _refused(kind, "has quantised weights")
    plan: dict[str, str] = model.tp_plan
    if not plan:
        raise _refused(kind, "has no tensor parallel plan in transformers")
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    numbers = {name: n for name in names if (n := getattr(config, name, None)) is not None}
    numbers |= {f"number of KV heads in layer {layer}": heads for layer, heads in enumerate(kv_heads)}
    _check_divisible(kind, numbers, size)
    for name, _ in model.named_parameters():
        if plan.get(_numbered(name), "replicate") not in _WHOLE:
            raise _refused(kind, f"divides {name} as {plan[_numbered(name)]!r}")
    head, styles = model.get_output_embeddings(), {}
    for name, module in model.named_modules():
        style = plan.get(_numbered(name), "replicate")
        if style in _WHOLE:
            continue
        plain = type(module) in (nn.Linear, WeightFirstLinear)
        if not plain or not (style in ("colwise", "rowwise") or (style in _GATHERED and module is head)):
            raise _refused(kind, f"divides {name} ({type(module).__name__}) as {style!r}")
        if style not in _GATHERED:
            width = module.out_features if style == "colwise" else module.in_features
            _check_divisible(kind, {f"width of {name}": width}, size)
        styles[name] = style
    for proj in ("q_proj", "k_proj", "v_proj", "o_proj"):
        if sum(name.endswith(f".{proj}") for name in styles) != config.num_hidden_layers:
            raise _refused(kind, f"has no {proj} that can be divided in every layer")
    return styles


def _check_divisible(kind: str, numbers: dict[str, int], size: int) -> None:
    for what, number in numbers.items():
        if number % size:
            common = math.gcd(*numbers.values())
            fitting = " or ".join(str(n) for n in range(1, _MAX_ADVISED + 1) if common % n == 0)
            raise ConfigError(
                f"{kind} has a {what} of {number}, which {size} ranks cannot divide evenly; use tensor_parallel: "
                f"{fitting}"
            )


def _refused(kind: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{kind} {why}, so it cannot run on several ranks; set tensor_parallel: 1")


def _numbered(name: str) -> str:
    """A module's name as plans have it: `*` for the numbers of layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _slice_outputs(linear: nn.Linear, rank: int, size: int) -> None:
    """Rows of the weight, equally many on all ranks: zeros where there are no more."""
    share = -(-linear.out_features // size)
    linear.weight = _share(linear.weight, 0, rank, share)
    if linear.bias is not None:
        linear.bias = _share(linear.bias, 0, rank, share)
    linear.out_features = share


def _slice_inputs(linear: nn.Linear, rank: int, size: int) -> None:
    share = linear.in_features // size
    linear.weight = _share(linear.weight, 1, rank, share)
    linear.in_features = share


def _share(weight: torch.Tensor, dim: int, rank: int, share: int) -> nn.Parameter:
    """A copy, so that the whole can be freed."""
    start = min(rank * share, weight.shape[dim])
    part = weight.detach().narrow(dim, start, min(share, weight.shape[dim] - start))
    if part.shape[dim] < share:
        missing = list(part.shape)
        missing[dim] = share - part.shape[dim]
        part = torch.cat((part, part.new_zeros(missing)), dim=dim)
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)
