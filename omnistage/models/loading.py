"""Weights from a checkpoint folder into `transformers` modules, a stage at a time.

Only the tensors under a stage's prefix are read; they come memory-mapped from safetensors, so a stage's load touches
its own bytes once. `transformers` does the renaming between checkpoint and module names itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from omnistage.engines.ar.attention import ATTENTION_NAME
from omnistage.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

Model = TypeVar("Model", bound="PreTrainedModel")


class Checkpoint:
    """The safetensors of a model folder, sharded or not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of = self._read_index()

    def _read_index(self) -> dict[str, Path]:
        index = self.folder / _INDEX
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                files = {str(name): self.folder / str(file) for name, file in weight_map.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{_INDEX} in {self.folder} is not a weight index: {error!r}") from error
            for path in set(files.values()):
                # The file itself may be a link (the hub's cache is made of them); its place may not be elsewhere.
                if path.parent.resolve() != self.folder.resolve():
                    raise CheckpointError(f"{_INDEX} names a file outside its folder: {path.name}")
                if not path.is_file():
                    raise CheckpointError(f"shard {path.name} is missing in {self.folder}; fetch the model again")
            return files
        single = self.folder / _SINGLE
        if single.is_file():
            with _open(single) as shard:
                return dict.fromkeys(shard.keys(), single)
        if any(self.folder.glob("*.bin")):
            raise CheckpointError(f"{self.folder} has only pickled weights; convert them to safetensors first")
        raise CheckpointError(f"no {_SINGLE} or {_INDEX} in {self.folder}")

    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    def tensors(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """Tensors whose name starts with `prefix`, by the rest of their name."""
        wanted: dict[Path, list[str]] = {}
        for name, path in self._file_of.items():
            if name.startswith(prefix):
                wanted.setdefault(path, []).append(name)
        if not wanted:
            raise CheckpointError(f"{self.folder} has no weights named {prefix}*; is it the right model?")
        found: dict[str, torch.Tensor] = {}
        for path, names in sorted(wanted.items()):
            with _open(path) as shard:
                for name in names:
                    found[name[len(prefix) :]] = _read(shard, name, path)
        return found

    def rows(self, names: Sequence[str], indices: Sequence[int]) -> torch.Tensor:
        """Rows `indices` of the matrix called by the first of `names` that exists, without reading the rest."""
        for name in names:
            path = self._file_of.get(name)
            if path is None:
                continue
            with _open(path) as shard:
                matrix = _slice(shard, name, path)
                if max(indices) >= matrix.get_shape()[0]:
                    raise CheckpointError(f"{name} has {matrix.get_shape()[0]} rows; row {max(indices)} is needed")
                return torch.cat([matrix[i : i + 1] for i in indices])
        raise CheckpointError(f"{self.folder} has none of {', '.join(names)}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} is not a readable safetensors file: {error}") from error


def _read(shard: Any, name: str, path: Path) -> torch.Tensor:
    try:
        tensor: torch.Tensor = shard.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} does not hold {name}, though the index says so: {error}") from error
    return tensor


def _slice(shard: Any, name: str, path: Path) -> Any:
    try:
        return shard.get_slice(name)
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} does not hold {name}, though the index says so: {error}") from error


def load_model(
    cls: type[Model],
    config: PreTrainedConfig,
    tensors: dict[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    *,
    attention: str = "sdpa",
) -> Model:
    """A `transformers` model with these weights, ready for inference. Missing and wrongly shaped ones are an error."""
    model, info = cls.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=dtype,
        attn_implementation=attention,
        ignore_mismatched_sizes=True,  # so that we can name them
        output_loading_info=True,
    )
    check_complete(cls.__name__, info)
    loaded: Model = freeze(model)
    loaded.to(device)
    return loaded


def check_complete(name: str, info: Mapping[str, Any]) -> None:
    """Raise for weights that `from_pretrained` (with `output_loading_info`) would rather have made up."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(f"{len(missing)} weights of {name} are missing, first {missing[0]}")
    for key, found, expected in sorted(info["mismatched_keys"]):
        raise CheckpointError(f"{key} of {name} has shape {list(found)} in the checkpoint, not {list(expected)}")


def freeze(model: Model) -> Model:
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def use_paged_attention(decoder: PreTrainedModel) -> None:
    """Make a decoder attend through our pool: the public attention registry, nothing patched."""
    decoder.set_attn_implementation(ATTENTION_NAME)


def kv_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """(layers, kv heads, head dim) of a text config."""
    if not getattr(config, "num_attention_heads", None):
        raise UnsupportedModelError(f"{type(config).__name__} names no attention heads; only transformers are served")
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return int(config.num_hidden_layers), kv_heads, head_dim


def end_token_ids(*configs: object) -> tuple[int, ...]:
    """`eos_token_id` of the first config that has one, as a tuple."""
    for config in configs:
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            return tuple(int(v) for v in value) if isinstance(value, (list, tuple)) else (int(value),)
    return ()


def module_device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
