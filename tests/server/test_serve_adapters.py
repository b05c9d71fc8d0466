"""`--adapter-folder` of a service with several models: it is for those that take adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omnistage import omni
from omnistage.cli.options import ModelOptions
from omnistage.cli.serve import _load
from omnistage.config.resolve import OmniEngineArgs, resolve
from omnistage.core.errors import ConfigError
from omnistage.models.registry import REGISTRY
from tests.server.harness import make

Load = Callable[[dict[str, Path]], dict[str, "_Opened"]]


class _Opened:
    """A model as far as its configuration."""

    memory: tuple[object, ...] = ()
    start_times = "at once"

    def __init__(self, folder: str, *, overrides: list[str], **_options: Any) -> None:
        args = OmniEngineArgs(model=folder, overrides=tuple(overrides))
        self.deployment = resolve(args, registry=REGISTRY).config.deployment


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Load:
    """The models of a service with `--adapter-folder`, by their names."""
    monkeypatch.setattr(omni, "AsyncOmni", _Opened)

    def run(folders: dict[str, Path]) -> dict[str, _Opened]:
        models: dict[str, _Opened] = {}
        service: Any = SimpleNamespace(add=models.__setitem__, report_loading=print, models={})
        overrides = {name: [f'deployment.adapter_folders=["{tmp_path}"]'] for name in folders}
        imports: Any = SimpleNamespace(finish=lambda: None)
        _load(service, {name: str(folder) for name, folder in folders.items()}, overrides, ModelOptions(), imports)
        return models

    return run


def test_models_without_adapters_are_served_beside_one_that_takes_them(load: Load, tmp_path: Path) -> None:
    models = load({"vectors": make("text_encoder", tmp_path / "vectors"), "chat": make("causal_lm", tmp_path / "chat")})
    assert models["chat"].deployment.adapter_folders == (str(tmp_path),)
    assert models["vectors"].deployment.adapter_folders == ()


def test_a_model_without_adapters_alone_refuses_their_folder(load: Load, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no stage that takes adapters") as refused:
        load({"vectors": make("text_encoder", tmp_path / "vectors")})
    assert refused.value.param == "deployment.adapter_folders"
