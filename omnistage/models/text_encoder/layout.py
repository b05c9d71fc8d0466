"""The layout of sentence-transformers' checkpoints: what becomes of the tokens' hidden states."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from omnistage.core.checkpoint import read_json
from omnistage.core.errors import CheckpointError, UnsupportedModelError

POOLINGS = ("cls", "mean", "max", "mean_sqrt_len", "weightedmean", "lasttoken")
"""In the order in which several are concatenated."""
_OLD_NAMES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""In the order in which sentence-transformers concatenates them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How vectors are made of hidden states, and what is written before a text."""

    pooling: tuple[str, ...] = ("mean",)
    dense: tuple[Path, ...] = ()
    """Folders of linear layers behind the pooling, in order."""
    normalize: bool = False
    max_tokens: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    """Name of the prompt that is used where a request names none."""


def read_layout(folder: Path) -> Layout:
    """The layout of a checkpoint; one without modules.json is pooled by the mean, as sentence-transformers does."""
    if not (folder / "modules.json").is_file():
        return Layout()
    modules = _read_modules(folder)
    if not modules or modules[0][0] != "Transformer":
        raise UnsupportedModelError(f"modules.json of {folder} begins with no Transformer; it is not served")
    pooling: tuple[str, ...] = ()
    dense: list[Path] = []
    normalize = False
    for kind, path in modules[1:]:
        if kind == "Pooling" and not pooling:
            pooling = _pooling(read_json(path / "config.json"))
        elif kind == "Dense" and pooling and not normalize:
            dense.append(path)
        elif kind == "Normalize" and pooling:
            normalize = True
        else:
            raise UnsupportedModelError(
                f"modules.json of {folder} has a {kind}, which is not served; Pooling, Dense and Normalize are"
            )
    if not pooling:
        raise UnsupportedModelError(f"modules.json of {folder} has no Pooling, so it gives no vectors of texts")
    first = _optional(folder / "sentence_bert_config.json")
    length, prompts = first.get("max_seq_length"), _optional(folder / "config_sentence_transformers.json")
    texts, default = prompts.get("prompts") or {}, prompts.get("default_prompt_name")
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise CheckpointError("config_sentence_transformers.json: `prompts` must map names to texts")
    return Layout(
        pooling,
        tuple(dense),
        normalize,
        length if isinstance(length, int) and length > 0 else None,
        first.get("do_lower_case") is True,
        texts,
        default if isinstance(default, str) and default in texts else None,
    )


def _read_modules(folder: Path) -> list[tuple[str, Path]]:
    """The kinds of the modules and their folders, in order."""
    path = folder / "modules.json"
    try:
        entries = sorted(json.loads(path.read_text(encoding="utf-8")), key=lambda entry: int(entry["idx"]))
        modules = [(str(entry["type"]).rsplit(".", 1)[-1], folder / str(entry["path"])) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a list of modules: {error!r}") from error
    for _kind, place in modules:
        if not place.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"{path} names a folder outside its own: {place.name}")
    return modules


def _pooling(config: Mapping[str, object]) -> tuple[str, ...]:
    if config.get("include_prompt") is False:
        raise UnsupportedModelError("its pooling leaves prompts out (include_prompt: false), which is not served")
    pooling = config.get("pooling_mode")
    if pooling is not None:
        modes = tuple(pooling) if isinstance(pooling, list) else (str(pooling),)
    else:
        modes = tuple(mode for name, mode in _OLD_NAMES.items() if config.get(name) is True)
    if not modes or (unknown := [mode for mode in modes if mode not in POOLINGS]):
        raise UnsupportedModelError(f"its pooling is {pooling or unknown or 'none'}; served: {', '.join(POOLINGS)}")
    return modes


def _optional(path: Path) -> Mapping[str, object]:
    return read_json(path) if path.is_file() else {}
