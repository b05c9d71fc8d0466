"""Small repairs of the environment that a third-party package needs before it can be imported."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import threading

import torch

from omnistage.core.errors import MissingDependencyError

_IMPORT_NOISE = (
    ("torchao", "Failed to load"),
    ("torch.utils._pytree", "is an Enum subclass"),
    ("diffusers.quantizers.torchao.torchao_quantizer", "Unable to import"),
)
"""Loggers, and what they say of torchao when it is imported: which kernels for GPUs a CPU's torch cannot load, and what
torch and diffusers would like it to have. transformers and diffusers import it wherever it is installed."""
_lock = threading.Lock()
_library: torch.library.Library | None = None  # a Library takes its operators back when it is collected


def silence_torchao() -> None:
    """Leave out of logs what importing torchao says to its authors."""
    for name, text in _IMPORT_NOISE:
        logger = logging.getLogger(name)
        if not logger.filters:
            logger.addFilter(lambda record, text=text: text not in str(record.msg))  # type: ignore[misc]


def prepare_torchvision(*, required: bool = True) -> None:
    """Make `import torchvision` work even where its compiled extension does not load.

    torchvision refuses to import when its extension cannot be loaded beside the installed torch (its CUDA build next
    to a CPU torch, for one), although the transforms that processors use are plain torch. The two operators that its
    import looks up are then declared, without a kernel: calling one still raises. With a matching torchvision this is
    a plain import. Safe to call often and from any thread.

    Call it before a model class is imported from transformers: wherever torchvision is installed, each of them imports
    it. Without torchvision it raises, or does nothing where it is not `required`.
    """
    global _library
    with _lock:
        if "torchvision" in sys.modules:
            return
        if importlib.util.find_spec("torchvision") is None:
            if not required:
                return
            raise MissingDependencyError(
                "torchvision is needed to prepare images and video: pip install 'omnistage[qwen]'"
            )
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            if hasattr(torch.ops.torchvision, "nms"):
                raise  # its operators are there: this failure is another one
            # The failed import leaves submodules behind that remember it.
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
            _library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
            for operator in ("nms", "qnms"):
                schema = f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                _library.define(schema)  # type: ignore[no-untyped-call]
            importlib.import_module("torchvision")


def import_without(package: str, module: str) -> None:
    """Import `module` as if `package` were not installed; nothing where that is not, or is imported already."""
    with _lock:
        if package in sys.modules or importlib.util.find_spec(package) is None:
            return
        sys.modules[package] = None  # type: ignore[assignment]  # what Python takes for "there is none"
        try:
            importlib.import_module(module)
        finally:
            del sys.modules[package]
