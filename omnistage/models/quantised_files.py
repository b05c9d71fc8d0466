"""Quantised checkpoints: safetensors in which quantised weights lie as integers or float8, with their scales.

`X.weight` becomes `X.weight.values` and `X.weight.scale`, for int4 also `X.weight.minimum`. Reading gives the
numbers that they stand for, and the stage's transform rounds these to the same values again. `quantisation.json` at the
top of the folder says which layers of which stage, so that the folder is served like any other.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from omnistage.config.quantize import RECIPE_FILE, QuantizeConfig
from omnistage.core.errors import CheckpointError
from omnistage.quantisation.numbers import pack, pack_turned, unpack
from omnistage.quantisation.schemes import MINIMUM, SCALE, VALUES, Scheme

_MARKED_ROWS = 16
_EXPERT = "expert"
"""In the names of weights of experts, which need not end in `weight`."""


class Mark(NamedTuple):
    """What tells a weight in a file from others. Names do not: a model's may be others than its checkpoint's."""

    dtype: torch.dtype
    """In which the model has it."""
    digest: bytes
    turned: bool = False
    """The file has columns where the model's products have rows."""

    @classmethod
    def of(cls, weight: torch.Tensor, dtype: torch.dtype) -> Mark:
        """Over the shape and some rows of it."""
        rows = weight.detach()[:: max(1, len(weight) // _MARKED_ROWS)].to(dtype).float().cpu().contiguous()
        return cls(dtype, hashlib.sha256(f"{list(weight.shape)}".encode() + rows.numpy().tobytes()).digest())


Marks = Mapping[str, Mapping[str, Sequence[Mark]]]
"""Of all linear layers and experts of the original, by stage and layer: of each tensor that may have the weights."""


def marks_of(weight: torch.Tensor) -> list[Mark]:
    """Of a linear layer's weight `[O, I]`, or of those of experts `[E, O, I]`.

    These lie in a file together, turned or not, or one by one, and then gates, the first half of the rows, are apart.
    """
    if weight.ndim == 2:
        return [Mark.of(weight, weight.dtype)]
    half = weight.shape[1] // 2
    parts = [each for expert in weight for each in (expert, expert[:half], expert[half:])]
    mark = Mark.of(weight.transpose(1, 2), weight.dtype)._replace(turned=True)
    return [mark, *(Mark.of(part, weight.dtype) for part in (weight, *parts) if part.numel())]


def weight_names(names: Iterable[str]) -> set[str]:
    """The weights that are quantised among the tensors of a file."""
    return {
        name.removesuffix(VALUES)
        for name in names
        if name.endswith(VALUES) and (name.endswith(f".weight{VALUES}") or _EXPERT in name)
    }


def join_quantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint with each quantised weight in one piece, in float32."""
    for name in weight_names(tensors):
        if f"{name}{SCALE}" not in tensors:
            raise CheckpointError(f"{name} has quantised values without a scale; fetch the checkpoint again")
        parts = [tensors.pop(f"{name}{end}", None) for end in (VALUES, SCALE, MINIMUM)]
        values, scale, minimum = (None if part is None else part[...] for part in parts)
        if values is not None and scale is not None:
            tensors[name] = unpack(values, scale, minimum)
    return tensors


def write_quantised(
    source: Path,
    target: Path,
    layers: Mapping[str, Iterable[str]],
    configs: Mapping[str, QuantizeConfig],
    marks: Marks,
    progress: Callable[[str, float], None],
) -> dict[str, list[str]]:
    """Copy a checkpoint with these layers, by stage, quantised; those that it has in full precision all the same.

    These are no tensors of their own there, like a head that is the embedding; they are quantised at each loading.
    """
    files = sorted(path for path in source.rglob("*") if path.is_file() and ".cache" not in path.parts)
    owners: dict[Mark, list[tuple[str, str]]] = {}
    for stage, names in marks.items():
        for layer, paths in names.items():
            for mark in paths:
                owners.setdefault(mark, []).append((stage, layer))
    targets = {(stage, layer) for stage, names in layers.items() for layer in names}
    missing = set(targets)
    schemes = {stage: config.method for stage, config in configs.items()}
    for number, path in enumerate(files):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        progress(f"writing {path.name}", number / len(files))
        if path.suffix == ".safetensors":
            missing -= _write_file(path, copy, targets, schemes, owners)
        elif path.name.endswith(".safetensors.index.json"):
            continue  # of the names that were; each file says what it holds
        elif path.suffix not in (".bin", ".pth", ".ckpt", ".gguf"):  # a family may keep voices in a .pt
            shutil.copyfile(path, copy)
    if missing == targets:
        stage, layer = sorted(targets)[0]
        raise CheckpointError(
            f"none of the {len(targets)} quantised layers is a tensor of its own in {source}, such as {layer} of "
            f"{stage}; this model can be quantised while it is loaded, with quantize, but not be written"
        )
    _write_indices(source, target)
    recipe = {"stages": {stage: _recipe(configs[stage], names) for stage, names in layers.items()}}
    (target / RECIPE_FILE).write_text(json.dumps(recipe, indent=1), encoding="utf-8")
    return {stage: [layer for layer in names if (stage, layer) in missing] for stage, names in layers.items()}


def _recipe(config: QuantizeConfig, layers: Iterable[str]) -> dict[str, object]:
    """Settings that choose just these layers, whatever the defaults become."""
    names = [f"^{name.replace('.', '[.]')}$" for name in layers]
    return {"scheme": config.scheme, "group_size": config.group_size, "only": names}


def _write_file(
    path: Path,
    copy: Path,
    targets: set[tuple[str, str]],
    schemes: Mapping[str, Scheme],
    owners: Mapping[Mark, list[tuple[str, str]]],
) -> set[tuple[str, str]]:
    """One file; the layers whose weights it has."""
    dtypes = {mark.dtype for mark in owners}
    written_layers: set[tuple[str, str]] = set()
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            own: list[tuple[str, str]] = []
            turned = False
            expert = _EXPERT in name and tensor.ndim in (2, 3)
            if ((name.endswith(".weight") and tensor.ndim == 2) or expert) and tensor.is_floating_point():
                marks = [Mark.of(tensor, dtype) for dtype in dtypes]
                alike = [owner for mark in marks for owner in owners.get(mark, ())]
                if not alike and tensor.ndim == 3:
                    alike = [owner for mark in marks for owner in owners.get(mark._replace(turned=True), ())]
                    turned = bool(alike)
                # One expert's weights are not called as the layer that has all of them.
                own = list(dict.fromkeys(alike)) if expert and _all_experts(alike) else _best_named(name, alike)
            # Where numbers and names leave it open which layer it is of, full precision is right for all of them.
            scheme = schemes[own[0][0]] if own and targets.issuperset(own) else None
            if scheme is None or (turned and not scheme.by_row):
                tensors[name] = tensor
                continue
            written_layers.update(own)
            for end, part in (pack_turned if turned else pack)(tensor, scheme).items():
                tensors[f"{name}{end}"] = part.contiguous()
    save_file(tensors, copy, metadata=metadata)
    shutil.copymode(path, copy)
    return written_layers


def _all_experts(owners: list[tuple[str, str]]) -> bool:
    return all(_EXPERT in layer.rpartition(".")[2] for _, layer in owners)


def _best_named(name: str, owners: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The layers whose names end most like that of their weight, and in the layer's own name at least."""

    def common(layer: str) -> int:
        count = 0
        for one, other in zip(reversed(name.split(".")[:-1]), reversed(layer.split(".")), strict=False):
            if one != other:
                break
            count += 1
        return count

    most = max((common(layer) for _, layer in owners), default=0)
    return [(stage, layer) for stage, layer in owners if most and common(layer) == most]


def _write_indices(source: Path, target: Path) -> None:
    """Indices of sharded parts, over the tensors that their files have now."""
    for index in source.rglob("*.safetensors.index.json"):
        folder = target / index.relative_to(source).parent
        weight_map: dict[str, str] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                weight_map |= dict.fromkeys(file.keys(), path.name)
        (folder / index.name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
