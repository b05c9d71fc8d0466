"""Imports that a model will need, begun in a thread while the command sets itself up."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from omnistage.core.checkpoint import read_json
from omnistage.core.errors import OmniError


def start_imports(folders: Iterable[str], device: str | None) -> threading.Thread:
    """Import torch, `transformers` and its code of each model, in that order; on a GPU also what compiles.

    Whoever imports one of them meanwhile waits for it, and gets the error that is passed over here. Garbage is not
    collected until they are there, for a quarter of their time, and they are left out of all later collections.
    """
    thread = threading.Thread(target=_import, args=(list(folders), device), name="early-imports", daemon=True)
    thread.start()
    return thread


def _import(folders: list[str], device: str | None) -> None:
    collects = gc.isenabled()
    gc.disable()
    try:
        for module in _modules(folders, device):
            import_module(module)
    except Exception:  # a boundary: an import can raise anything, and does so again for whoever needs it
        return
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def _modules(folders: list[str], device: str | None) -> Iterator[str]:
    yield "omnistage.hf"
    for kind in _model_types(folders):
        if find_spec(f"transformers.models.{kind}") is not None:
            yield f"transformers.models.{kind}.modeling_{kind}"
    import torch

    if torch.cuda.is_available() and (device is None or device.startswith("cuda")):
        yield "torch._inductor.compile_fx"


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
