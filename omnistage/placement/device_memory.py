"""Tensors on a GPU between two processes of one machine: through device memory that both have mapped.

The sender owns one piece of memory a device and connection, allocated and shared by CUDA's driver. It copies a tensor
into a free region; the receiver, which maps the memory once, copies it out and says so. torch's own sharing would do
without the copies, but keeps memory, and files in /dev/shm, for ever where a process is killed in between.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

RING_BYTES = 128 * 2**20
"""Of device memory for each device and direction; a tensor for which there is no room goes through the host."""
MIN_BYTES = 64 * 1024
"""Smaller tensors go through the host: waiting for the device twice takes longer."""
_ALIGNMENT = 256
_LAZY_PEER_ACCESS = 1


class Regions:
    """Which parts of a piece of memory are free: first fit, freed in any order."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)]
        self._sizes: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """Where `size` bytes are free, from now on taken; None: nowhere."""
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        for index, (begin, room) in enumerate(self._free):
            if room >= size:
                self._free[index : index + 1] = [(begin + size, room - size)] if room > size else []
                self._sizes[begin] = size
                return begin
        return None

    def give_back(self, begin: int) -> None:
        size = self._sizes.pop(begin)
        merged: list[tuple[int, int]] = []
        for start, room in sorted([*self._free, (begin, size)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((start, room))
        self._free = merged

    @property
    def unused(self) -> bool:
        return not self._sizes


@dataclass(frozen=True, slots=True)
class Region:
    """A tensor's bytes in shared device memory, as the sender describes them."""

    device: str
    """The GPU's UUID: its number may differ between processes."""
    handle: str
    """CUDA's, in hexadecimal digits."""
    begin: int
    size: int


class DeviceMemory:
    """One end of a connection: what it shares with the other end, and what it has mapped of it. Thread-safe."""

    def __init__(self) -> None:
        self.peer_devices: frozenset[str] = frozenset()
        """GPUs that the other end uses: tensors on them arrive there, all others in host memory."""
        self._lock = threading.Lock()
        self._rings: dict[str, _Ring] = {}
        self._mappings: dict[str, _Mapping] = {}
        self._copied: list[Region] = []
        self._closed = False
        self._unusable: set[str] = set()

    def put(self, tensor: torch.Tensor) -> Region | None:
        """Copy a tensor to where the other end can read it; None where it has to go through the host."""
        device = device_id(tensor.device.index)
        if device not in self.peer_devices or tensor.nbytes < MIN_BYTES or tensor.nbytes > RING_BYTES:
            return None
        with self._lock:
            if self._closed:
                return None
            if device not in self._rings and not self._share(device, tensor.device.index):
                return None
            ring = self._rings[device]
            begin = ring.regions.take(tensor.nbytes)
        if begin is None:
            return None
        ring.write(begin, tensor)
        return Region(device, ring.handle, begin, tensor.nbytes)

    def _share(self, device: str, index: int) -> bool:
        """With the lock held: allocate memory on a device; whether there was some that can be shared."""
        if device in self._unusable:
            return False
        try:
            self._rings[device] = _Ring(index)
        except RuntimeError as error:
            _log.warning("no memory of a GPU can be shared with another process (%s); tensors go by the host", error)
            self._unusable.add(device)
            return False
        return True

    def shared(self, device: torch.device) -> str | None:
        """The GPU's UUID where the other end uses it, too."""
        return uuid if device.index is not None and (uuid := device_id(device.index)) in self.peer_devices else None

    def take(self, region: Region) -> torch.Tensor:
        """A copy of the bytes, complete; `copied` then tells the other end."""
        with self._lock:
            if region.handle not in self._mappings:
                self._mappings[region.handle] = _Mapping(device_index(region.device), region.handle)
            mapping = self._mappings[region.handle]
        data = mapping.read(region.begin, region.size)
        with self._lock:
            self._copied.append(region)
        return data

    def copied(self) -> tuple[Region, ...]:
        """Regions that were read since the last call."""
        with self._lock:
            regions, self._copied = tuple(self._copied), []
        return regions

    def give_back(self, regions: Iterable[Region]) -> None:
        """The other end has read these."""
        with self._lock:
            for region in regions:
                if (ring := self._rings.get(region.device)) is not None and ring.handle == region.handle:
                    ring.regions.give_back(region.begin)

    def close(self) -> None:
        """Free and unmap everything; the other end is gone, or will not use it any more."""
        with self._lock:
            self._closed = True
            shared: list[_Ring | _Mapping] = [*self._rings.values(), *self._mappings.values()]
            for each in shared:
                each.close()
            self._rings.clear()
            self._mappings.clear()


def used_devices() -> tuple[str, ...]:
    """UUIDs of the GPUs, if this process uses CUDA."""
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ()
    return tuple(device_id(index) for index in range(torch.cuda.device_count()))


def on_device(tensor: torch.Tensor, device: str) -> torch.Tensor:  # pragma: no cover  (needs CUDA)
    """A tensor that went through the host, complete on its GPU again."""
    import torch

    copy = tensor.to(f"cuda:{device_index(device)}")
    torch.cuda.current_stream(copy.device).synchronize()
    return copy


@cache
def device_id(index: int) -> str:
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


@cache
def device_index(device: str) -> int:
    import torch

    return next(index for index in range(torch.cuda.device_count()) if device_id(index) == device)


# ------------------------------------------------------------------------------------------- CUDA's driver


class _Bytes:
    """Device memory as the array interface describes it, for torch to make a tensor of."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3}


class _Ring:  # pragma: no cover  (needs CUDA)
    """Device memory that another process maps."""

    def __init__(self, index: int) -> None:
        import torch

        self.regions = Regions(RING_BYTES)
        self._stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        pointer, handle = ctypes.c_uint64(), (ctypes.c_char * 64)()
        with _context(index):
            _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(RING_BYTES))
            _call("cuIpcGetMemHandle", handle, pointer)
        self.handle = bytes(handle.raw).hex()
        self._pointer = pointer
        self._index = index
        self._bytes = torch.as_tensor(_Bytes(int(pointer.value), RING_BYTES), device=f"cuda:{index}")

    def write(self, begin: int, tensor: torch.Tensor) -> None:
        import torch

        self._stream.wait_stream(torch.cuda.current_stream(self._index))
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            self._bytes[begin : begin + flat.numel()].copy_(flat, non_blocking=True)
        self._stream.synchronize()

    def close(self) -> None:
        del self._bytes
        with _context(self._index):
            _call("cuMemFree_v2", self._pointer)


class _Mapping:  # pragma: no cover  (needs CUDA)
    """Device memory of another process."""

    def __init__(self, index: int, handle: str) -> None:
        import torch

        self._stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        pointer = ctypes.c_uint64()
        with _context(index):
            ipc_handle = _IpcHandle.from_buffer_copy(bytes.fromhex(handle))
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), ipc_handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        self._pointer = pointer
        self._index = index
        self._bytes = torch.as_tensor(_Bytes(int(pointer.value), RING_BYTES), device=f"cuda:{index}")

    def read(self, begin: int, size: int) -> torch.Tensor:
        import torch

        with torch.cuda.stream(self._stream):
            copy = self._bytes[begin : begin + size].clone()
        self._stream.synchronize()
        return copy

    def close(self) -> None:
        del self._bytes
        with _context(self._index):
            _call("cuIpcCloseMemHandle", self._pointer)


class _IpcHandle(ctypes.Structure):
    """Passed by value."""

    _fields_ = [("reserved", ctypes.c_char * 64)]


@contextmanager
def _context(index: int) -> Iterator[None]:  # pragma: no cover  (needs CUDA)
    """The device's context as torch uses it, current in this thread for calls of the driver."""
    import torch

    with torch.cuda.device(index):
        torch.cuda.mem_get_info(index)  # a call of the runtime makes it current
        yield


def _call(name: str, *arguments: object) -> None:  # pragma: no cover  (needs CUDA)
    code = getattr(_driver(), name)(*arguments)
    if code != 0:
        raise RuntimeError(f"CUDA error: {name} failed with code {code}")


@cache
def _driver() -> ctypes.CDLL:  # pragma: no cover  (needs CUDA)
    return ctypes.CDLL("libcuda.so.1")
