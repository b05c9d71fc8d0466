"""GGUF files: language models whose quantised weights `transformers` reads, written once as a checkpoint in full.

The checkpoint lies in the user's cache, or in the folder that OMNISTAGE_HOME names, and belongs to one state of the
file: another size or time makes another.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import math
import re
import shutil
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.core.errors import CheckpointError, MissingDependencyError, UnsupportedModelError
from omnistage.core.user_cache import HOME_VARIABLE, weights_home

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

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
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_NUMBERS = {
    "attention.layer_norm_epsilon": _EPSILONS,
    "attention.layer_norm_rms_epsilon": _EPSILONS,
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "logit_scale": ("logit_scale",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "attention.scale": ("attention_multiplier",),
    "attention.clamp_kqv": ("clip_qkv",),
    "expert_used_count": ("num_experts_per_tok",),
}
"""Metadata that changes answers, by its name without the architecture: the fields of configs that have it. Of many
architectures `transformers` reads some of them only, and takes its own defaults for the others."""
_OTHER_SCALES = {("gemma2", 46), ("gemma3", 62)}
"""Models by their number of layers, as llama.cpp knows them."""


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
        model = _full_model(options, path)
        check_numbers(path, model.config)
        model.save_pretrained(scratch)
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


def check_numbers(path: Path, config: PreTrainedConfig) -> None:
    """Refuse files of which `transformers` has not taken a number that changes answers."""
    import gguf

    if (config.model_type.removesuffix("_text"), config.num_hidden_layers) in _OTHER_SCALES:
        raise UnsupportedModelError(
            f"{path.name} is a {config.model_type} of 27 billion weights, whose scale of attention GGUF files do not "
            "hold and transformers takes for that of the smaller ones: its answers would be wrong; take the model's "
            "safetensors"
        )
    for key, field in gguf.GGUFReader(str(path)).fields.items():
        name, value = key.partition(".")[2], field.contents()
        if not isinstance(value, int | float):
            continue
        if name in _NUMBERS:
            values = [getattr(config, field, None) for field in _NUMBERS[name]]
        elif name in ("rope.freq_base", "rope.dimension_count"):
            values = _rotary(config, name)
        else:
            continue
        numbers = [each for each in values if isinstance(each, int | float)]
        same = [math.isclose(value, each, rel_tol=1e-5) for each in numbers or [0.0, 1.0]]
        # Without the field: no window, no scale. With several names of it, a model may read any of them.
        if not (all(same) if numbers and name in _NUMBERS else any(same)):
            numbers_text = ", ".join(map(str, numbers)) or "none"
            raise UnsupportedModelError(
                f"{path.name} has {key} {value:g}, which transformers does not read from GGUF files of this kind (it "
                f"would compute with {numbers_text}): its answers would be wrong; take the model's safetensors"
            )


def _rotary(config: PreTrainedConfig, name: str) -> list[Any]:
    """Bases or widths of the rotary embeddings that a model computes."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]  # by the kind of layer
    if name == "rope.freq_base":
        return [kind.get("rope_theta") for kind in kinds]
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    widths = [int(width * kind.get("partial_rotary_factor", 1.0)) for kind in kinds if "rope_theta" in kind]
    return [getattr(config, "rotary_dim", None), getattr(config, "global_head_dim", None), *widths]


def _check_all_read(path: Path, model: PreTrainedModel) -> None:
    """Refuse files with weights that the model has no place for: `transformers` leaves them out without a word."""
    import gguf

    tensors = gguf.GGUFReader(str(path)).tensors
    state = model.state_dict()
    num_elements = sum({tensor.data_ptr(): tensor.numel() for tensor in state.values()}.values())
    tied = model.config.tie_word_embeddings  # of some a copy of the embedding is written as the head
    there = sum(int(each.n_elements) for each in tensors if not (tied and each.name == "output.weight"))
    if there > num_elements:
        biases = [each.name for each in tensors if each.name.endswith(".bias")]
        examples = biases[:1] if biases and not any(key.endswith(".bias") for key in state) else []
        raise UnsupportedModelError(
            f"{path.name} has {there - num_elements} numbers more than {type(model).__name__} of transformers takes"
            f"{''.join(f', first those of {name}' for name in examples)}: its answers would be wrong; take the model's "
            "safetensors"
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
    _check_all_read(path, loaded)
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
