"""Weights of mixtures of experts, which published checkpoints have one by one and `transformers` in one tensor a layer.

`transformers` puts them together itself for whole models that it knows; a stage that loads a part of one does it here.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import torch

from omnistage.core.errors import CheckpointError
from omnistage.core.family import LoadContext
from omnistage.models.loading import read_weights, straight_to

_READERS = 4
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def fused_weights(context: LoadContext, prefix: str) -> dict[str, torch.Tensor]:
    """A stage's tensors, with all experts of a layer in one, as `transformers` has them."""
    tensors = read_weights(context, prefix)
    experts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name in list(tensors):
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensors.pop(name)
    # Without accelerate the model is loaded on the host and moved.
    device = context.device if straight_to(context.device) else torch.device("cpu")
    with ThreadPoolExecutor(_READERS, "experts") as pool:
        # To a GPU one thread reads while others copy; on the host each would start an OpenMP team of its own.
        each = map if device.type == "cpu" else pool.map
        for fused in each(lambda name: _fused(name, experts[name], context.dtype, device), experts):
            tensors.update(fused)
    return tensors


def _fused(
    name: str, parts: dict[tuple[int, str], torch.Tensor], dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """The experts of one layer, put together where they will be: beside them there is one expert at a time."""
    count = 1 + max(number for number, _ in parts)
    fused: dict[str, torch.Tensor] = {}
    for target, names in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        try:
            shapes = {parts[number, part].shape for number in range(count) for part in names}
            if len(shapes) != 1:
                raise CheckpointError(f"the experts of {name} have different shapes; fetch the weights again")
            height, width = shapes.pop()
            whole = torch.empty(count, len(names) * height, width, dtype=dtype, device=device)
            for number in range(count):
                for half, part in enumerate(names):
                    whole[number, half * height : (half + 1) * height] = parts.pop((number, part))[...]
        except KeyError as error:
            raise CheckpointError(f"{name} has no weight of expert {error}; fetch the weights again") from error
        fused[f"{name}.{target}"] = whole
    return fused
