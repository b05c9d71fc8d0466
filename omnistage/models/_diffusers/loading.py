"""Parts of a diffusers checkpoint, one at a time: a stage loads the ones it needs and stands in for the rest.

Class names come from model_index.json, but only classes that diffusers and transformers export are ever looked up;
weights are safetensors, code in a checkpoint is never run.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from omnistage.core.checkpoint import read_json
from omnistage.core.errors import CheckpointError, MissingDependencyError
from omnistage.core.family import LoadContext
from omnistage.hf import transformers
from omnistage.models.loading import check_repeats, check_size, nested_settings, on_device, straight_to
from omnistage.models.quantised_files import join_quantised, weight_names

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin
    from transformers import PreTrainedModel

_T = TypeVar("_T")
INDEX = "model_index.json"
_LIBRARIES = ("diffusers", "transformers")
_ESSENTIAL = frozenset({"vae", "transformer", "unet", "scheduler", "text_encoder", "tokenizer"})
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def diffusers() -> ModuleType:
    """The diffusers package. Raises `MissingDependencyError` where it is not installed."""
    try:
        # Tables that are made on import must have values, even if it happens while a stand-in is made.
        with torch.device("cpu"):
            import diffusers as package
            import diffusers.hooks
    except ImportError as error:
        raise MissingDependencyError("diffusers is needed for pictures: pip install 'omnistage[diffusion]'") from error
    # Its pipelines print the prompts that they shorten; what users write stays out of logs.
    logging.getLogger("diffusers.pipelines").setLevel(logging.ERROR)
    module: ModuleType = package
    return module


class Parts:
    """The components of a diffusers checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / INDEX).is_file():
            raise CheckpointError(f"{folder} has no {INDEX}, so it is not a diffusers model")
        self.index = read_json(folder / INDEX)

    @property
    def pipeline_class(self) -> str:
        return str(self.index.get("_class_name"))

    def has(self, name: str) -> bool:
        """Whether the index names this part at all; optional ones are null."""
        entry = self.index.get(name)
        return isinstance(entry, list) and len(entry) == 2 and entry[0] is not None

    def part_class(self, name: str) -> Any:
        """The class of a part, one that diffusers or transformers exports."""
        entry = self.index.get(name)
        if not self.has(name) or not isinstance(entry, list):
            raise CheckpointError(f"{INDEX} in {self.folder} names no {name}; the checkpoint is incomplete")
        library, cls = entry
        if (own := class_of_pipeline(library, cls)) is not None:
            return own
        if library not in _LIBRARIES or not isinstance(cls, str) or cls.startswith("_"):
            raise CheckpointError(
                f"{INDEX} in {self.folder} names {library}.{cls} for {name}; only classes of "
                f"{' and '.join(_LIBRARIES)} are loaded, code in a checkpoint is not run"
            )
        package = diffusers() if library == "diffusers" else transformers
        value = getattr(package, cls, None)
        if not isinstance(value, type) or not hasattr(value, "from_pretrained"):
            raise CheckpointError(f"{library} {package.__version__} has no {cls}, which {name} of {self.folder} needs")
        if issubclass(value, diffusers().DiffusionPipeline):
            # It would read another index, which was not checked.
            raise CheckpointError(f"{INDEX} in {self.folder} names a whole pipeline for {name}, {cls}; not supported")
        return value

    def folder_of(self, name: str) -> Path:
        path = self.folder / name
        if not path.is_dir():
            raise CheckpointError(f"{self.folder} has no folder {name}; the checkpoint is incomplete, fetch it again")
        return path

    def load(self, name: str) -> Any:
        """A part without weights: a tokenizer, a processor, a scheduler."""
        cls, folder = self.part_class(name), self.folder_of(name)
        if issubclass(cls, nn.Module):
            raise CheckpointError(
                f"{INDEX} in {self.folder} names {cls.__name__} for {name}, which is a network; it must not be one"
            )
        options = {"local_files_only": True} | ({"trust_remote_code": False} if _is_transformers(cls) else {})
        return _guarded(folder, lambda: cls.from_pretrained(folder, **options))

    def load_model(self, name: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """A part with weights, for inference."""
        cls, folder = self.part_class(name), self.folder_of(name)
        if not issubclass(cls, nn.Module):
            raise CheckpointError(
                f"{INDEX} in {self.folder} names {cls.__name__} for {name}, which is not a network; it must be one"
            )
        if device.type == "meta":
            check_config(folder)
            # Not diffusers' own `to`, which warns of modules that should stay float32.
            skeleton: nn.Module = nn.Module.to(self._skeleton(cls, folder), dtype=dtype)
            return skeleton.eval().requires_grad_(False)
        check_weights(folder)
        self._check_sizes(name, cls, folder)
        options: dict[str, object] = {"local_files_only": True, "use_safetensors": True}
        options |= {"dtype": dtype, **straight_to(device)}
        if not _is_transformers(cls):
            options["low_cpu_mem_usage"] = True  # missing weights are then an error, not noise
        if (tensors := _quantised_tensors(folder)) is not None:
            return on_device(self._filled(cls, folder, tensors, dtype), device)
        model, info = _loaded_with_info(cls, folder, options)
        missing = sorted(info.get("missing_keys", ())) if info else []
        if missing:
            raise CheckpointError(f"{len(missing)} weights of {name} are missing in {folder}, first {missing[0]}")
        model.eval()
        model.requires_grad_(False)
        return on_device(model, device)

    def _filled(self, cls: Any, folder: Path, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> nn.Module:
        """A part of a quantised checkpoint; every weight must be there."""
        if _is_transformers(cls):
            raise CheckpointError(f"{folder} is a quantised {cls.__name__}, only transformers are")
        model: nn.Module = _guarded(folder, lambda: cls.from_config(cls.load_config(folder, local_files_only=True)))
        _guarded(folder, lambda: model.load_state_dict(dict(tensors)))
        return nn.Module.to(model, dtype=dtype).eval().requires_grad_(False)

    def stand_in(self, name: str) -> ModelMixin:
        """A part's module with its config and no weights: pipelines read sizes from it."""
        cls, folder = self.part_class(name), self.folder_of(name)
        if not issubclass(cls, diffusers().ModelMixin):
            raise CheckpointError(
                f"{INDEX} in {self.folder} names {cls.__name__} for {name}, which is not a model of diffusers"
            )
        check_config(folder)
        return self._skeleton(cls, folder)

    def _skeleton(self, cls: Any, folder: Path) -> Any:
        def build() -> Any:
            if _is_transformers(cls):
                return cls(cls.config_class.from_pretrained(folder, local_files_only=True))
            return cls.from_config(cls.load_config(folder, local_files_only=True))

        with torch.device("meta"):
            return _guarded(folder, build)

    def _check_sizes(self, name: str, cls: type[nn.Module], folder: Path) -> None:
        """Refuse a configuration that its weights cannot fill, before memory is taken for it."""
        check_config(folder)
        # transformers makes its models without memory; diffusers allocates each parameter, if only for a moment.
        if issubclass(cls, diffusers().ModelMixin):
            check_size(self._skeleton(cls, folder), sum(math.prod(shape) for shape in _shapes(folder)), f"{name}'s ")

    def _check_essential(self, names: Collection[str]) -> None:
        """Raise for a part that no pipeline works without; text encoders and such may be left out of a checkpoint."""
        for name in names:
            # A pipeline of two experts may have only the second.
            if name in _ESSENTIAL and not self.has(name) and not (name == "transformer" and self.has("transformer_2")):
                raise CheckpointError(f"{INDEX} in {self.folder} names no {name}; the checkpoint is incomplete")

    def pipeline(
        self,
        context: LoadContext,
        name: str,
        models: Collection[str],
        others: Collection[str] = (),
        stand_ins: Collection[str] = (),
        *,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> DiffusionPipeline:
        """The diffusers pipeline `name` with only these parts in it; every other one that it has a place for is None.

        `models` are loaded with weights, `others` (tokenizers, processors, the scheduler) without, `stand_ins` on
        no device. Its helpers that take a `device` can be used; its `__call__` cannot.
        """
        pipeline_class = getattr(diffusers(), name)
        parts: dict[str, object] = {}
        self._check_essential((*models, *others, *stand_ins))
        present = [part for part in (*models, *others, *stand_ins) if self.has(part)]
        for index, part in enumerate(present):
            if context.progress is not None:
                context.progress(part, index / max(len(present), 1))
            if part in models:
                dtype = (dtypes or {}).get(part, context.dtype)
                parts[part] = self.load_model(part, context.device, dtype)
            else:
                parts[part] = self.load(part) if part in others else self.stand_in(part)
        components = dict.fromkeys(_places(pipeline_class)) | parts
        parameters = inspect.signature(pipeline_class.__init__).parameters
        # Settings (`boundary_ratio`, `is_distilled`) stand in the index beside the parts, which are pairs of names.
        extra = {k: v for k, v in self.index.items() if k in parameters and not _is_part(v) and v is not None}
        pipe: DiffusionPipeline = pipeline_class(**(components | extra))
        return pipe


def _places(pipeline_class: type[DiffusionPipeline]) -> list[str]:
    """The components that a pipeline class takes."""
    parameters = list(inspect.signature(pipeline_class.__init__).parameters.values())[1:]
    # What has a default that is not None is a setting (`is_distilled`, `text_encoder_out_layers`), not a part.
    return [p.name for p in parameters if p.default is p.empty or p.default is None]


def _is_part(entry: object) -> bool:
    """Whether an entry of the index is [library, class], or [null, null] for a part that the checkpoint lacks."""
    return isinstance(entry, list) and len(entry) == 2 and all(name is None or isinstance(name, str) for name in entry)


def check_weights(folder: Path) -> None:
    """Refuse a part without safetensors, saying which kind of wrong it is."""
    for index in folder.glob("*.index.json"):
        _check_index(index)
    if any(folder.glob("*.safetensors")):
        return
    if any(path for pattern in _PICKLED for path in folder.glob(pattern)):
        raise CheckpointError(
            f"{folder} has only pickled weights, which are not loaded; convert them to safetensors first"
        )
    raise CheckpointError(f"{folder} has no safetensors weights; the checkpoint is incomplete, fetch it again")


def _check_index(path: Path) -> None:
    """Refuse an index of shards that names anything but safetensors beside it: both libraries would read it."""
    if ".safetensors.index" not in path.name:
        return  # that of pickled weights, which is not read
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map; fetch it again")
    for file in sorted({str(file) for file in weight_map.values()}):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path} names {file!r}, which is not a safetensors file in its folder; refused")
        if not (path.parent / file).is_file():
            raise CheckpointError(f"shard {file} is missing in {path.parent}; fetch the model again")


def check_config(folder: Path) -> None:
    """Refuse a part's configuration that would fetch code, or build far more layers than it has weights for."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; the checkpoint is incomplete, fetch it again")
    config = read_json(folder / "config.json")
    for key, value in nested_settings(config):
        # transformers takes such a name for compiled code on the hub.
        if key in ("attn_implementation", "_attn_implementation") and isinstance(value, str) and "/" in value:
            raise CheckpointError(f"{folder} asks for the kernel {value!r}; code is not fetched, remove {key}")
    check_repeats(config, len(_shapes(folder)), str(folder / "config.json"))


def _shapes(folder: Path) -> list[Sequence[int]]:
    """The shapes of all weights of a part, from the heads of its files."""
    shapes: list[Sequence[int]] = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                shapes += [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file ({error}); fetch it again") from error
    return shapes


def class_of_pipeline(library: object, cls: object) -> type | None:
    """A class that is part of one pipeline's own module in diffusers, like Stable Diffusion's safety checker."""
    is_library = isinstance(library, str) and library.isidentifier() and library not in _LIBRARIES
    module = getattr(diffusers().pipelines, str(library), None) if is_library else None
    if not inspect.ismodule(module) or not module.__name__.startswith("diffusers.pipelines."):
        return None
    value = getattr(module, cls, None) if isinstance(cls, str) and not cls.startswith("_") else None
    return value if isinstance(value, type) and hasattr(value, "from_pretrained") else None


def _quantised_tensors(folder: Path) -> dict[str, torch.Tensor] | None:
    """All tensors of a part as `omnistage quantize` writes it; None for other parts."""
    tensors: dict[str, torch.Tensor] = {}
    names: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    if not weight_names(names):
        return None
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return join_quantised(tensors)


def _is_transformers(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "transformers" or issubclass(cls, transformers.PreTrainedModel)


def _loaded_with_info(
    cls: type[PreTrainedModel | ModelMixin], folder: Path, options: Mapping[str, object]
) -> tuple[nn.Module, Mapping[str, Sequence[str]]]:
    result = _guarded(folder, lambda: cls.from_pretrained(folder, output_loading_info=True, **options))
    return result if isinstance(result, tuple) else (result, {})


def _guarded(folder: Path, load: Callable[[], _T]) -> _T:
    try:
        return load()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{folder} cannot be loaded; the checkpoint is damaged or not supported ({type(error).__name__}: {reason})"
        ) from error


def load_encoder_pipeline(
    context: LoadContext,
    name: str,
    models: Collection[str],
    others: Collection[str],
    stand_ins: Collection[str] = ("transformer",),
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> DiffusionPipeline:
    """The pipeline of an encoding stage: its VAE has no decoder, which is the decoding stage's."""
    pipe = Parts(context.model.folder).pipeline(context, name, models, others, stand_ins, dtypes=dtypes)
    pipe.vae.decoder = nn.Identity()  # None would not do: some VAEs count its convolutions
    return pipe
