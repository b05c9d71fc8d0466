"""The folder that parts are kept in, and whether they are complete."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from omnistage.core.user_cache import weights_home
from omnistage_starter.parts.manifest import InstalledPart, Manifest, Part

_READ_BYTES = 2**20
_STALE_SECONDS = 3600.0  # longer than the timeout of a fetch
PARTIAL = ".partial-"
"""Prefix of folders and files that are still being written."""


@dataclass(frozen=True, slots=True)
class Store:
    """The folder of one bundle, with a folder for each role and one for licences."""

    manifest: Manifest
    root: Path

    @classmethod
    def of(cls, manifest: Manifest) -> Store:
        return cls(manifest, weights_home() / manifest.name)

    def folder(self, part: Part) -> Path:
        return self.root / part.role

    def licences(self, part: Part | InstalledPart) -> Path:
        return self.root / "licences" / part.name

    def _receipt(self, part: Part) -> Path:
        return self.licences(part) / "part.json"

    def write_receipt(self, part: Part, names: Iterable[str]) -> None:
        """Record that a part is complete, with its files; written last, so an interrupted fetch leaves no record."""
        folder = self.folder(part)
        receipt = {
            "package": part.package,
            "version": part.version,
            "licence": part.licence,
            "files": {name: sha256_of(folder / name) for name in sorted(names)},
        }
        self._receipt(part).write_text(json.dumps(receipt, indent=1) + "\n", encoding="utf-8")

    def files(self, part: Part) -> dict[str, str] | None:
        """The part's files and their hashes; None where it is incomplete, or of another version."""
        try:
            receipt = json.loads(self._receipt(part).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(receipt, dict):
            return None
        if (receipt.get("package"), receipt.get("version")) != (part.package, part.version):
            return None
        files = receipt.get("files")
        return {str(name): str(digest) for name, digest in files.items()} if isinstance(files, dict) else None

    def has(self, part: Part) -> bool:
        """Whether the part was fetched completely and its files still exist."""
        files = self.files(part)
        return files is not None and all((self.folder(part) / name).is_file() for name in files)

    def damaged(self, part: Part) -> list[str]:
        """Files that are missing or whose content changed."""
        folder = self.folder(part)
        files = (self.files(part) or {}).items()
        return [name for name, digest in files if not (folder / name).is_file() or sha256_of(folder / name) != digest]

    def missing(self) -> list[Part]:
        """Required parts that are not here."""
        return [part for part in self.manifest.required if not self.has(part)]

    def configure(self) -> bool:
        """Write config.json once all required parts are here; returns whether the folder is a model now."""
        if not self.manifest.architecture or self.missing():
            return False
        path = self.root / "config.json"
        config = {"architectures": [self.manifest.architecture], "model_type": self.manifest.model_type}
        try:
            if json.loads(path.read_text(encoding="utf-8")) == config:
                return True
        except (OSError, ValueError):
            pass  # missing or truncated: written below
        scratch = path.with_name(f"{PARTIAL}config.json")
        scratch.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, path)
        return True

    def sweep(self) -> None:
        """Remove folders of fetches that were killed."""
        for path in self.root.glob(f"{PARTIAL}*"):
            if path.is_dir() and time.time() - path.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
