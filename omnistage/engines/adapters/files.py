"""An adapter's folder: its files read within limits, never outside the folder, never anything but safetensors."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from omnistage.core.errors import AdapterError

CONFIG, WEIGHTS, DIFFUSERS_WEIGHTS = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "pytorch_lora_weights.safetensors",
)
_MAX_CONFIG_BYTES = 1 << 20
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)


@dataclass(frozen=True, slots=True)
class LoraPair:
    """What an adapter adds to one linear layer: `up @ (down @ x)`."""

    down: torch.Tensor
    """`[rank, inputs]`"""
    up: torch.Tensor
    """`[outputs, rank]`, with the adapter's scale in it."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """What a folder holds, not looked into yet."""

    config: dict[str, object] | None
    tensors: dict[str, torch.Tensor]
    digest: bytes
    """Of the content of both files."""
    metadata: dict[str, str]
    """Of the weights' file."""


def read_adapter(folder: Path, max_bytes: int) -> AdapterFiles:
    """An adapter as PEFT or diffusers writes it. Raises `AdapterError`."""
    if not folder.is_dir():
        raise AdapterError(f"{folder} is not a folder with an adapter")
    names = [name for name in (WEIGHTS, DIFFUSERS_WEIGHTS) if (folder / name).exists()]
    if not names:
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        reason = f"only {pickled[0]}, and pickled weights are not read; convert it" if pickled else "neither"
        raise AdapterError(f"{folder} has no {WEIGHTS} or {DIFFUSERS_WEIGHTS}: {reason}")
    raw = _read(folder, CONFIG, _MAX_CONFIG_BYTES) if (folder / CONFIG).exists() else None
    data = _read(folder, names[0], max_bytes)
    digest = hashlib.blake2b(data, digest_size=16)
    digest.update(raw or b"")
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:  # KeyError: a type that torch does not have
        raise AdapterError(f"{names[0]} in {folder} is not a readable safetensors file: {error}") from error
    if not tensors:
        raise AdapterError(f"{names[0]} in {folder} has no tensors")
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # valid: its tensors have been read
    config = None if raw is None else _parsed(raw, folder)
    return AdapterFiles(config, tensors, digest.digest(), header.get("__metadata__", {}))


def _parsed(raw: bytes, folder: Path) -> dict[str, object]:
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG} in {folder} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{CONFIG} in {folder} holds a {type(config).__name__}, not an object")
    return config


def _read(folder: Path, name: str, max_bytes: int) -> bytes:
    """A regular file of the folder. It may be a link within the folder's parent, as hub caches have them."""
    path = folder / name
    try:
        with open(os.open(path, _OPEN_FLAGS), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise AdapterError(f"{path} is not a regular file")
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) > max_bytes:
        raise AdapterError(f"{path} is larger than {max_bytes} bytes; raise deployment.adapter_memory")
    return data


def allowed_folder(path: str, folders: tuple[Path, ...]) -> Path:
    """The folder that a client names, where it and its files lie in one of `folders`. Raises `AdapterError`.

    Files that a client names are never looked at outside: the error is the same whether they exist or not.
    """
    for root in folders:
        top = root.resolve()
        try:
            folder = (top / path).resolve(strict=True)
            parts = [folder / name for name in (CONFIG, WEIGHTS, DIFFUSERS_WEIGHTS)]
            if folder.is_dir() and all(part.resolve().is_relative_to(top) for part in (folder, *parts)):
                return folder
        except (OSError, ValueError, RuntimeError):  # a missing part, a NUL, a loop of links
            continue
    raise AdapterError("there is no such folder within the configured adapter folders", param="lora_path")
