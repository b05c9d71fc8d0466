"""The CUDA stream that a stage computes on, beside those of the other stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


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

    def share(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that another stage's tensor is read on this stream."""
        if self.cuda is not None and tensor.is_cuda:
            tensor.record_stream(self.cuda)

    def synchronize(self) -> None:
        """Wait for all that was launched on it."""
        if self.cuda is not None:
            self.cuda.synchronize()
