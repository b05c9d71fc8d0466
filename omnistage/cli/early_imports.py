"""Imports that a model will need, begun in a thread while the command sets itself up."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from omnistage.core.checkpoint import read_json
from omnistage.core.errors import OmniError


class EarlyImports:
    """Imports torch, `transformers` and its code of each model, in that order, beside the block that it is used for.

    Whoever imports one of them meanwhile waits for it, and gets the error that is passed over here. Garbage is not
    collected until `finish`, for a quarter of their time, and what was imported is left out of all later collections.
    """

    def __init__(self, folders: Iterable[str]) -> None:
        self._collects = gc.isenabled()
        self._thread = threading.Thread(target=_import, args=(list(folders),), name="early-imports", daemon=True)

    def __enter__(self) -> Self:
        gc.disable()
        self._thread.start()
        return self

    def finish(self) -> None:
        """Wait for the imports. From here on garbage is collected."""
        self._thread.join()
        gc.freeze()
        self._enable()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            gc.unfreeze()  # or xgrammar's and Triton's bindings report it all as leaked when the process ends
        self._enable()

    def _enable(self) -> None:
        if self._collects:
            gc.enable()


def _import(folders: list[str]) -> None:
    try:
        import_module("omnistage.hf")
        for kind in _model_types(folders):
            if find_spec(f"transformers.models.{kind}") is not None:
                import_module(f"transformers.models.{kind}.modeling_{kind}")
    except Exception:  # a boundary: an import can raise anything, and does so again for whoever needs it
        return


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
