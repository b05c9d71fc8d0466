"""Weights from a checkpoint folder into `transformers` modules, a stage at a time.

Only the tensors under a stage's prefix are read; they come memory-mapped from safetensors, so a stage's load touches
its own bytes once. `transformers` does the renaming between checkpoint and module names itself.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from omnistage.core.checkpoint import read_json
from omnistage.core.errors import CheckpointError, UnsupportedModelError
from omnistage.core.family import LoadContext
from omnistage.engines.ar.attention import ATTENTION_NAME
from omnistage.engines.quantisation.transform import current_quantiser
from omnistage.hf import transformers
from omnistage.models.prequantised import check_quantisation
from omnistage.models.quantised_files import join_quantised, weight_names
from omnistage.models.stored import DTYPES, stored_entries, stored_tensor

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

_REPEATS = re.compile(r"(^|_)(layers?|depth|blocks)$|^scale$")
"""Settings by which a config has modules repeated."""
_MANY_REPEATS = 1024
"""More than any model has, and few enough to be built quickly without weights."""
_SMALL_BUFFERS = 2**24
"""Elements of computed tables (rotary angles, masks) that no checkpoint holds and every machine has room for."""

_T = TypeVar("_T")
Model = TypeVar("Model", bound="PreTrainedModel")
Network = TypeVar("Network", bound=nn.Module)


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
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
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

    def tensors(self, prefix: str = "", device: torch.device | None = None) -> dict[str, torch.Tensor]:
        """Tensors whose name starts with `prefix`, by the rest of their name: memory-mapped.

        With `device` they are `StoredTensor`s, which are read straight there when `transformers` indexes them.
        """
        by_file = self._names_by_file(prefix)
        if not by_file:
            raise CheckpointError(f"{self.folder} has no weights named {prefix}*; check that it is the right model")
        tensors: dict[str, torch.Tensor] = {}
        for path, names in sorted(by_file.items()):
            with _open(path) as shard:
                entries = {} if device is None else stored_entries(path)
                for name in names:
                    entry = entries.get(name)
                    if device is None or entry is None or entry.dtype not in DTYPES:
                        tensor = _checked(name, path, shard.get_tensor)
                    else:
                        tensor = stored_tensor(path, entry, device)
                    tensors[name[len(prefix) :]] = tensor
        return join_quantised(tensors)

    @property
    def is_quantised(self) -> bool:
        """Whether weights lie in it as `omnistage quantize` writes them."""
        return bool(weight_names(self._file_of))

    def num_elements(self) -> int:
        """Numbers in all tensors together, by the headers of the files alone."""
        total = 0
        for path, names in self._names_by_file().items():
            with _open(path) as shard:
                total += sum(math.prod(_checked(name, path, shard.get_slice).get_shape()) for name in names)
        return total

    def _names_by_file(self, prefix: str = "") -> dict[Path, list[str]]:
        by_file: dict[Path, list[str]] = {}
        for name, path in self._file_of.items():
            if name.startswith(prefix):
                by_file.setdefault(path, []).append(name)
        return by_file

    def rows(self, names: Sequence[str], indices: Sequence[int]) -> torch.Tensor:
        """Rows `indices` of the matrix called by the first of `names` that exists, without reading the rest."""
        for name in names:
            path = self._file_of.get(name)
            if path is None:
                continue
            with _open(path) as shard:
                matrix = _checked(name, path, shard.get_slice)
                if max(indices) >= matrix.get_shape()[0]:
                    raise CheckpointError(f"{name} has {matrix.get_shape()[0]} rows; row {max(indices)} is needed")
                return torch.cat([matrix[i : i + 1] for i in indices])
        raise CheckpointError(f"{self.folder} has none of {', '.join(names)}")


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} is not a readable safetensors file: {error}") from error


def _checked(name: str, path: Path, read: Callable[[str], _T]) -> _T:
    try:
        return read(name)
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} does not hold {name}, though the index says so: {error}") from error


def read_weights(context: LoadContext, prefix: str = "", part: str = "") -> dict[str, torch.Tensor]:
    """A stage's tensors, of the folder `part` of its model; none for a model without data."""
    if context.device.type == "meta":
        return {}
    device = context.device if straight_to(context.device) else None
    return Checkpoint(context.model.folder / part).tensors(prefix, device)


