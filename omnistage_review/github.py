"""A pull request of GitHub, through the command `gh`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from omnistage_review.contents import decode, is_new_version, new_version
from omnistage_review.diff import MAX_DIFF_BYTES, parse_diff
from omnistage_review.model import Change, ChangedFile, ReviewError
from omnistage_review.processes import KILLED, TIMEOUT, Output, run
from omnistage_review.sources import MAX_FILE_BYTES, cut_note, git

MAX_FETCHED_FILES = 300
_STATUSES = {"removed": "deleted", "added": "added", "renamed": "renamed", "copied": "added"}


class _TooLarge(Exception):
    """GitHub does not give the diff of so large a pull request."""


def from_pull_request(number: int, repo: str | None, root: Path) -> Change:
    """Title, description, diff and new versions of a pull request."""
    if repo is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", repo) is None:
        raise ReviewError(f"--repo {repo!r} is not OWNER/NAME")
    options = ["--repo", repo] if repo else []
    fields = "number,title,body,url,headRefOid"
    view = _gh(["pr", "view", str(number), *options, "--json", fields], root, number).data
    try:
        about: dict[str, Any] = json.loads(view)
    except ValueError as error:
        raise ReviewError("gh printed something else than JSON; update it (https://cli.github.com)") from error
    change = Change(
        f"pull request #{number}",
        title=str(about.get("title") or ""),
        description=str(about.get("body") or ""),
        url=str(about.get("url") or ""),
    )
    place = f"repos/{repo or '{owner}/{repo}'}"
    try:
        output = _gh(["pr", "diff", str(number), *options, "--color", "never"], root, number)
        change.files = parse_diff(output.data.decode("utf-8", "replace"))
        if output.cut:
            change.notes.append(cut_note("the diff"))
    except _TooLarge:
        change.notes.append("GitHub gives no diff of so large a pull request; its files were read one by one")
        change.files = _listed_files(place, number, root, change.notes)
    _fetch_contents(change, place, number, str(about.get("headRefOid") or ""), root)
    return change


def _gh(arguments: list[str], root: Path, number: int) -> Output:
    try:
        output = run(["gh", *arguments], cwd=root, limit=MAX_DIFF_BYTES)
    except FileNotFoundError:
        raise ReviewError(
            "gh is not installed; install it from https://cli.github.com, or use --range BASE..HEAD or --diff FILE"
        ) from None
    if output.code == 0:
        return output
    error = output.error
    lowered = error.lower()
    if "diff exceeded" in lowered or "too_large" in lowered or "http 406" in lowered:
        raise _TooLarge
    if output.code == 4 or "gh auth login" in lowered or "authentication" in lowered or "http 401" in lowered:
        raise ReviewError("gh is not logged in; run `gh auth login`, or set GH_TOKEN")
    if "rate limit" in lowered or "http 429" in lowered:
        raise ReviewError(
            "GitHub's rate limit is used up; wait until it is reset (`gh api rate_limit`), or use --range"
        )
    if "could not resolve to a pullrequest" in lowered or "no pull requests found" in lowered:
        raise ReviewError(f"there is no pull request #{number} here; check the number and --repo")
    if "could not resolve to a repository" in lowered or "not a git repository" in lowered:
        raise ReviewError("gh found no repository; pass --repo OWNER/NAME")
    if output.code == KILLED:
        raise ReviewError(f"gh did not answer within {TIMEOUT:.0f} s; check the network, or use --range")
    last = error.splitlines()[-1] if error else f"exit status {output.code}"
    raise ReviewError(f"gh {arguments[0]} {arguments[1]} failed: {last}")


def _values(data: bytes) -> Iterator[Any]:
    """JSON values one after another, as `gh api --paginate` prints a page each."""
    text, decoder, at = data.decode("utf-8", "replace"), json.JSONDecoder(), 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        value, at = decoder.raw_decode(text, at)
        yield value


def _listed_files(place: str, number: int, root: Path, notes: list[str]) -> list[ChangedFile]:
    """The files of a pull request from GitHub's list of them; those without a patch are checked whole or not at all."""
    try:
        output = _gh(["api", "--paginate", f"{place}/pulls/{number}/files?per_page=100"], root, number)
        entries = [entry for page in _values(output.data) for entry in page]
    except (_TooLarge, ValueError):
        raise ReviewError(
            f"pull request #{number} is too large for GitHub's API; "
            f"run `gh pr checkout {number}` and use --range BASE..HEAD"
        ) from None
    files = []
    for entry in entries:
        path, patch = str(entry["filename"]), entry.get("patch")
        header = f"diff --git a/x b/x\n--- a/x\n+++ b/x\n{patch}\n" if patch else ""
        file = next(iter(parse_diff(header)), ChangedFile(path))
        file.path, file.old_path = path, entry.get("previous_filename")
        file.status = _STATUSES.get(str(entry.get("status")), "modified")
        if not patch:
            file.binary = not path.endswith((".py", ".pyi"))
            file.all_lines = file.status == "added"
            if file.status not in ("deleted", "renamed") and not file.all_lines:
                notes.append(f"{path}: GitHub gives no diff of this file; not checked")
        files.append(file)
    return files


def _fetch_contents(change: Change, place: str, number: int, head: str, root: Path) -> None:
    """New versions of the Python files: from the local repository where the commit is there, else from GitHub."""
    files = [file for file in change.files if file.path.endswith((".py", ".pyi")) and file.status != "deleted"]
    try:
        is_local = bool(head) and git(["cat-file", "-e", f"{head}^{{commit}}"], root).code == 0
    except ReviewError:
        is_local = False
    if len(files) > MAX_FETCHED_FILES and not is_local:
        change.notes.append(f"{len(files)} Python files changed; only {MAX_FETCHED_FILES} of them were fetched whole")
        files = files[:MAX_FETCHED_FILES]
    reason = ""
    for file in files:
        text = new_version(None, file)  # a diff that adds the file holds all of it
        if text is None and is_local:
            output = git(["cat-file", "blob", f"{head}:{file.path}"], root, limit=MAX_FILE_BYTES)
            text = decode(output.data, file.path) if output.code == 0 and not output.cut else None
        elif text is None and not reason:
            address = f"{place}/contents/{quote(file.path)}?ref=refs/pull/{number}/head"
            try:
                output = _gh(["api", "-H", "Accept: application/vnd.github.raw", address], root, number)
                text = decode(output.data, file.path)
            except (_TooLarge, ReviewError) as error:
                reason = str(error) or "too large"
                change.notes.append(f"files could not be fetched whole ({reason}); rules saw the diff only")
        if text is not None and is_new_version(text, file):
            file.text = text
