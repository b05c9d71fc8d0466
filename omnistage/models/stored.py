"""Tensors in safetensors files that are read straight to a GPU, in the threads of the callers.

A copy from a memory-mapped file to a GPU goes a page at a time through the driver's own small buffer: some 2 GB/s. Here
each thread reads into a pinned buffer while the last one is copied, which is bound by the memory or the disk.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omnistage.core.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_BUFFER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """Where a tensor lies in its safetensors file."""

    dtype: str
    """As the format spells it: `BF16`."""
    shape: tuple[int, ...]
    offset: int
    """From the beginning of the file."""
    num_bytes: int


def stored_entries(path: Path) -> dict[str, StoredEntry]:
    """The tensors of a file that safetensors' own reader has opened, and so checked."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    entries: dict[str, StoredEntry] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            entries[name] = StoredEntry(entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
    return entries


@dataclass(frozen=True, slots=True)
class _Source:
    path: Path
    entry: StoredEntry
    device: torch.device


class StoredTensor(Tensor):
    """Shape and dtype of a tensor in a file; indexing it reads it to its device, as `transformers` does in threads.

    Anything else that needs its data fails, for it is on the meta device.
    """

    source: _Source

    def __getitem__(self, index: Any) -> Tensor:
        return _read(self.source)[index]


def stored_tensor(path: Path, entry: StoredEntry, device: torch.device) -> StoredTensor:
    """A tensor of a file whose dtype is one of `DTYPES`, not read yet."""
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta").as_subclass(StoredTensor)
    tensor.source = _Source(path, entry, device)
    return tensor


def _read(source: _Source) -> Tensor:
    entry, device = source.entry, source.device
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=device)
    if tensor.nbytes != entry.num_bytes:
        raise CheckpointError(f"{source.path.name} has {entry.num_bytes} bytes for a tensor of {tensor.nbytes}")
    if entry.num_bytes:
        _buffers(device).read(source.path, entry.offset, tensor.view(-1).view(torch.uint8))
    return tensor


class _Buffers:
    """Two buffers of a thread: one is filled while the other is copied."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._device = device
        self._buffers = [torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=self._on_cuda) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]

    def read(self, path: Path, offset: int, target: Tensor) -> None:
        """Fill `target`, bytes, with those at `offset`; on a GPU the last copies may still be under way."""
        file = os.open(path, os.O_RDONLY)
        try:
            for first in range(0, len(target), _BUFFER_BYTES):
                self._buffers.reverse()
                self._copied.reverse()
                copied = self._copied[0]
                if copied is not None:  # pragma: no cover  (needs CUDA)
                    copied.synchronize()
                part = target[first : first + _BUFFER_BYTES]
                filled = self._buffers[0][: len(part)]
                _fill(file, filled, offset + first, path)
                part.copy_(filled, non_blocking=self._on_cuda)
                if self._on_cuda:  # pragma: no cover  (needs CUDA)
                    copied = self._copied[0] = copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
                    copied.record(torch.cuda.current_stream(self._device))
        finally:
            os.close(file)


def _fill(file: int, buffer: Tensor, offset: int, path: Path) -> None:
    view = buffer.numpy().data
    position = 0
    while position < len(view):
        count = os.preadv(file, [view[position:]], offset + position)
        if not count:
            raise CheckpointError(f"{path.name} ends before its last tensor; fetch the model again")
        position += count


_local = threading.local()


def _buffers(device: torch.device) -> _Buffers:
    """Those of this thread; they go with it."""
    by_device: dict[torch.device, _Buffers] = _local.__dict__.setdefault("by_device", {})
    if device not in by_device:
        by_device[device] = _Buffers(device)
    return by_device[device]
