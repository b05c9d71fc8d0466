"""`omnistage models`: families, types of transformers and pipelines of diffusers with their states."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from omnistage.cli import app
from omnistage.hf import transformers
from omnistage.models import catalogue
from omnistage.models._diffusers import loading
from omnistage.models.registry import REGISTRY


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["models", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def listed(*arguments: str) -> dict[tuple[str, str], dict[str, str]]:
    return {(row["kind"], row["name"]): row for row in json.loads(run(*arguments, "--json"))}


def test_families_and_every_type_of_the_installed_transformers_are_listed() -> None:
    rows = listed()
    assert ("family", "causal_lm") in rows
    types = {name for kind, name in rows if kind == "language model"}
    assert types == set(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert rows["language model", "llama"]["state"] == "exact"
    assert rows["language model", "mamba"]["state"] == "exact"
    assert rows["language model", "rwkv"]["state"] == "fallback"
    assert "only causal models" in rows["language model", "xlnet"]["reason"]


def test_types_with_media_are_listed_by_what_they_do() -> None:
    rows = listed()
    assert rows["image-text-to-text", "qwen2_5_vl"]["state"] == "exact"
    assert rows["speech to text", "whisper"]["state"] == "exact"
    assert {"text to speech"} <= {kind for kind, _ in rows}


def test_nothing_that_was_judged_is_served_wrong() -> None:
    assert not {row["state"] for row in listed().values()} & {"wrong", "crashed"}


def test_names_and_states_narrow_the_list_down() -> None:
    assert {name for kind, name in listed("SMOLLM", "--state", "exact") if kind == "language model"} == {"smollm3"}
    text = run("rwkv")
    assert "rwkv" in text
    assert "1 fallback" in text
    assert "llama" not in text


def test_a_type_that_is_not_in_the_table_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    monkeypatch.setitem(names, "brand_new", "BrandNewForCausalLM")
    assert listed("brand_new")["language model", "brand_new"]["state"] == catalogue.NOT_JUDGED


def test_another_release_than_the_judged_one_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "judged_release", lambda: "5.17.0")
    result = CliRunner().invoke(app, ["models", "llama"])
    assert "judged with transformers 5.17.0" in result.stderr


class _Base:
    """In the place of `DiffusionPipeline`."""

    _load_connected_pipes = False


class CallablePipeline(_Base):
    def __call__(self, prompt: str) -> None: ...


class DemandingPipeline(_Base):
    def __call__(self, prompt: str, depth_of_field: float) -> None: ...


class FluxPipeline(_Base):
    def __call__(self, prompt: str) -> None: ...


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    pipelines = (CallablePipeline, DemandingPipeline, FluxPipeline)
    fake = SimpleNamespace(DiffusionPipeline=_Base, OtherPipeline=object(), **{cls.__name__: cls for cls in pipelines})
    monkeypatch.setattr(loading, "diffusers", lambda: fake)


@pytest.mark.usefixtures("package")
def test_pipelines_are_a_familys_or_run_whole_or_are_refused_for_what_they_must_be_given() -> None:
    found = {entry.name: entry for entry in catalogue.pipelines(REGISTRY)}
    assert (found["FluxPipeline"].state, found["FluxPipeline"].reason) == ("family", "flux")
    assert found["CallablePipeline"].state == "whole"
    assert found["DemandingPipeline"].state == "refused"
    assert "depth_of_field" in found["DemandingPipeline"].reason
    assert set(found) == {"FluxPipeline", "CallablePipeline", "DemandingPipeline"}


def test_the_table_of_media_models_is_that_of_the_pages() -> None:
    path = Path(__file__).parents[2] / "tools" / "make_media_table.py"
    made = runpy.run_path(str(path))
    assert made["table"]() == catalogue.MEDIA_TABLE.read_text(encoding="utf-8"), f"run python tools/{path.name}"
