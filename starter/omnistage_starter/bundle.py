"""The starter's weights: where they are kept, what fetches them, what checks them."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from omnistage.core.bundle import BundlePart, CheckResult, PullProgress, PullResult
from omnistage.core.errors import CheckpointError, MissingDependencyError, OmniError
from omnistage_starter.parts.fetch import UnreachableError, fetch_all
from omnistage_starter.parts.installed import installed_state, keep_licences
from omnistage_starter.parts.manifest import STARTER, InstalledPart, Manifest, Part
from omnistage_starter.parts.store import Store


class StarterBundle:
    """Implements `omnistage.core.bundle.Bundle` over a manifest of parts."""

    manifest: ClassVar[Manifest] = STARTER

    @property
    def name(self) -> str:
        return self.manifest.name

    def locate(self) -> Path:
        """The folder that was pulled; optional parts may be missing."""
        store = Store.of(self.manifest)
        missing = [part.title for part in store.missing()]
        if missing or not (store.root / "config.json").is_file():
            titles = f" (missing: {', '.join(missing)})" if missing else ""
            raise CheckpointError(
                f"{self.name} was not pulled yet{titles}; run `omnistage pull {self.name}` once", param="model"
            )
        return store.root

    def pull(self, *, force: bool = False, progress: PullProgress | None = None) -> PullResult:
        report = progress or _no_progress
        store = Store.of(self.manifest)
        store.sweep()
        to_fetch = [part for part in self.manifest.parts if force or not store.has(part) or store.damaged(part)]
        for part in to_fetch:  # in the manifest's order, before threads report in any order
            report(part.name, part.title, None)
        failures = fetch_all(to_fetch, store, lambda part, what, fraction: report(part.name, what, fraction))
        store.configure()
        skipped, errors, limitations = self._judge(failures, store)
        installed = []
        for package in self.manifest.installed:
            state = installed_state(package)
            if state.ok:
                keep_licences(package, store)
                installed.append(_installed_part(package, state.message))
            else:
                errors.append(MissingDependencyError(self._installed_problem(package, state.message)))
        return PullResult(
            folder=store.root,
            size=store.size(),
            present=tuple(_part(part, "present") for part in self.manifest.parts if part not in to_fetch),
            fetched=tuple(_part(part, "present") for part in to_fetch if part.name not in failures),
            installed=tuple(installed),
            skipped=tuple(skipped),
            limitations=tuple(dict.fromkeys(limitations)),
            errors=tuple(errors),
        )

    def check(self) -> CheckResult:
        store = Store.of(self.manifest)
        changed = {part.name: store.damaged(part) for part in self.manifest.parts}
        damaged = [f"{part.role}/{name}" for part in self.manifest.parts for name in changed[part.name]]
        missing = store.missing()
        notes = []
        for part in self.manifest.parts:
            if store.has(part):
                notes.append(f"{part.title}: {'changed' if changed[part.name] else 'intact'}")
            else:
                notes.append(f"{part.title}: missing" + ("" if part in missing else f"; without it {part.without}"))
        problems = [f"changed: {', '.join(damaged)}"] if damaged else []
        problems += [f"missing: {', '.join(part.name for part in missing)}"] if missing else []
        problems += [f"`omnistage pull {self.name}` fetches those again"] if problems else []
        for package in self.manifest.installed:
            state = installed_state(package)
            if state.ok:
                notes.append(f"{package.title}: {state.message}")
            else:
                problems.append(self._installed_problem(package, state.message))
        return CheckResult(tuple(notes), tuple(problems))

    def parts(self) -> list[BundlePart]:
        store = Store.of(self.manifest)
        fetched = [
            _part(part, "present" if store.has(part) else f"{part.megabytes} MB to fetch")
            for part in self.manifest.parts
        ]
        return fetched + [_installed_part(part, installed_state(part).message) for part in self.manifest.installed]

    def _judge(
        self, failures: dict[str, OmniError], store: Store
    ) -> tuple[list[OmniError], list[OmniError], list[str]]:
        """Failures as reasons to go on without a part and as errors, and what does not work without missing parts.

        A part that is optional may be unreachable; one that was changed is refused all the same.
        """
        skipped: list[OmniError] = []
        errors: list[OmniError] = []
        limitations: list[str] = []
        for part in self.manifest.parts:
            error = failures.get(part.name)
            if error is None:
                continue
            unavailable = isinstance(error, MissingDependencyError | UnreachableError)
            (skipped if unavailable and part.without is not None else errors).append(error)
            if part.without is not None and not store.has(part):
                limitations.append(part.without)
        return skipped, errors, limitations

    def _installed_problem(self, part: InstalledPart, message: str) -> str:
        return f"{part.title}: {message} (required: without it {self.name} does not load)"


def _no_progress(part: str, description: str, fraction: float | None) -> None:
    del part, description, fraction


def _part(part: Part, state: str) -> BundlePart:
    return BundlePart(part.name, part.title, f"{part.source}: {part.package} {part.version}", part.licence, state)


def _installed_part(part: InstalledPart, state: str) -> BundlePart:
    version = f" {part.version}" if part.version else ""
    return BundlePart(part.name, part.title, f"pip: {part.package}{version}", part.licence, state)