def straight_to(device: torch.device) -> dict[str, Any]:
    """Options of `from_pretrained` by which weights go from their mapped files to a GPU, a few at a time.

    Without accelerate, which both libraries need for it, for the CPU and where weights are quantised on their way there
    are none: the caller moves the model.
    """
    if device.type == "cpu" or importlib.util.find_spec("accelerate") is None or current_quantiser() is not None:
        return {}
    return {"device_map": {"": device}}


def load_model(
    cls: type[Model],
    config: PreTrainedConfig,
    tensors: dict[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    *,
    attention: str | None = "sdpa",
    unused: str | None = None,
) -> Model:
    """A `transformers` model with these weights, ready for inference. Missing and wrongly shaped ones are an error.

    `attention` is transformers' own choice where it is None; weights whose names begin with `unused` may be missing.
    On the meta device it has shapes alone, and `tensors` are not looked at.
    """
    check_quantisation(config)
    settings = config.to_dict()
    check_repeats(settings, len(tensors))
    key = cls.__name__, json.dumps(settings, sort_keys=True, default=str)
    outline = _outlines.get(key)
    if outline is None or device.type == "meta":
        with torch.device("meta"):
            skeleton = cls(config)
        outline = _outlines[key] = _Outline.of(skeleton)
        if device.type == "meta":
            if attention is not None:
                skeleton.set_attn_implementation(attention)
            skeleton.to(dtype)
            planned: Model = freeze(skeleton)
            return planned
    outline.check_size(sum(tensor.numel() for tensor in tensors.values()))
    outline.check_shapes(tensors)
    model, info = cls.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=dtype,
        attn_implementation=attention,
        ignore_mismatched_sizes=True,  # so that we can name them
        output_loading_info=True,
        **straight_to(device),
    )
    if unused is not None:
        info = {**info, "missing_keys": [key for key in info["missing_keys"] if not key.startswith(unused)]}
    check_complete(cls.__name__, info)
    loaded: Model = freeze(model)
    return on_device(loaded, device)


def on_device(model: Network, device: torch.device) -> Network:
    """The model there, with all of its weights, quantised where the stage says so."""
    quantiser = current_quantiser()
    if quantiser is not None:
        quantiser.apply(model, device)
    model.to(device)
    if device.type == "cuda":  # pragma: no cover  (needs CUDA)
        # The last weights may still be on their way; stages compute on streams that do not wait for this one.
        torch.cuda.current_stream(device).synchronize()
    return model


def check_repeats(config: Mapping[str, object], num_tensors: int, where: str = "config.json") -> None:
    """Refuse a config that asks for far more layers than there are weights, before one of them is made."""
    for key, value in nested_settings(config):
        if _REPEATS.search(key) and isinstance(value, int) and value > max(num_tensors, _MANY_REPEATS):
            raise CheckpointError(f"{where} asks for {key}={value}, but the checkpoint has {num_tensors} tensors")


