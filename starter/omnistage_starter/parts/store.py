"""Where parts are kept, and whether they are there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from omnistage_starter.parts.manifest import Bundle, InstalledPart, Part

HOME_VARIABLE = "OMNISTAGE_HOME"
"""A folder for what is fetched; default: the user's cache."""
_PIECE = 2**20
_STALE_SECONDS = 3600.0  # longer than any fetch may take
PARTIAL = ".partial-"
"""How the names of folders begin in which something is being made."""


def home() -> Path:
    """The folder of everything that was fetched."""
    given = os.environ.get(HOME_VARIABLE)
    if given:
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "omnistage"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "omnistage"


@dataclass(frozen=True, slots=True)
class Store:
    """The folder of one bundle: a folder for each role, and one with the parts' licences."""

    bundle: Bundle
    root: Path

    @classmethod
    def of(cls, bundle: Bundle) -> Store:
        return cls(bundle, home() / bundle.name)

    def folder(self, part: Part) -> Path:
        return self.root / part.role

    def licences(self, part: Part | InstalledPart) -> Path:
        return self.root / "licences" / part.name

    def _receipt(self, part: Part) -> Path:
        return self.licences(part) / "part.json"

    def sign(self, part: Part, names: Iterable[str]) -> None:
        """Say that a part is complete, and of which files: the last thing written, so what was interrupted has none."""
        folder = self.folder(part)
        said = {
            "package": part.package,
            "version": part.version,
            "licence": part.licence,
            "files": {name: sha256_of(folder / name) for name in sorted(names)},
        }
        self._receipt(part).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")

    def files(self, part: Part) -> dict[str, str] | None:
        """The part's files and their hashes; None where it was not fetched whole, or in another version."""
        try:
            said = json.loads(self._receipt(part).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(said, dict) or (said.get("package"), said.get("version")) != (part.package, part.version):
            return None
        files = said.get("files")
        return {str(name): str(digest) for name, digest in files.items()} if isinstance(files, dict) else None

    def has(self, part: Part) -> bool:
        """Whether the part was fetched whole and its files are still there."""
        files = self.files(part)
        return files is not None and all((self.folder(part) / name).is_file() for name in files)

    def damaged(self, part: Part) -> list[str]:
        """Files whose content is not what it was."""
        folder = self.folder(part)
        files = (self.files(part) or {}).items()
        return [name for name, known in files if not (folder / name).is_file() or sha256_of(folder / name) != known]

    def missing(self) -> list[Part]:
        """Parts to fetch that are not there, and without which the bundle is nothing."""
        return [part for part in self.bundle.required if not self.has(part)]

    def configure(self) -> bool:
        """Make the folder a model's once all required parts are there, if it is not; whether it is one now."""
        if not self.bundle.architecture or self.missing():
            return False
        path = self.root / "config.json"
        wanted = {"architectures": [self.bundle.architecture], "model_type": self.bundle.model_type}
        try:
            if json.loads(path.read_text(encoding="utf-8")) == wanted:
                return True
        except (OSError, ValueError):
            pass  # not there, or broken off: written below
        scratch = path.with_name(f"{PARTIAL}config.json")
        scratch.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, path)
        return True

    def sweep(self) -> None:
        """Remove what fetches left behind that were killed long ago."""
        for path in self.root.glob(f"{PARTIAL}*"):
            if path.is_dir() and time.time() - path.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
