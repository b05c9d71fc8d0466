"""A rank's share of a `transformers` model, by the model's own tensor parallel plan.

The plan (`tp_plan`) says for each linear layer whether its outputs or its inputs are divided. `from_pretrained` with a
`DistributedConfig` would divide them over torch's default process group, of which a process has one for all its stages
and for good. Here layers hold plain slices of their weights, and each stage has a group of its own.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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
_EXPERT_STYLES = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
_EXPERT_TOLERANCE = 0.02
"""Of a relative difference, also in 16 bits; another order of weights differs by more than 0.1."""
_HEAD_STYLES = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}


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
        probe = torch.zeros(1, device=device)
        self.all_reduce(probe)
        probe.item()  # waits for the device

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


class SplitInputLinear(RowParallelLinear):
    """The same where each rank has all inputs, and takes its share of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = self.linear.in_features
        return super().forward(x.narrow(-1, self._group.rank * width, width))


_ROWS: dict[str, type[RowParallelLinear]] = {"rowwise": RowParallelLinear, "rowwise_split_input": SplitInputLinear}


@dataclass(frozen=True, slots=True)
class _Division:
    """What of a model is divided, by the names of modules."""

    linear: dict[str, str]
    """Style of each linear layer."""
    experts: list[str]
    heads: bool
    """Each rank has a share of the heads; else all of them, with what leads to them and from them divided."""


def shard_model(
    model: PreTrainedModel,
    decoder: nn.Module,
    head: nn.Module | None,
    attention: Mapping[nn.Module, int],
    group: RankGroup,
) -> bool:
    """Leave a rank its share of the weights of a model's decoder and head; whether KV heads are divided, too.

    Raises, with the model unchanged, where that cannot be exact. `attention` has the KV heads of each module.
    """
    rank, size = group.rank, group.size
    division = _checked_division(model, decoder, head, attention, size)
    for name, style in division.linear.items():
        module = model.get_submodule(name)
        if not isinstance(module, nn.Linear):  # checked before
            continue
        if style == "colwise":
            _slice_outputs(module, rank, size)
        elif style in _ROWS:
            _slice_inputs(module, rank, size)
            model.set_submodule(name, _ROWS[style](module, group))
        else:
            outputs = module.out_features
            _slice_outputs(module, rank, size)
            model.set_submodule(name, GatheredLinear(module, group, outputs))
    for name in division.experts:
        _shard_experts(model.get_submodule(name), group)
    embedding = model.get_input_embeddings()
    if rank and isinstance(embedding, nn.Embedding):
        embedding.weight = nn.Parameter(embedding.weight.new_empty(0, embedding.embedding_dim), requires_grad=False)
    return division.heads


def _checked_division(
    model: PreTrainedModel,
    decoder: nn.Module,
    head: nn.Module | None,
    attention: Mapping[nn.Module, int],
    size: int,
) -> _Division:
    kind = type(model).__name__
    if getattr(model.config, "quantization_config", None) is not None:
        raise _unsupported(kind, "has quantised weights")
    plan: dict[str, str] = model.tp_plan
    if not plan:
        raise _unsupported(kind, "has no tensor parallel plan in transformers")
    within = set(decoder.modules()) | ({head} if head is not None else set())
    modules = {name: module for name, module in model.named_modules() if module in within}
    linear, experts = {}, []
    for name in modules:
        style = plan.get(_numbered(name), "replicate")
        if style == "moe_tp_experts":
            experts.append(name)
        elif style not in _WHOLE:
            linear[name] = style
    divides_heads = _divides_heads(kind, modules, linear, attention)
    if divides_heads:
        _check_heads(kind, model, size, list(attention.values()))
    for name, style in linear.items():
        _check_linear(kind, name, modules[name], style, size)
    checked: set[object] = set()
    for name, module in modules.items():
        styles = {param: plan.get(_numbered(f"{name}.{param}"), "replicate") for param in module._parameters}
        if name in experts:
            _check_experts(kind, name, module, styles, size, checked)
        elif divided := {param: style for param, style in styles.items() if style not in _WHOLE}:
            param, style = next(iter(divided.items()))
            raise _unsupported(kind, f"divides {name}.{param} as {style!r}")
    return _Division(linear, experts, divides_heads)


