"""The sampling kernels in Triton's interpreter, which holds for a whole process: the cases run in a child."""

from __future__ import annotations

import pytest

from tests.unit.interpreted import needs_triton, run_interpreted

pytestmark = needs_triton


@pytest.mark.parametrize("cases", ["sampling_kernels.py", "sampling_graphs.py"])
def test_the_kernels_sample_what_the_host_samples(cases: str) -> None:
    child = run_interpreted("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/unit/{cases}")
    assert child.returncode == 0, child.stdout + child.stderr
