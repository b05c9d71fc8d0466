"""The sampling kernels in Triton's interpreter: `sampling_kernels.py` in a process of its own."""

from __future__ import annotations

from tests.unit.interpreted import needs_triton, run_interpreted

pytestmark = needs_triton


def test_the_kernels_sample_what_the_host_samples() -> None:
    child = run_interpreted("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/unit/sampling_kernels.py")
    assert child.returncode == 0, child.stdout + child.stderr
