"""A child process in which Triton's kernels are interpreted.

The interpreter is chosen when a kernel is defined and holds for the whole process.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run_interpreted(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, in the root of the repository. Only the test's own timeout ends it: what it takes
    depends on what else the machine does."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
