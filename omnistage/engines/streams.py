"""The CUDA stream that a stage computes on, beside those of the other stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache

import numpy as np
import torch

# The nearer to a listener or reader, the sooner: what upstream made early is late here. The lower number goes first.
PRIORITY = -1
FED_PRIORITY = -2
"""Of a language model that another one feeds while both run."""
CODEC_PRIORITY = -3


def avoid_attention_plans(device: torch.device) -> None:
    """Have torch attend without cuDNN in this process, where keys grow by one with each step.

    torch prefers cuDNN on Hopper, which prepares every length of keys for itself, in every thread anew: 50 ms for each
    token of a clip that Whisper writes down, where computing it takes 6. Pictures, whose lengths stay, ask for it.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


class DeviceStream:
    """A CUDA stream of a stage's own where its device is CUDA; nothing more than inference mode elsewhere."""

    def __init__(self, device: torch.device, *, priority: int = 0) -> None:
        self.cuda: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.cuda = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]

    def use(self) -> AbstractContextManager[object]:
        """Inference mode on the stream."""
        return torch.inference_mode() if self.cuda is None else self._use_cuda(self.cuda)

    @contextmanager
    def _use_cuda(self, stream: torch.cuda.Stream) -> Iterator[None]:  # pragma: no cover  (needs CUDA)
        with torch.inference_mode(), torch.cuda.stream(stream):
            yield

    def follow(self) -> None:
        """Begin nothing before all that the current stream was given so far is done."""
        if self.cuda is not None:
            self.cuda.wait_stream(torch.cuda.current_stream(self.cuda.device))

    def share(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that another stage's tensor is read on this stream."""
        if self.cuda is not None and tensor.is_cuda:
            tensor.record_stream(self.cuda)

    def mark(self) -> Download:
        """What tells when all that was launched on it so far is done."""
        return Download(stream=self.cuda)


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array as a tensor on `device`, without waiting for what runs there.

    To CUDA it goes through pinned memory, which is not given away again before the copy has been made. On the CPU it is
    the array's own memory.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def complete(device: torch.device) -> Iterator[None]:
    """What is computed within is there at the end of the block, and so are the tensors read that it was made of.

    For bridges: they run on no stage's stream, and the stages' streams wait for no other.
    """
    if device.type != "cuda":
        yield
        return
    stream = _bridge_stream(device)  # pragma: no cover  (needs CUDA)
    with torch.cuda.stream(stream):  # pragma: no cover
        yield
    stream.synchronize()  # pragma: no cover


@lru_cache
def _bridge_stream(device: torch.device) -> torch.cuda.Stream:  # pragma: no cover  (needs CUDA)
    return torch.cuda.Stream(device, priority=CODEC_PRIORITY)  # type: ignore[no-untyped-call]


class Download:
    """Tensors on their way to the host, behind what their stream runs: the current one, if none is given."""

    def __init__(self, *tensors: torch.Tensor, stream: torch.cuda.Stream | None = None) -> None:
        self._event: torch.cuda.Event | None = None
        self._copies = tensors
        if stream is not None or any(tensor.is_cuda for tensor in tensors):  # pragma: no cover  (needs CUDA)
            self._copies = tuple(
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            )
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream)

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Their copies, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies
