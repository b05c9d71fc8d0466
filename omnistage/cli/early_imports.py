"""What a model will need, begun in threads while the command sets itself up: imports, and weights from the disk."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from omnistage.core.checkpoint import read_json
from omnistage.core.errors import OmniError
from omnistage.core.memory import free_host_memory

_CACHED_SHARE = 0.5
"""Of the free memory, which weights may take in the system's page cache."""
_READ_BYTES = 1 << 30


class EarlyImports:
    """Imports torch, `transformers` and its code of each model, in that order, beside the block that it is used for.

    Whoever imports one of them meanwhile waits for it, and gets the error that is passed over here. Garbage is not
    collected until `finish`, for a quarter of their time, and what was imported is left out of all later collections.
    Meanwhile the system reads the models' weights, which will then come from its page cache.
    """

    def __init__(self, folders: Iterable[str]) -> None:
        folders = list(folders)
        self._collects = gc.isenabled()
        self._reading = threading.Thread(target=_read_ahead, args=(folders,), name="read-ahead", daemon=True)
        self._thread = threading.Thread(target=_import, args=(folders,), name="early-imports", daemon=True)

    def __enter__(self) -> Self:
        gc.disable()
        self._thread.start()
        self._reading.start()
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
    except Exception:  # a boundary: an import can raise anything, and does so again where it is needed
        return


def _read_ahead(folders: Sequence[str]) -> None:
    """Have weights read into the page cache, unless they would take most of the memory; the system does it alone."""
    try:
        files = [
            file for folder in folders for name in ("", "*/") for file in Path(folder).glob(f"{name}*.safetensors")
        ]
        if sum(file.stat().st_size for file in files) > _CACHED_SHARE * free_host_memory():
            return
        with open(os.devnull, "wb") as target:
            for path in sorted(files):
                with path.open("rb") as file:
                    offset = 0
                    while count := os.sendfile(target.fileno(), file.fileno(), offset, _READ_BYTES):
                        offset += count
    except (OSError, AttributeError):  # not on this system, or missing files, which loading them reports
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
