"""Finds a model's folder, reads its config.json, and detects its family."""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from omnistage.config import gguf
from omnistage.config.schema import OmniConfig
from omnistage.core.bundle import SEPARATE_DISTRIBUTIONS, bundles, find_bundle
from omnistage.core.checkpoint import Checkpoint, read_json
from omnistage.core.errors import CheckpointError, RegistryError, UnsupportedModelError
from omnistage.core.family import Family
from omnistage.core.registry import Registry
from omnistage.core.validation import short_repr

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WEIGHTS = "*.safetensors"
_DOWNLOAD = ("*.json", _WEIGHTS, "*.txt", "*.model", "*.jinja", "*.tiktoken", "spk_dict.pt")
"""Files to download: no code, and no pickles except the table of voices."""
_HOW_TO_DOWNLOAD = "`omnistage pull starter` fetches a small model, `hf download OWNER/NAME` one from the hub"
_SHOWN_PATH = 300
_MODEL_CONFIG = "config.json"
_PIPELINE_INDEX = "model_index.json"
ANY_PIPELINE = "*Pipeline"
"""Claimed by the family that serves the diffusers pipelines of no other family."""
_SENTENCE_MODULES = "modules.json"
SENTENCE_TRANSFORMER = "SentenceTransformer"
"""What a checkpoint in the layout of sentence-transformers is, before the network inside it."""
_TASKS = {"*ForSequenceClassification": ("SEQUENCE_CLASSIFICATION",), "*ForCTC": ("CTC", "RNNT", "TDT")}
"""Classes that a family may claim together: those of these mappings of transformers' auto classes."""
_TEXT_MODELS = ("TEXT_ENCODING", "MASKED_LM", "CAUSAL_LM")
ANY_TEXT_MODEL = "*Model"
"""Claimed by the family that serves text models without a head, such as BertModel."""
ANY_MULTIMODAL = "*MultimodalLM"
"""Claimed by the family that serves the vision- and audio-language models of no other family."""


@dataclass(frozen=True, slots=True)
class OmniModelConfig(Checkpoint):
    """A checkpoint on disk and how it is to be served."""

    config: OmniConfig


def find_model(
    model: str,
    registry: Registry,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    allow_download: bool = False,
    weights: bool = True,
) -> Path:
    """The folder of a model that is a path, a bundle's name or a name on the hub; without `weights` its small files do.

    The network is used only with `allow_download`, and never for a bundle: `omnistage pull` fetches those.
    """
    try:
        path = Path(model).expanduser()
        is_folder = path.is_dir()
        single = gguf.gguf_in(path) if is_folder else path if path.suffix == gguf.SUFFIX and path.is_file() else None
        if single is None and is_folder and _is_model(path):
            return path.resolve()
        is_file = not is_folder and path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such home, half of a surrogate pair
        raise CheckpointError(f"{short_repr(model)} is not a usable path; check it", param="model") from error
    if single is not None:
        return gguf.converted(single)
    if is_file:
        raise CheckpointError(
            f"{model} is a file; give the folder that holds config.json, or a GGUF file", param="model"
        )
    # A folder that happens to have a bundle's name, such as `starter` of a clone, does not hide the bundle.
    if (bundle := find_bundle(model, registry.families().values())) is not None:
        return bundle.locate()
    if is_folder:
        return path.resolve()
    if not _HUB_NAME.fullmatch(model):
        text = f"there is no folder {_display_path(model)}"
        raise CheckpointError(f"{text}; {_suggestion(model, registry) or 'check the path'}", param="model")
    files = _DOWNLOAD if weights else tuple(pattern for pattern in _DOWNLOAD if pattern != _WEIGHTS)
    try:
        return _find_on_hub(model, revision, cache_dir, allow_download, files)
    except _NotInCacheError as error:
        how = f"`hf download {model}` fetches it from the hub" if "/" in model else _HOW_TO_DOWNLOAD
        advice = " ".join(filter(None, (_suggestion(model, registry), how)))
        text = f"{model!r} is neither a folder nor in the local hub cache"
        raise CheckpointError(f"{text}; {advice}", param="model") from error


def _suggestion(model: str, registry: Registry) -> str:
    """A bundle or a folder with almost this name, as a question."""
    names = {*bundles(registry.families().values()), *SEPARATE_DISTRIBUTIONS}
    parent = Path(model).expanduser().parent
    with contextlib.suppress(OSError):
        names |= {str(parent / path.name) for path in parent.iterdir() if _is_model(path)}
    close = difflib.get_close_matches(str(Path(model).expanduser()), names, n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else ""


class _NotInCacheError(Exception):
    """A name on the hub whose files are not in the local cache."""


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (_MODEL_CONFIG, _PIPELINE_INDEX))


def _display_path(model: str) -> str:
    """The path itself where it is short and printable."""
    return model if len(model) <= _SHOWN_PATH and model.isprintable() else short_repr(model)


