"""How long a test waits for what must come. Only what hangs takes as long: other load makes anything slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

HANG_SECONDS = 300.0
"""Less than the session's `timeout`, so that the test itself says what did not come."""


def until(condition: Callable[[], bool], what: str = "it", timeout: float = HANG_SECONDS) -> None:
    """Wait for a condition of another thread; it fails loudly where it never comes true."""
    pause, give_up = threading.Event(), time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < give_up, f"{what} did not happen within {timeout} s"
        pause.wait(0.002)
