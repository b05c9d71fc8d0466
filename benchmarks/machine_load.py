"""What else a machine is doing while something is measured on it."""

from __future__ import annotations

import os


def load() -> str:
    """The load averages; empty where the system does not say."""
    try:
        return " ".join(f"{value:.2f}" for value in os.getloadavg())
    except OSError:
        return ""
