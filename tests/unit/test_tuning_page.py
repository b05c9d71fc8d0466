"""What docs/tuning.md tells people to set exists, and so does what it tells them to watch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from omnistage.config.layers import Layers
from omnistage.config.resolve import OmniEngineArgs, _dump, _stack, check
from omnistage.core.errors import ConfigError
from omnistage.models.registry import REGISTRY

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
KEY = re.compile(r"`([a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)+)(?:=([^`]+))?`")
STAGES = {"thinker": "qwen2_5_omni", "talker": "qwen2_5_omni", "token2wav": "qwen2_5_omni"}
STAGES |= {"encode": "flux", "denoise": "flux", "decode": "flux"}


def layers(family: str, *overrides: str) -> Layers:
    return _stack(OmniEngineArgs(model="any", overrides=overrides), REGISTRY.family(family), {}, Path("any"))


def keys() -> list[tuple[str, str | None]]:
    return sorted({(key, value or None) for key, value in KEY.findall(PAGE)}, key=str)


def test_there_are_keys_to_check() -> None:
    assert len(keys()) > 40


@pytest.mark.parametrize(("key", "value"), keys(), ids=str)
def test_every_key_exists_and_takes_the_value_that_is_shown(key: str, value: str | None) -> None:
    family = STAGES.get(key.partition(".")[0], "qwen2_5_omni")
    made = layers(family, *([f"{key}={value}"] if value is not None else []))
    config, _ = check(made.data, made.sources, REGISTRY)  # raises where the key or its value is wrong
    place: object = _dump(config)
    for part in made.locate(key):
        assert isinstance(place, dict)
        assert part in place, f"{key}: there is no {part}"
        place = place[part]


def test_a_key_that_does_not_exist_would_be_found() -> None:
    with pytest.raises(ConfigError, match="max_runing"):
        test_every_key_exists_and_takes_the_value_that_is_shown("thinker.max_runing", "4")


def test_every_metric_exists() -> None:
    source = (ROOT / "omnistage" / "server" / "observe" / "metrics.py").read_text(encoding="utf-8")
    # A name may be an f-string, like omnistage_cuda_memory_{name}_bytes.
    patterns = [re.sub(r"\{\w+\}", "[a-z]+", name) for name in re.findall(r'"(omnistage_[a-z0-9_{}]+)"', source)]
    known = re.compile(f"({'|'.join(patterns)})(_total)?")
    named = set(re.findall(r"`(omnistage_[a-z0-9_]+)`", PAGE))
    assert len(named) > 10
    assert {name for name in named if not known.fullmatch(name)} == set()


def test_the_options_exist() -> None:
    import typer.main

    from omnistage.cli import app

    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    assert set(re.findall(r"`(--[a-z-]+)`", PAGE)) <= known