def nested_settings(tree: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Every setting of a config and of those inside it, by its own name."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from nested_settings(value)
        else:
            yield str(key), value


def check_size(skeleton: nn.Module, num_elements: int, whose: str = "") -> None:
    """Refuse a model, built without weights, that is far larger than its checkpoint: it would take all memory."""
    _Outline.of(skeleton).check_size(num_elements, whose)


@dataclass(frozen=True, slots=True)
class _Outline:
    """The sizes of a model, to compare with a checkpoint before anything is allocated."""

    name: str
    shapes: Mapping[str, torch.Size]
    parameters: int
    buffers: int

    @classmethod
    def of(cls, skeleton: nn.Module) -> _Outline:
        return cls(
            type(skeleton).__name__,
            {name: tensor.shape for name, tensor in skeleton.state_dict().items()},
            sum(parameter.numel() for parameter in skeleton.parameters()),
            sum(buffer.numel() for buffer in skeleton.buffers()),
        )

    def check_size(self, num_elements: int, whose: str = "") -> None:
        if self.parameters > 2 * num_elements or self.buffers > 2 * num_elements + _SMALL_BUFFERS:
            raise CheckpointError(
                f"{whose}config.json describes a {self.name} of {self.parameters + self.buffers:,} numbers, but the "
                f"checkpoint has {num_elements:,}; its sizes or sections are wrong, fetch the model again"
            )

    def check_shapes(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compare the shapes that can be compared.

        `transformers` renames some modules while it loads, and only it knows how. A tensor that is not there by its
        name is compared where just one ends alike, which the embedding does; `check_complete` checks the rest.
        """
        endings: dict[str, list[torch.Tensor]] = {}
        for name, tensor in tensors.items():
            endings.setdefault(_ending(name), []).append(tensor)
        alike = Counter(map(_ending, self.shapes))
        for name, shape in self.shapes.items():
            stored = tensors.get(name)
            if stored is None and alike[_ending(name)] == len(endings.get(_ending(name), ())) == 1:
                stored = endings[_ending(name)][0]
            if stored is not None and stored.shape != shape:
                raise _wrong_shape(name, self.name, stored.shape, shape)


_outlines: dict[tuple[str, str], _Outline] = {}
"""By class and config: the memory plan has built the same model a moment before."""


def _ending(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _wrong_shape(key: str, model: str, shape: Sequence[int], expected: Sequence[int]) -> CheckpointError:
    return CheckpointError(f"{key} of {model} has shape {list(shape)} in the checkpoint, not {list(expected)}")


def check_complete(name: str, info: Mapping[str, Any]) -> None:
    """Raise for weights that `from_pretrained` (with `output_loading_info`) would initialise at random."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{len(missing)} weights of {name} are missing, first {missing[0]}; the checkpoint is incomplete or of "
            "another model than its config.json names: fetch it again"
        )
    for key, shape, expected in sorted(info["mismatched_keys"]):
        raise _wrong_shape(key, name, shape, expected)


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
    if not _is_stated(config, "num_attention_heads"):
        raise UnsupportedModelError(
            f"{type(config).__name__} names no attention heads for all of its layers, as the paged engine needs it"
        )
    heads = positive(config, "num_attention_heads")
    grouped = _is_stated(config, "num_key_value_heads")
    kv_heads = positive(config, "num_key_value_heads") if grouped else heads
    head_dim = (
        positive(config, "head_dim") if _is_stated(config, "head_dim") else positive(config, "hidden_size") // heads
    )
    return positive(config, "num_hidden_layers"), kv_heads, head_dim


def _is_stated(config: PreTrainedConfig, name: str) -> bool:
    try:
        return getattr(config, name, None) is not None
    except RuntimeError:  # it differs from layer to layer, and transformers lets nobody read one for all
        return False


def positive(config: PreTrainedConfig, name: str) -> int:
    """A setting of a config that must be a whole number of at least 1."""
    value = getattr(config, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json has {name}={value!r}; it must be a whole number of at least 1")
    return value


def check_sizes(config: PreTrainedConfig) -> None:
    """Refuse a config whose language model has sizes below 1, by their names."""
    try:
        config = config.get_text_config()
    except ValueError:  # it has several language models
        return
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "num_hidden_layers"):
        if _is_stated(config, name) and isinstance(getattr(config, name), int):
            positive(config, name)


_LENGTHS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "max_target_positions", "context_length")
_UNBOUNDED_LENGTH = 2**17
"""Of models that name none, as recurrent ones and those with relative positions (ALiBi)."""


def max_sequence_length(config: PreTrainedConfig) -> int:
    """Positions that the model can serve without one request changing another's rotary embedding."""
    lengths = (getattr(config, name, None) for name in _LENGTHS)
    max_length = next((value for value in lengths if isinstance(value, int) and value > 0), _UNBOUNDED_LENGTH)
    rope = getattr(config, "rope_parameters", None) or {}
    # longrope changes all frequencies once any position of the batch passes the original length, dynamic likewise.
    for settings in (rope, *(value for value in rope.values() if isinstance(value, dict))):  # by the kind of layer
        if settings.get("rope_type") in ("longrope", "dynamic"):
            max_length = min(max_length, int(settings.get("original_max_position_embeddings") or max_length))
    return max_length


def read_auto_config(folder: Path) -> PreTrainedConfig:
    """The config of a folder by its `model_type`. Code in the folder is never run."""
    kind = read_json(folder / "config.json").get("model_type")
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
            raise UnsupportedModelError(
                f"transformers {transformers.__version__} does not know the model_type {kind!r} of {folder}, and code "
                "in a checkpoint is not run"
            ) from error
        raise CheckpointError(f"config.json in {folder} cannot be used: {error}") from error


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """generation_config.json, where there is one."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    read_json(path)  # names the error in the text, which `transformers` does not
    try:
        config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error
    end_token_ids(config)
    return config


def end_token_ids(*configs: object) -> tuple[int, ...]:
    """`eos_token_id` of the first config that has one, as a tuple."""
    for config in configs:
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
            if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
                raise CheckpointError(f"the checkpoint's eos_token_id is {value!r}; it must be one or more token ids")
            return ids
    return ()
