"""Bundles: real weights of a family that `omnistage pull NAME` fetches, and how a bundle is found by its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from omnistage.core.errors import MissingDependencyError, OmniError

if TYPE_CHECKING:
    from omnistage.core.family import Family

SEPARATE_DISTRIBUTIONS: Mapping[str, str] = {"starter": "omnistage[starter]"}
"""Bundles of ours that are not part of this package, and what pip installs for each."""


@dataclass(frozen=True, slots=True)
class BundlePart:
    """One part of a bundle, as `omnistage list` shows it."""

    name: str
    title: str
    origin: str
    licence: str
    state: str


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull did. Parts are in the bundle's order."""

    folder: Path
    size: int
    """Bytes in the folder."""
    present: tuple[BundlePart, ...]
    """Complete before, and not fetched."""
    fetched: tuple[BundlePart, ...]
    installed: tuple[BundlePart, ...]
    """Installed by pip, and intact."""
    skipped: tuple[OmniError, ...]
    """Why optional parts were not fetched."""
    limitations: tuple[str, ...]
    """What the model cannot do without the optional parts that are missing."""
    errors: tuple[OmniError, ...]
    """Why required parts are missing, or parts were refused. Empty: the bundle can be used."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check of the files found."""

    notes: tuple[str, ...]
    """A line about every part: whether it is intact, changed, missing or installed."""
    problems: tuple[str, ...]
    """Empty: every file is intact."""


class PullProgress(Protocol):
    """Receives the progress of a pull, from several threads."""

    def __call__(self, part: str, description: str, fraction: float | None) -> None:
        """`part` is the part's name. `fraction` is None while it is unknown."""


class Bundle(Protocol):
    """Real weights of a family, kept in a folder of the user's."""

    @property
    def name(self) -> str:
        """What users give in place of a model's folder."""

    def locate(self) -> Path:
        """Its folder. Raises `CheckpointError` before it was pulled; uses no network."""

    def pull(self, *, force: bool = False, progress: PullProgress | None = None) -> PullResult:
        """Fetch what is missing or damaged (`force`: everything), check it and convert it."""

    def check(self) -> CheckResult:
        """Compare every file with its hash; uses no network."""

    def parts(self) -> Sequence[BundlePart]:
        """What it consists of."""


def bundles(families: Iterable[Family]) -> dict[str, Bundle]:
    """The bundles of these families by their names."""
    return {family.bundle.name: family.bundle for family in families if family.bundle is not None}


def find_bundle(name: str, families: Iterable[Family]) -> Bundle | None:
    """The bundle of that name. Raises `MissingDependencyError` for one whose distribution is not installed."""
    bundle = bundles(families).get(name)
    if bundle is None and (requirement := SEPARATE_DISTRIBUTIONS.get(name)) is not None:
        raise MissingDependencyError(f"{name} is not installed; run: pip install '{requirement}'")
    return bundle
