"""LoRA checkpoints as PEFT writes them: exactly what they say, or an error that names what is not supported."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch

from omnistage.core.errors import AdapterError
from omnistage.engines.adapters.files import AdapterFiles, LoraPair

_PREFIX = "base_model.model."
_KEY = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
_READ = frozenset({"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights"})
_WITHOUT_EFFECT = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("target_modules", "exclude_modules", "lora_dropout", "layers_to_transform", "layers_pattern"),
        *("megatron_core", "eva_config", "loftq_config", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
        "lora_ga_config",
    }
)
"""Fields that say how an adapter was trained, or that its keys say again."""
_UNSUPPORTED = {
    "use_dora": "DoRA changes the norms of weights, which cannot be mixed within a batch",
    "modules_to_save": "whole modules are replaced; merge the adapter into a checkpoint of its own",
    "trainable_token_indices": "rows of the embedding are replaced; merge the adapter into a checkpoint of its own",
    "target_parameters": "parameters that are no linear layers, like experts, are changed",
    "lora_bias": "adapters with biases are not supported; train without",
    "fan_in_fan_out": "weights are transposed, as in Conv1D layers",
}
_NEW_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations after which the base's weights are others, too."""
_MAX_PATTERNS, _MAX_PATTERN_CHARS, _MAX_REPEATS = 4096, 200, 4


def read_peft(files: AdapterFiles, scale: float) -> dict[str, LoraPair]:
    """Pairs by the path of their layer in the base model. Raises `AdapterError`."""
    config = files.config
    if config is None:
        raise AdapterError("adapter_config.json is missing; PEFT writes it beside the weights")
    return read_pairs(files.tensors, config, scale)


def read_pairs(tensors: Mapping[str, torch.Tensor], config: Mapping[str, object], scale: float) -> dict[str, LoraPair]:
    """The pairs of tensors with PEFT's names."""
    check_config(config)
    tensors_of: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise AdapterError(_unknown_key(key))
        path = match[1].removeprefix(_PREFIX)
        if match[2] in tensors_of.setdefault(path, {}):
            raise AdapterError(f"{key} is there twice, with and without a name of the adapter")
        tensors_of[path][match[2]] = tensor
    return {path: _pair(path, pair, config, scale) for path, pair in tensors_of.items()}


def _unknown_key(key: str) -> str:
    if "lora_embedding" in key:
        return f"{key} changes an embedding, which adapters cannot do here; train it on linear layers"
    if "lora_magnitude_vector" in key:
        return f"{key} is of DoRA, which is not supported"
    if key.endswith(".bias"):
        return f"{key} is a bias; adapters with biases are not supported, train with bias='none'"
    return f"{key} is not a LoRA weight of a linear layer"


def check_config(config: Mapping[str, object]) -> None:
    """Refuse what is not plain LoRA, by the name of the field."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"peft_type is {kind!r}; only LORA is supported")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"bias is {config['bias']!r}, which is not supported; train with bias='none'")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_NEW_BASE):
        raise AdapterError(
            f"init_lora_weights is {start!r}, after which the base has other weights; save the adapter with "
            "path_initial_model_for_weight_conversion, as PEFT's documentation says"
        )
    for name, value in config.items():
        if not value or name in _READ or name in _WITHOUT_EFFECT or name == "bias":
            continue
        reason = _UNSUPPORTED.get(name, "this version of Omnistage does not know what it does")
        raise AdapterError(f"adapter_config.json sets {name}, which is not supported: {reason}")


def _pair(path: str, pair: Mapping[str, torch.Tensor], config: Mapping[str, object], scale: float) -> LoraPair:
    if pair.keys() != {"A", "B"}:
        raise AdapterError(f"{path} has lora_{next(iter(pair))} alone; the file is incomplete")
    rank = _whole(config, "rank_pattern", "r", path)
    alpha = _number(_patterned(config, "alpha_pattern", path, config.get("lora_alpha", 8)), "lora_alpha")
    if pair["A"].ndim != 2 or pair["B"].ndim != 2 or len(pair["A"]) != rank or pair["B"].shape[1] != rank:
        raise AdapterError(
            f"{path} has lora_A {list(pair['A'].shape)} and lora_B {list(pair['B'].shape)}, and its rank is {rank}"
        )
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return make_pair(path, pair["A"], pair["B"], scaling * scale)


def make_pair(path: str, down: torch.Tensor, up: torch.Tensor, scale: float) -> LoraPair:
    """The pair in float32. Raises for numbers that would spoil the rows of other requests."""
    if not (down.is_floating_point() and up.is_floating_point()):
        raise AdapterError(f"{path} has weights of type {down.dtype}, which are not floating-point")
    down, up = down.float(), up.float() * scale
    for name, tensor in (("A", down), ("B", up)):
        if not torch.isfinite(tensor).all():
            raise AdapterError(f"lora_{name} of {path} has values that are not finite (NaN or infinite)")
    return LoraPair(down, up)


def _whole(config: Mapping[str, object], patterns: str, name: str, path: str) -> int:
    value = _patterned(config, patterns, path, config.get(name, 8))
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise AdapterError(f"{name} of {path} is {value!r}; it must be a whole number of at least 1")
    return value


def _number(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise AdapterError(f"{name} is {value!r}; it must be a number")
    return float(value)


def _patterned(config: Mapping[str, object], patterns: str, path: str, default: object) -> object:
    """The value of the first pattern that fits a layer's path, as PEFT finds it."""
    table = config.get(patterns) or {}
    if not isinstance(table, dict) or len(table) > _MAX_PATTERNS:
        raise AdapterError(f"{patterns} must be an object of at most {_MAX_PATTERNS} patterns")
    for pattern, value in table.items():
        if _PLAIN.fullmatch(pattern):  # most: expressions by the hundred would take seconds
            if path == pattern or path.endswith(f".{pattern}"):
                return value
            continue
        # Groups could repeat what repeats, and matching take forever.
        repeats = sum(pattern.count(sign) for sign in "*+?")
        if len(pattern) > _MAX_PATTERN_CHARS or repeats > _MAX_REPEATS or set(pattern) & set("({"):
            raise AdapterError(f"{patterns} has the pattern {pattern[:60]!r}, which is not a plain name of layers")
        try:
            if re.match(rf"(.*\.)?({pattern})$", path):
                return value
        except re.error as error:
            raise AdapterError(f"{patterns} has the pattern {pattern[:60]!r}, which cannot be read: {error}") from error
    return default
