"""Small checkpoints of any multimodal type, by the module that the coverage tool makes them with."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


@cache
def _module() -> ModuleType:
    path = Path(__file__).parents[1] / "tools" / "multimodal_checkpoints.py"
    spec = importlib.util.spec_from_file_location("multimodal_checkpoints", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["multimodal_checkpoints"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(model_type: str, folder: Path, **settings: Any) -> Path:
    """`settings` of its config differ from the small ones."""
    _module().write(model_type, folder, settings=settings)
    return folder
