"""The load of the machine during a measurement."""

from __future__ import annotations

import os


def load() -> str:
    """The load averages; empty where the system has none."""
    try:
        return " ".join(f"{value:.2f}" for value in os.getloadavg())
    except OSError:
        return ""
