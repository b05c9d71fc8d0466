"""Token2wav's DiT on Triton gives what it gives on torch, in Triton's interpreter; on a GPU see `test_dit_cuda.py`."""

from __future__ import annotations

import json

import pytest
import torch

from omnistage.core.errors import ConfigError
from omnistage.engines.codec.kernels import use_triton
from tests.dit_harness import check
from tests.unit.interpreted import needs_triton, run_interpreted


@needs_triton
def test_the_layers_on_triton_are_those_on_torch() -> None:
    """At the edges of utterances, with short last blocks, kept rows and padding, guided or not."""
    child = run_interpreted("-m", "tests.dit_harness")
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    assert len(found) == 6
    check(found, 1e-5)


def test_triton_is_for_cuda_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "omnistage.engines.codec.kernels.triton_available"
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(module, lambda: True)
    assert use_triton("auto", cuda)
    assert not use_triton("auto", cpu)
    assert not use_triton("torch", cuda)
    monkeypatch.setattr(module, lambda: False)
    assert not use_triton("auto", cuda)
    with pytest.raises(ConfigError, match="use torch"):
        use_triton("triton", cpu)
    # Memory is planned for a device that need not be here.
    assert use_triton("triton", cuda, planned=True)
    assert use_triton("auto", cuda, planned=True) == (not torch.cuda.is_available())
    assert not use_triton("auto", cpu, planned=True)
    assert not use_triton("torch", cuda, planned=True)
