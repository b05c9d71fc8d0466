"""Imports that a model will need, begun in a thread while the command sets itself up."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from omnistage.core.checkpoint import read_json
from omnistage.core.errors import OmniError


def start_imports(folders: Iterable[str], device: str | None) -> threading.Thread:
    """Import torch, `transformers` and its code of each model, in that order; on a GPU also what compiles.

    Whoever imports one of them meanwhile waits for it, and gets the error that is passed over here. Garbage is not
    collected until they are there, for a quarter of their time.
    """
    thread = threading.Thread(target=_import, args=(list(folders), device), name="early-imports", daemon=True)
    thread.start()
    return thread


def _import(folders: list[str], device: str | None) -> None:
    collects = gc.isenabled()
    gc.disable()
    try:
        import_module("omnistage.hf")
        for kind in _model_types(folders):
            if find_spec(f"transformers.models.{kind}") is not None:
                import_module(f"transformers.models.{kind}.modeling_{kind}")
        if _compiles(folders, device):
            compiling = import_module("omnistage.engines.compiling")
            compiling.start_compile_workers()
            compiling.import_compiler()
    except Exception:  # a boundary: an import can raise anything, and does so again for whoever needs it
        return
    finally:
        if collects:
            gc.enable()


def _compiles(folders: list[str], device: str | None) -> bool:
    """Whether a model is likely to be compiled: a large one, on a GPU."""
    import torch

    from omnistage.engines.compiling import MIN_BYTES

    if not torch.cuda.is_available() or not (device is None or device.startswith("cuda")):
        return False
    files = (file for folder in folders for file in Path(folder).glob("**/*.safetensors"))
    return sum(file.stat().st_size for file in files) >= MIN_BYTES


def _model_types(folders: list[str]) -> list[str]:
    """`model_type` of the models that lie in a folder."""
    types: list[str] = []
    for folder in folders:
        try:
            kind = read_json(Path(folder) / "config.json").get("model_type")
        except OmniError:
            continue
        if isinstance(kind, str) and kind.isidentifier():
            types.append(kind)
    return types
