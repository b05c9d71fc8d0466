"""Small checkpoints of every family, made once in a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.fixture(scope="module")
def folder_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The small checkpoint of a model type, by the function that the test's module has for it in `WRITERS`."""
    written: dict[str, Path] = {}

    def get(model_type: str) -> Path:
        if model_type not in written:
            torch.manual_seed(0)
            written[model_type] = folder = tmp_path_factory.mktemp("types") / model_type
            folder.mkdir()
            request.module.WRITERS[model_type](folder, model_type)
        return written[model_type]

    return get
