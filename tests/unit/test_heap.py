"""Freed memory of the C library's heap, which is kept for the next tensors where stages compute on the CPU."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from omnistage.core.memory import keep_heap
from omnistage.engines.ar import prepared_layers
from tests.parity.test_torchscript import component_of, stage_of

_PAGES = """
import resource
import torch
from omnistage.core.memory import keep_heap

faults = []
if {keep}:
    assert keep_heap()
for turn in range(16):
    held = [torch.ones(2 << 20) for _ in range(7)]  # 8 MiB each
    del held
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[7])
"""


def page_faults(*, keep: bool) -> int:
    """Pages that the kernel gives a process for eight turns of the same large tensors, once that has settled."""
    command = [sys.executable, "-c", _PAGES.format(keep=keep)]
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(command, capture_output=True, text=True, env=settings, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_memory_of_large_tensors_is_used_again() -> None:
    one_turn = 7 * (8 << 20) // 4096
    assert page_faults(keep=False) > one_turn
    assert page_faults(keep=True) < one_turn


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_thresholds_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_heap()


def test_stages_on_the_cpu_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(prepared_layers, "keep_heap", lambda: calls.append(True))
    stage_of(component_of("llama, grouped heads"), torchscript=False)
    assert calls
