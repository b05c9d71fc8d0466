"""Small checkpoints of every family, made once in a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnistage.models.registry import REGISTRY

Checkpoints = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """The small checkpoint of a family and variant with seed 0. Tests share it: who changes one, copies it first."""
    written: dict[tuple[str, str | None], Path] = {}

    def get(family: str, variant: str | None = None) -> Path:
        if (family, variant) not in written:
            folder = tmp_path_factory.mktemp(family) / (variant or "model")
            tiny = REGISTRY.family(family).tiny
            assert tiny is not None
            options: dict[str, Any] = {} if variant is None else {"variant": variant}
            tiny(folder, seed=0, **options)
            written[family, variant] = folder
        return written[family, variant]

    return get
