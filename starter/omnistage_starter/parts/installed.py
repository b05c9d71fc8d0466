"""Parts that pip installed: whether they are there, whether they are what they should be, and their licences."""

from __future__ import annotations

import base64
import hashlib
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from omnistage_starter.parts.manifest import InstalledPart
from omnistage_starter.parts.store import Store, sha256_of


@dataclass(frozen=True, slots=True)
class Found:
    """What there is of a part."""

    there: bool
    said: str
    """For people: its version or size, else how to get it."""


def look(part: InstalledPart) -> Found:
    """Whether an installed part is there and whole. Its files are read: some milliseconds for some megabytes."""
    if part.folder is not None:
        return _look_inside(part)
    try:
        found = metadata.distribution(part.package)
    except metadata.PackageNotFoundError:
        return Found(False, "not installed: pip install 'omnistage[starter]'")
    if found.version != part.version:
        return Found(False, f"{found.version} is installed: pip install {part.package}=={part.version}")
    if bad := list(dict.fromkeys([*_changed(part), *damaged(found)])):
        again = f"pip install --force-reinstall --no-deps {part.package}=={part.version}"
        return Found(False, f"damaged: {_named(bad)}; {again}")
    return Found(True, f"installed, {found.version}")


def keep_licences(part: InstalledPart, store: Store) -> None:
    """Copy the licences of a part that is there to those of the parts that were fetched."""
    kept = store.licences(part)
    kept.mkdir(parents=True, exist_ok=True)
    for name in part.licence_files:
        path = _place(part, name)
        shutil.copyfile(path, kept / path.name)


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


def _place(part: InstalledPart, name: str) -> Path:
    """Where a file of an installed part lies."""
    if part.folder is not None:
        return Path(__file__).parents[1] / part.folder / name
    return Path(str(metadata.distribution(part.package).locate_file(name)))


def _changed(part: InstalledPart) -> list[str]:
    """Files that are missing, or not what the manifest says: a package may agree with its own record and be another."""
    bad = [name for name in part.licence_files if not _place(part, name).is_file()]
    for file in part.files:
        path = _place(part, file.path)
        if not path.is_file() or sha256_of(path) != file.sha256:
            bad.append(file.path)
    return bad


def _named(bad: list[str]) -> str:
    return bad[0] + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")


def _look_inside(part: InstalledPart) -> Found:
    if bad := _changed(part):
        return Found(False, f"not as it was made: {_named(bad)}; install {part.package} again")
    size = sum(_place(part, file.path).stat().st_size for file in part.files)
    return Found(True, f"in the package, {size / 1e6:.0f} MB")
