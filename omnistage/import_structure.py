"""The import structure of `transformers` from a file.

Its import looks for exported names in the source of all of its models, 2,500 files with 44 MB by now, which is most of
the time that it takes. What it finds is kept in the user's cache until one of these files changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from omnistage.core.user_cache import cache_folder

_MODULE = "transformers.utils.import_utils"
_FUNCTION = "create_import_structure_from_path"
_FORMAT = 1

Structure = dict[Any, Any]
"""By folder a structure, and by frozen set of required packages the exported names of each module."""


def keep_import_structure() -> None:
    """Have the next import of `transformers` use what an earlier one found; nothing where it is imported already.

    The library has no setting for it: one function of its `utils.import_utils` is exchanged once that is imported. A
    version without this function imports as it always does.
    """
    if _MODULE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds one module, once, as Python would, and exchanges the function when its code has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        with suppress(ValueError):
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        loader = None if spec is None else spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            scan = module.__dict__.get(_FUNCTION)
            if callable(scan):
                models = Path(str(module.__file__)).parent.parent / "models"
                module.__dict__[_FUNCTION] = _Cached(scan, models)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Cached:
    """The library's function, but for the folder of all models, whose structure comes from the cache."""

    def __init__(self, scan: Callable[[Any], Structure], models: Path) -> None:
        self._scan = scan
        self._models = models
        self._encoded: dict[str, Any] | None = None
        """Once it is known: a process needs it twice."""

    def __call__(self, module_path: str | Path) -> Structure:
        path = Path(module_path)
        if (path.parent if path.name == "__init__.py" else path) != self._models:
            return self._scan(module_path)
        if self._encoded is None:
            self._encoded = self._read() or _encode(self._scan(module_path))
        return _decode(self._encoded)

    def _read(self) -> dict[str, Any] | None:
        """What the cache has, after it was filled if need be; None without a cache."""
        folder = cache_folder("imports")
        if folder is None:
            return None
        file = folder / f"transformers-{_fingerprint(self._models)}.json"
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # not there, or damaged
            encoded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            _decode(encoded)
            return encoded
        encoded = _encode(self._scan(self._models))
        _write(file, json.dumps(encoded))
        return encoded


def _fingerprint(folder: Path) -> str:
    """Of the names, sizes and times of all files below, and of who reads them."""
    digest = hashlib.sha256(f"{_FORMAT} {sys.version_info[:2]} {folder}".encode())
    folders = [os.fspath(folder)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir():
                    if entry.name != "__pycache__":
                        folders.append(entry.path)
                else:
                    stat = entry.stat()
                    digest.update(f"{entry.path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def _encode(structure: Structure) -> dict[str, Any]:
    return {
        "folders": {key: _encode(value) for key, value in structure.items() if isinstance(key, str)},
        "modules": [
            [sorted(key), {module: sorted(names) for module, names in value.items()}]
            for key, value in structure.items()
            if not isinstance(key, str)
        ],
    }


def _decode(encoded: dict[str, Any]) -> Structure:
    structure: Structure = {
        frozenset(required): {module: set(names) for module, names in modules.items()}
        for required, modules in encoded["modules"]
    }
    for name, value in encoded["folders"].items():
        structure[name] = _decode(value)
    return structure


def _write(file: Path, text: str) -> None:
    """All at once: another process may read it meanwhile. Without room nothing is kept."""
    with suppress(OSError):
        descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as temporary:
                temporary.write(text)
            os.replace(name, file)
        except OSError:
            with suppress(OSError):
                os.unlink(name)
            raise