def _find_on_hub(
    name: str, revision: str | None, cache_dir: Path | None, allow_download: bool, files: Sequence[str]
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    # The same patterns for both calls: the cache decides by them whether a snapshot is complete.
    fetch = functools.partial(
        snapshot_download, name, revision=revision, cache_dir=cache_dir, allow_patterns=list(files)
    )
    try:
        return Path(fetch(local_files_only=True))
    except HFValidationError as error:
        raise CheckpointError(f"{name!r} is neither a folder nor a name on the hub; check it", param="model") from error
    except LocalEntryNotFoundError as error:
        if not allow_download:
            raise _NotInCacheError from error
    try:
        return Path(fetch())
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{name!r} could not be downloaded: {error}", param="model") from error


def read_model_config(folder: Path) -> dict[str, object]:
    """config.json of a model folder, or model_index.json of a diffusers pipeline."""
    path = folder / _MODEL_CONFIG
    index = folder / _PIPELINE_INDEX
    if index.is_file():
        data = read_json(index)
        if not isinstance(data.get("_class_name"), str):
            raise CheckpointError(f"{index} names no pipeline (`_class_name`); download it again")
        return data
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has neither config.json nor {_PIPELINE_INDEX}, so it is not a model; give the folder that "
            "holds one"
        )
    config = read_json(path)
    if not (folder / _SENTENCE_MODULES).is_file():
        return config
    return {**config, "architectures": [SENTENCE_TRANSFORMER, *_architectures({**config, "model_type": None})]}


def detect_family(hf_config: Mapping[str, object], registry: Registry) -> Family:
    """The family that claims the checkpoint's architecture or model type; one that claims `*` only if none does."""
    names = _architectures(hf_config)
    families = registry.families()
    if not names:
        raise UnsupportedModelError(
            "config.json names neither `architectures` nor `model_type`, so its family is unknown; "
            f"families: {', '.join(families) or 'none'}"
        )
    for name in names:
        claims = [family for family in families.values() if name in family.architectures]
        if len(claims) > 1:
            both = " and ".join(family.name for family in claims)
            raise RegistryError(f"the families {both} both claim {name}; uninstall the package of one")
        if claims:
            return claims[0]
    if _is_multimodal(hf_config.get("model_type"), names):
        for family in families.values():
            if ANY_MULTIMODAL in family.architectures:
                return family
    for family in families.values():
        if "*" in family.architectures and any(map(_is_causal_lm, names)):
            return family
    for family in families.values():
        if any(_claims(family, name, hf_config) for name in names):
            return family
    if "_class_name" in hf_config:
        for family in families.values():
            if ANY_PIPELINE in family.architectures:
                return family
    raise UnsupportedModelError(
        f"no family serves {', '.join(names)}; families: "
        + ("; ".join(f"{f.name} ({', '.join(f.architectures)})" for f in families.values()) or "none")
    )


def _is_multimodal(model_type: object, names: Sequence[str]) -> bool:
    """Whether `AutoModelForMultimodalLM` makes a checkpoint's class, and it is no causal LM without a processor.

    Audio Flamingo and its kind are listed as sequence-to-sequence models, with a processor.
    """
    if not isinstance(model_type, str):
        return False
    own, listed = _auto_classes("MULTIMODAL_LM").get(model_type), True
    if own is None:
        own, listed = _auto_classes("SEQ_TO_SEQ_CAUSAL_LM").get(model_type), False
    if own is None or names[0] not in (own, model_type):
        return False
    from omnistage.hf import transformers

    processors = transformers.models.auto.processing_auto.PROCESSOR_MAPPING_NAMES
    return (listed and own != _auto_classes("CAUSAL_LM").get(model_type)) or model_type in processors


def _is_causal_lm(name: str) -> bool:
    """Whether a class is one that `AutoModelForCausalLM` makes."""
    if name.endswith("ForCausalLM"):
        return True
    return name in _auto_classes("CAUSAL_LM").values()


def _claims(family: Family, name: str, hf_config: Mapping[str, object]) -> bool:
    """Whether a family claims a class by its task, or as a text model without a head."""
    tasks = [task for task in _TASKS if task in family.architectures]
    if any(name in _auto_classes(mapping).values() for task in tasks for mapping in _TASKS[task]):
        return True
    if ANY_TEXT_MODEL not in family.architectures or not name.endswith("Model"):
        return False
    return any(hf_config.get("model_type") in _auto_classes(mapping) for mapping in _TEXT_MODELS)


def _auto_classes(task: str) -> Mapping[str, str]:
    """Classes by model type, as transformers' auto classes list them."""
    from omnistage.hf import transformers

    names: Mapping[str, str] = getattr(transformers.models.auto.modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
    return names


def _architectures(hf_config: Mapping[str, object]) -> list[str]:
    """Architecture names, most specific first."""
    pipeline = hf_config.get("_class_name")
    if isinstance(pipeline, str):
        return [pipeline]
    architectures = hf_config.get("architectures")
    names = [n for n in architectures if isinstance(n, str)] if isinstance(architectures, list) else []
    model_type = hf_config.get("model_type")
    return [*names, model_type] if isinstance(model_type, str) else names
