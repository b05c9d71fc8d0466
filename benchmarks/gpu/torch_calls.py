"""Counting calls of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode


class TorchCalls(TorchFunctionMode):
    """Counts calls of torch from Python; what is inside of them, or of a replay, is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in ("__get__", "__len__"):  # a shape or a device is just read
            self.count += 1
        return func(*args, **(kwargs or {}))
