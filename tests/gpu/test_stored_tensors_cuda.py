"""Weights that are read straight to a GPU are those of their files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from omnistage.models import stored
from omnistage.models.loading import Checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_threads_read_what_the_files_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_BUFFER_BYTES", 1 << 16)  # many copies are under way at once
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w.{i}": torch.randn(1000 + 77 * i, 33, generator=generator) for i in range(40)}
    save_file(tensors, str(tmp_path / "model.safetensors"))
    lazy = Checkpoint(tmp_path).tensors("", torch.device("cuda"))
    with ThreadPoolExecutor(4) as threads:
        read = dict(zip(lazy, threads.map(lambda tensor: tensor[...], lazy.values()), strict=True))
    assert all(tensor.is_cuda for tensor in read.values())
    assert all(torch.equal(read[name].cpu(), tensor) for name, tensor in tensors.items())
