"""Parts that pip installed: whether they are there, and whether they are what was installed."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import omnistage
from omnistage.parts.manifest import InstalledPart


@dataclass(frozen=True, slots=True)
class Found:
    """What there is of a part."""

    there: bool
    said: str
    """For people: its version or size, else how to get it."""


def look(part: InstalledPart) -> Found:
    """Whether an installed part is there and whole. Its files are read: some milliseconds for some megabytes."""
    if part.folder is not None:
        return _look_inside(Path(omnistage.__file__).parent / part.folder)
    try:
        found = metadata.distribution(part.package)
    except metadata.PackageNotFoundError:
        return Found(False, "not installed: pip install 'omnistage[starter]'")
    if bad := damaged(found):
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        again = f"pip install --force-reinstall --no-deps {part.package}=={found.version}"
        return Found(False, f"damaged: {bad[0]}{more}; {again}")
    return Found(True, f"installed, {found.version}")


def damaged(distribution: metadata.Distribution) -> list[str]:
    """Files of a distribution that are missing, or not what was installed by its own record."""
    bad = []
    for file in distribution.files or ():
        if file.hash is None:  # the record itself, and what Python compiles
            continue
        path = Path(str(file.locate()))
        if not path.is_file() or _digest(path, file.hash.mode) != file.hash.value:
            bad.append(str(file))
    return bad


def _digest(path: Path, mode: str) -> str:
    """As a wheel's record writes it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, mode).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _look_inside(folder: Path) -> Found:
    weights = list(folder.rglob("*.safetensors"))
    if not weights:
        return Found(False, "not in this installation")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Found(True, f"in the package, {size / 1e6:.0f} MB")
