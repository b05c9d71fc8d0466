"""Weights that are read straight to a device are those of the mapped files, whatever their sizes and types."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from omnistage.config import ARStageConfig
from omnistage.core import checkpoint
from omnistage.core.errors import CheckpointError
from omnistage.core.family import LoadContext
from omnistage.hf import transformers
from omnistage.models import loading, stored
from omnistage.models.loading import Checkpoint, load_model
from omnistage.models.stored import stored_entries

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a.long": torch.randn(1000, generator=generator),
        "a.half": torch.randn(3, 7, generator=generator).to(torch.bfloat16),
        "a.scalar": torch.tensor(5.0),
        "a.nothing": torch.zeros(0, 4),
        "a.mask": torch.tensor([True, False, True]),
        "a.float8": torch.randn(8, generator=generator).to(torch.float8_e4m3fn),
        "b.ids": torch.arange(9).view(3, 3),
    }
    save_file(tensors, str(tmp_path / "model.safetensors"))
    return tmp_path


def test_tensors_are_read_when_they_are_indexed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_BUFFER_BYTES", 64)  # several of them for one tensor
    monkeypatch.setattr(stored, "_local", threading.local())
    for prefix in ("a.", "b."):
        mapped = Checkpoint(folder).tensors(prefix)
        lazy = Checkpoint(folder).tensors(prefix, CPU)
        assert mapped.keys() == lazy.keys()
        for name, tensor in mapped.items():
            assert lazy[name].shape == tensor.shape
            assert lazy[name].dtype == tensor.dtype
            assert lazy[name].is_meta == (name != "float8")  # a type that is not known is mapped as before
            assert torch.equal(lazy[name][...].float(), tensor.float())


def test_a_file_that_ends_early_is_named(folder: Path) -> None:
    tensor = Checkpoint(folder).tensors("a.", CPU)["long"]
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: stored_entries(path)["a.long"].offset + 8])
    with pytest.raises(CheckpointError, match=r"model\.safetensors ends before"):
        tensor[...]


def test_a_tensor_of_another_size_than_its_bytes_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    entry = stored_entries(path)["a.scalar"]
    tensor = stored.stored_tensor(path, stored.StoredEntry("F32", (2,), entry.offset, entry.num_bytes), CPU)
    with pytest.raises(CheckpointError, match="4 bytes for a tensor of 8"):
        tensor[...]


def test_a_model_loads_the_same_straight_to_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.float16).save_pretrained(tmp_path)
    plain = load_model(transformers.LlamaForCausalLM, config, Checkpoint(tmp_path).tensors(), CPU, torch.float32)
    monkeypatch.setattr(loading, "straight_to", lambda device: {"device_map": {"": device}})
    model = checkpoint.Checkpoint(tmp_path, {}, "toy", "toy")
    tensors = loading.read_weights(
        LoadContext(
            model, "toy", ARStageConfig(engine="autoregressive", component="toy", output="text"), CPU, torch.float32
        )
    )
    assert all(tensor.is_meta for tensor in tensors.values())
    straight = load_model(transformers.LlamaForCausalLM, config, tensors, CPU, torch.float32)
    assert plain.dtype == straight.dtype == torch.float32
    assert all(torch.equal(straight.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())


def test_only_pinned_buffers_are_copied_without_waiting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On other devices, like MPS, a buffer would be filled anew while it is still read."""
    waits: list[bool] = []
    copy = torch.Tensor.copy_

    def spy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        waits.append(not non_blocking)
        return copy(self, source, non_blocking)

    tensor = Checkpoint(folder).tensors("a.", CPU)["long"]
    monkeypatch.setattr(torch.Tensor, "copy_", spy)
    assert torch.equal(tensor[...], Checkpoint(folder).tensors("a.")["long"])
    assert waits == [True]
