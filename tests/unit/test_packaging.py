"""What is distributed: a small wheel of code without weights, and one with the starter's weights."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import omnistage_review
from omnistage import __version__

ROOT = Path(__file__).parents[2]
STARTER = ROOT / "starter"
MAX_WHEEL_BYTES = 2 * 10**6


def builders(name: str) -> Any:
    """A module of the build backend, which the extra `dev` installs."""
    return pytest.importorskip(f"hatchling.builders.{name}", reason="needs hatchling, of the extra dev")


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def sources(folder: Path, pattern: str) -> set[str]:
    """Files of a package in the working tree, by their paths in the wheel."""
    return {path.relative_to(folder).as_posix() for path in folder.glob(pattern) if path.is_file()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of omnistage."""
    (path,) = (
        builders("wheel")
        .WheelBuilder(str(ROOT))
        .build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    )
    return Path(path)


@pytest.fixture(scope="module")
def starter_files() -> set[str]:
    """The files that go into the wheel of the starter; compressing its weights would take seconds."""
    return {file.distribution_path for file in builders("wheel").WheelBuilder(str(STARTER)).recurse_included_files()}


def test_the_wheel_is_small_and_holds_no_weights(wheel: Path) -> None:
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith((".safetensors", ".onnx", ".pt", ".pth", ".gguf"))] == []
    assert {name.partition("/")[0] for name in names} == {
        "omnistage",
        "omnistage_review",
        f"omnistage-{__version__}.dist-info",
    }


def test_the_wheel_holds_all_that_the_package_reads(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    pipelines, page = sources(ROOT, "omnistage/models/*/pipeline.yaml"), sources(ROOT, "omnistage/server/page/*")
    assert len(pipelines) > 5
    assert "omnistage/server/page/index.html" in page
    page = {name for name in page if not name.endswith(".pyc")}
    assert {"omnistage/py.typed", "omnistage/__main__.py", *pipelines, *page} <= names


def test_the_wheel_installs_the_commands(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entry_points = archive.read(f"omnistage-{__version__}.dist-info/entry_points.txt").decode()
    assert "omnistage = omnistage.__main__:main" in entry_points
    assert "omnistage-review = omnistage_review.cli:main" in entry_points
    assert "omnistage.families" not in entry_points


def test_the_starters_wheel_holds_its_weights_and_its_pipeline(starter_files: set[str]) -> None:
    weights = sources(STARTER, "omnistage_starter/draw_weights/**/*")
    assert len([name for name in weights if name.endswith(".safetensors")]) == 2
    assert {"omnistage_starter/pipeline.yaml", "omnistage_starter/py.typed", *weights} <= starter_files
    assert {name.partition("/")[0] for name in starter_files} == {"omnistage_starter"}


def test_the_starter_registers_through_the_entry_point_of_third_parties() -> None:
    starter = project(STARTER)
    assert starter["entry-points"]["omnistage.families"] == {"starter": "omnistage_starter.family:FAMILY"}
    assert any(name.startswith("omnistage[") for name in starter["dependencies"])
    assert project(ROOT)["optional-dependencies"]["starter"] == [starter["name"]]
    assert starter["version"] == __version__


def test_the_review_tool_has_the_version_of_the_package() -> None:
    assert omnistage_review.__version__ == __version__


def test_both_distributions_have_the_same_licence_text() -> None:
    assert (STARTER / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_sdist_holds_no_weights() -> None:
    names = {file.distribution_path for file in builders("sdist").SdistBuilder(str(ROOT)).recurse_included_files()}
    assert "omnistage/__init__.py" in names
    assert [name for name in names if name.startswith("starter/")] == []


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "omnistage", "--version"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == f"omnistage {__version__}\n"
