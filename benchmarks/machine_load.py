"""The load of the machine during a measurement, and what a process took of it."""

from __future__ import annotations

import os
from pathlib import Path


def load() -> str:
    """The load averages; empty where the system has none."""
    try:
        return " ".join(f"{value:.2f}" for value in os.getloadavg())
    except OSError:
        return ""


def processor_seconds(pid: int) -> float:
    """That a process has had, from Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
