"""The user's cache: weights that were fetched or converted, and what is made anew where it is missing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HOME_VARIABLE = "OMNISTAGE_HOME"
"""Environment variable: the folder for weights; default: the user's cache."""


def weights_home() -> Path:
    """The folder of all weights that this package fetches or writes."""
    path = os.environ.get(HOME_VARIABLE)
    if path:
        return Path(path).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "omnistage"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "omnistage"


def cache_folder(name: str) -> Path | None:
    """A folder of this package in the user's cache; None where it cannot be written."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omnistage" / name
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a user without a home, or one that is not theirs
        return None
    return folder if os.access(folder, os.W_OK) else None
