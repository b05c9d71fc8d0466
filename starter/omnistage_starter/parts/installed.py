"""Parts that pip installed: whether they are there and intact, and their licences."""

from __future__ import annotations

import base64
import hashlib
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from omnistage_starter.parts.manifest import InstalledPart
from omnistage_starter.parts.store import Store, sha256_of

PACKAGE_FOLDER = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class InstalledState:
    """Whether a part can be used."""

    ok: bool
    message: str
    """Its version or size, else how to install it."""


def installed_state(part: InstalledPart) -> InstalledState:
    """Whether an installed part is there and intact. Its files are read: some milliseconds for some megabytes."""
    if part.folder is not None:
        return _packaged_state(part)
    try:
        distribution = metadata.distribution(part.package)
    except metadata.PackageNotFoundError:
        return InstalledState(False, "not installed: pip install 'omnistage[starter]'")
    if distribution.version != part.version:
        command = f"pip install {part.package}=={part.version}"
        return InstalledState(False, f"{distribution.version} is installed: {command}")
    if bad := list(dict.fromkeys([*_changed(part), *damaged(distribution)])):
        command = f"pip install --force-reinstall --no-deps {part.package}=={part.version}"
        return InstalledState(False, f"damaged: {_summary(bad)}; {command}")
    return InstalledState(True, f"installed, {distribution.version}")


def keep_licences(part: InstalledPart, store: Store) -> None:
    """Copy the licences of an installed part to those of the fetched parts."""
    folder = store.licences(part)
    folder.mkdir(parents=True, exist_ok=True)
    for name in part.licence_files:
        path = _path(part, name)
        shutil.copyfile(path, folder / path.name)


def damaged(distribution: metadata.Distribution) -> list[str]:
    """Files of a distribution that are missing, or differ from its own record."""
    bad = []
    for file in distribution.files or ():
        # The record itself and bytecode have none; a script names its interpreter, another one in a moved environment.
        if file.hash is None or file.parts[0] == "..":
            continue
        path = Path(str(file.locate()))
        if not path.is_file() or _digest(path, file.hash.mode) != file.hash.value:
            bad.append(str(file))
    return bad


def _digest(path: Path, mode: str) -> str:
    """In the encoding of a wheel's record."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, mode).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _path(part: InstalledPart, name: str) -> Path:
    """The path of a file of an installed part."""
    if part.folder is not None:
        return PACKAGE_FOLDER / part.folder / name
    return Path(str(metadata.distribution(part.package).locate_file(name)))


def _changed(part: InstalledPart) -> list[str]:
    """Files that are missing, or differ from the manifest: a package may agree with its own record and be another."""
    bad = [name for name in part.licence_files if not _path(part, name).is_file()]
    for file in part.files:
        path = _path(part, file.path)
        if not path.is_file() or sha256_of(path) != file.sha256:
            bad.append(file.path)
    return bad


def _summary(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _packaged_state(part: InstalledPart) -> InstalledState:
    if bad := _changed(part):
        command = f"pip install --force-reinstall --no-deps {part.package}"
        return InstalledState(False, f"damaged: {_summary(bad)}; {command}")
    size = sum(_path(part, file.path).stat().st_size for file in part.files)
    return InstalledState(True, f"in the package, {size / 1e6:.0f} MB")
