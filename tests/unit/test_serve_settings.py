"""Options of `omnistage serve` that are worked out before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omnistage.cli.serve import overrides_by_model, speech_overrides
from omnistage.cli.serve_options import AccessOptions
from omnistage.core.errors import InvalidRequestError


def test_a_setting_is_for_all_models_or_for_one() -> None:
    given = ["deployment.device=cpu", "chat:talker.max_tokens=9", "draw:denoise.compile=true", "a.b=x:y"]
    assert overrides_by_model(given, ["chat", "draw"]) == {
        "chat": ["deployment.device=cpu", "talker.max_tokens=9", "a.b=x:y"],
        "draw": ["deployment.device=cpu", "denoise.compile=true", "a.b=x:y"],
    }


def test_a_setting_of_an_unknown_model_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="chat"):
        overrides_by_model(["film:a=b"], ["chat"])


@pytest.mark.parametrize(
    ("kind", "expected"), [("Qwen2_5OmniModel", ["token2wav.quality=fast"]), ("Qwen2ForCausalLM", [])]
)
def test_the_quality_of_speech_is_a_setting_of_the_stages_that_speak(
    tmp_path: Path, kind: str, expected: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [kind]}))
    assert speech_overrides(str(tmp_path), None, "fast") == expected


def test_names_count_only_where_nothing_else_guards() -> None:
    def names(host: str, authenticated: bool, *more: str) -> list[str] | None:
        return AccessOptions(allow_host=list(more)).allowed_hosts(host, authenticated=authenticated)

    assert names("127.0.0.1", False) == []
    assert names("localhost", False, "box") == ["box"]
    assert names("127.0.0.1", True) is None
    assert names("0.0.0.0", False) is None
    with pytest.raises(InvalidRequestError, match="--allow-host"):
        names("0.0.0.0", False, "box")
