"""One small random Qwen2.5-Omni for all end-to-end tests, and what they ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omnistage.config import OmniEngineArgs
from omnistage.models.qwen2_5_omni import tiny
from omnistage.omni import Omni
from omnistage.pipeline.build import EngineParts, build_parts
from tests.e2e.harness import SMALL_POOLS, assert_empty, open_door


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen") / "model"
    tiny.write(folder, seed=7)
    return folder


@pytest.fixture(scope="session")
def load(checkpoint: Path) -> Callable[..., EngineParts]:
    """Load the checkpoint anew, with overrides."""

    def parts(*overrides: str, folder: Path | None = None) -> EngineParts:
        model = str(folder or checkpoint)
        args = OmniEngineArgs(model=model, device="cpu", dtype="float32", overrides=(*SMALL_POOLS, *overrides))
        return build_parts(args, progress=False)

    return parts


@pytest.fixture(scope="session")
def _shared(load: Callable[..., EngineParts]) -> Iterator[Omni]:
    with open_door(load()) as omni:
        yield omni


@pytest.fixture
def omni(_shared: Omni) -> Iterator[Omni]:
    """The model behind its front door; after each test nothing may be left in it."""
    yield _shared
    assert_empty(_shared.orchestrator)
