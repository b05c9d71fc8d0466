"""A small random Qwen2.5-Omni for all end-to-end tests, for some a Qwen3-Omni too, and what they ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omnistage.config import OmniEngineArgs
from omnistage.models.registry import REGISTRY
from omnistage.omni import Omni
from omnistage.pipeline.build import EngineParts, build_parts
from tests.e2e.harness import SMALL_POOLS, SPEECH_MODELS, SpeechModel, assert_empty, open_door


@pytest.fixture(scope="session")
def speech(request: pytest.FixtureRequest) -> SpeechModel:
    """The family of this test; `every_speech_model` names them all."""
    return SPEECH_MODELS[getattr(request, "param", "qwen2_5_omni")]


@pytest.fixture(scope="session")
def checkpoint(speech: SpeechModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(speech.family) / "model"
    tiny = REGISTRY.family(speech.family).tiny
    assert tiny is not None
    tiny(folder, seed=7)
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
