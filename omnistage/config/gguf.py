"""GGUF files: language models whose quantised weights `transformers` reads, written once as a checkpoint in full.

The checkpoint lies in the user's cache, or in the folder that OMNISTAGE_HOME names, and belongs to one state of the
file: another size or time makes another.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import re
import shutil
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.core.errors import CheckpointError, MissingDependencyError, UnsupportedModelError
from omnistage.core.user_cache import HOME_VARIABLE, weights_home

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_SERVED_DTYPE = "bfloat16"
"""Of the new checkpoint on a GPU. Its numbers are float32, so that nothing is rounded twice."""
_READ_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    RuntimeError,
    ArithmeticError,
    MemoryError,
    struct.error,
)
"""What `gguf` and `transformers` raise for files that they cannot read."""


def gguf_in(folder: Path) -> Path | None:
    """The GGUF file of a folder that has no other weights; raises where there are several."""
    files = sorted(path for path in folder.glob(f"*{SUFFIX}") if path.is_file())
    if not files or any(folder.glob("*.safetensors")) or (folder / "model_index.json").is_file():
        return None
    if len(files) > 1:
        names = ", ".join(path.name for path in files[:5])
        raise CheckpointError(f"{folder} has {len(files)} GGUF files ({names}); name one of them", param="model")
    return files[0]


def converted(path: Path) -> Path:
    """The checkpoint of a GGUF file, written now where it is not there yet."""
    path = path.resolve()
    _check(path)
    state = path.stat()
    key = hashlib.sha256(f"{path}\0{state.st_size}\0{state.st_mtime_ns}".encode()).hexdigest()[:16]
    target = weights_home() / "gguf" / f"{path.stem}-{key}"
    if not (target / "config.json").is_file():
        _convert(path, target)
    return target


def _check(path: Path) -> None:
    """Refuse what can be refused before the file is read."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}", param="model") from error
    if magic != _MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file; fetch it again", param="model")
    if _SHARD.search(path.name):
        raise UnsupportedModelError(
            f"{path.name} is one of several files of a model, which transformers does not read; join them with "
            "llama-gguf-split --merge"
        )
    if importlib.util.find_spec("gguf") is None:
        raise MissingDependencyError("GGUF files need the package gguf: pip install 'omnistage[gguf]'")


def _convert(path: Path, target: Path) -> None:
    """The folder appears complete or not at all; of two processes the first one wins."""
    from omnistage.hf import transformers

    logger.warning("writing the weights of %s in full precision to %s, once; this takes a while", path.name, target)
    options: Any = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    scratch: Path | None = None
    try:
        scratch = _scratch(target)
        _check_positions(path)
        _full_model(options, path).save_pretrained(scratch)
        transformers.AutoTokenizer.from_pretrained(**options, trust_remote_code=False).save_pretrained(scratch)
        if not (target / "config.json").is_file():
            scratch.rename(target)
    except ImportError as error:
        raise MissingDependencyError(f"{path.name} cannot be read: {error}") from error
    except _READ_ERRORS as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnsupportedModelError(f"transformers cannot read {path.name}: {reason}") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _scratch(target: Path) -> Path:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
    except OSError as error:
        raise CheckpointError(
            f"{target.parent} cannot be written ({error.strerror or error}), where GGUF files are kept in full "
            f"precision; set {HOME_VARIABLE} to a folder that can",
            param="model",
        ) from error


def _check_positions(path: Path) -> None:
    """Refuse files whose positions are scaled: `transformers` reads these numbers of gpt-oss only."""
    import gguf

    reader = gguf.GGUFReader(str(path))
    names = [tensor.name for tensor in reader.tensors if tensor.name.startswith(("rope_freqs", "rope_factors"))]
    for key, field in reader.fields.items():
        if ".rope.scaling." in key and not key.startswith("gpt-oss.") and field.contents() != "none":
            names.append(key)
    if names:
        raise UnsupportedModelError(
            f"{path.name} scales its positions ({', '.join(names[:3])}), which transformers does not read from GGUF "
            "files: its answers would be wrong; take the model's safetensors"
        )


def _full_model(options: Any, path: Path) -> PreTrainedModel:
    import torch

    from omnistage.hf import transformers

    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        **options, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
    )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise CheckpointError(
            f"{path.name} lacks {len(missing)} weights of {type(loaded).__name__}, first {missing[0]}; fetch it again",
            param="model",
        )
    # A model that was loaded from quantised weights refuses to be saved: its tensors go to another one.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = _SERVED_DTYPE
    with torch.device("meta"):
        model: PreTrainedModel = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model
