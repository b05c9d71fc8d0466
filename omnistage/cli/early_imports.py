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


def start_imports(folders: Iterable[str]) -> threading.Thread:
    """Import torch, `transformers` and its code of each model, in that order.

    Whoever imports one of them meanwhile waits for it, and gets the error that is passed over here. Garbage is not
    collected until they are there, for a quarter of their time.
    """
    thread = threading.Thread(target=_import, args=(list(folders),), name="early-imports", daemon=True)
    thread.start()
    return thread


def _import(folders: list[str]) -> None:
    collects = gc.isenabled()
    gc.disable()
    try:
        import_module("omnistage.hf")
        for kind in _model_types(folders):
            if find_spec(f"transformers.models.{kind}") is not None:
                import_module(f"transformers.models.{kind}.modeling_{kind}")
    except Exception:  # a boundary: an import can raise anything, and does so again for whoever needs it
        return
    finally:
        if collects:
            gc.enable()


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