def _divides_heads(
    kind: str, modules: dict[str, nn.Module], linear: dict[str, str], attention: Collection[nn.Module]
) -> bool:
    """Whether heads are divided: in all layers, or in none."""
    outcomes: set[bool] = set()
    for name in (name for name, module in modules.items() if module in attention):
        styles = {part.removeprefix(f"{name}."): style for part, style in linear.items() if part.startswith(f"{name}.")}
        if styles == _HEAD_STYLES and not any(True for _ in modules[name].parameters(recurse=False)):
            outcomes.add(True)
        elif set(styles.values()) <= {"colwise_gather_output", "rowwise_split_input"}:
            outcomes.add(False)
        else:
            raise _unsupported(kind, f"divides {name} as {styles}, beside what each of its heads has")
    if len(outcomes) != 1:
        raise _unsupported(kind, "divides the heads of some layers and not of others")
    return outcomes.pop()


def _check_heads(kind: str, model: PreTrainedModel, size: int, kv_heads: Sequence[int]) -> None:
    config = model.config.get_text_config()
    names = ("num_attention_heads", "num_key_value_heads")
    numbers = {name: n for name in names if (n := getattr(config, name, None)) is not None}
    numbers |= {f"number of KV heads in layer {layer}": heads for layer, heads in enumerate(kv_heads)}
    _check_divisible(kind, numbers, size)


def _check_linear(kind: str, name: str, module: nn.Module, style: str, size: int) -> None:
    plain = type(module) in (nn.Linear, WeightFirstLinear)
    if not plain or style not in ("colwise", *_ROWS, *_GATHERED):
        raise _unsupported(kind, f"divides {name} ({type(module).__name__}) as {style!r}")
    if style not in _GATHERED:
        width = module.out_features if style == "colwise" else module.in_features
        _check_divisible(kind, {f"width of {name}": int(width)}, size)  # type: ignore[arg-type]


def _check_experts(
    kind: str, name: str, module: nn.Module, styles: dict[str, str], size: int, checked: set[object]
) -> None:
    """Refuse experts whose shares do not add up to the whole: with biases, or with another order of weights.

    Modules of one shape compute the same: the first is tried.
    """
    if styles != _EXPERT_STYLES:
        raise _unsupported(kind, f"divides {name} as {styles}")
    gate_up, down = (module.get_parameter(param) for param in _EXPERT_STYLES)
    _check_divisible(kind, {f"width of {name}": int(down.shape[-1])}, size)
    if gate_up.is_meta or (shape := (type(module), gate_up.shape)) in checked:
        return
    checked.add(shape)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, down.shape[-2], generator=generator).to(down.dtype)
    last = down.shape[0] - 1
    index = torch.tensor([[0, last], [last, 0], [0, last], [last // 2, last]])
    arguments = (hidden, index, torch.rand(4, 2, generator=generator).to(down.dtype))
    with torch.inference_mode():
        whole = module(*arguments).float()
        shares = (_expert_shares(module, rank, size) for rank in range(size))
        parts = [torch.func.functional_call(module, share, arguments) for share in shares]
        difference = (torch.stack(parts).float().sum(0) - whole).abs().max()
    if not bool(difference <= _EXPERT_TOLERANCE * whole.abs().max()):
        raise _unsupported(kind, f"computes {name} otherwise than by the sum of its shares")


def _expert_shares(module: nn.Module, rank: int, size: int) -> dict[str, torch.Tensor]:
    """A share of the width of every expert: of the two halves `[E, 2 * I, H]`, and of what goes out `[E, H, I]`."""
    gate_up, down = (module.get_parameter(param) for param in _EXPERT_STYLES)
    share = down.shape[-1] // size
    halves: list[torch.Tensor] = [_share(half, 1, rank, share) for half in gate_up.chunk(2, dim=1)]
    return dict(zip(_EXPERT_STYLES, (torch.cat(halves, dim=1), _share(down, 2, rank, share)), strict=True))


def _shard_experts(module: nn.Module, group: RankGroup) -> None:
    for name, share in _expert_shares(module, group.rank, group.size).items():
        setattr(module, name, nn.Parameter(share, requires_grad=False))

    def add_up(_module: nn.Module, _arguments: object, out: torch.Tensor) -> torch.Tensor:
        group.all_reduce(out)
        return out

    module.register_forward_hook(add_up)


def _check_divisible(kind: str, numbers: dict[str, int], size: int) -> None:
    for what, number in numbers.items():
        if number % size:
            common = math.gcd(*numbers.values())
            fitting = " or ".join(str(n) for n in range(1, _MAX_ADVISED + 1) if common % n == 0)
            raise ConfigError(
                f"{kind} has a {what} of {number}, which {size} ranks cannot divide evenly; use tensor_parallel: "
                f"{fitting}"
            )


def _unsupported(kind: str, why: str) -> UnsupportedModelError:
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
