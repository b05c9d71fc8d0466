"""CUDA graphs without CUDA: captures that are replayed by running their function again, and what calls do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import _C, Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class FakeCapture:
    """Captures calls by keeping them. What they read of the host is what it was when they were captured."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        """So many captures fail."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            with _C.DisableTorchFunction():  # one launch, whatever is in it
                run()

        replay()
        if self.failures:
            self.failures -= 1
            raise RuntimeError("operation not permitted when stream is capturing")
        replay()
        return replay


class HostTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operators that are given tensors of the host, which a captured call must not read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for value in tree_iter((args, kwargs)):
            if isinstance(value, Tensor) and value.device.type == "cpu":
                self.found.append(str(func))
        return func(*args, **(kwargs or {}))
