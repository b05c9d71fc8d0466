"""The user's cache, for what is found anew where it is missing."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path | None:
    """A folder of this package in the user's cache; None where it cannot be written."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omnistage" / name
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a user without a home, or one that is not theirs
        return None
    return folder if os.access(folder, os.W_OK) else None
