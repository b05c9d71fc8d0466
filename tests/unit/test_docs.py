"""What the pages say is true of the code: links, generated parts, quoted files, public names."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import omnistage

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def tool(name: str) -> ModuleType:
    if (folder := str(ROOT / "tools")) not in sys.path:  # where a script finds its neighbours when it is run
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# ------------------------------------------------------------------------------------------- public names


def test_every_public_name_resolves() -> None:
    for name in omnistage.__all__:
        assert getattr(omnistage, name) is not None
    assert omnistage.OmniLLM is omnistage.Omni


def test_dir_lists_the_public_names() -> None:
    assert set(omnistage.__all__) <= set(dir(omnistage))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Omnibus'"):
        omnistage.Omnibus  # noqa: B018


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, omnistage, omnistage.cli\n"
        "assert omnistage.__version__ and 'Omni' in dir(omnistage)\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'pydantic', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -------------------------------------------------------------------------------------------------- pages


LINKED = [*PAGES, *sorted((ROOT / "docs").glob("*/*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_every_page_is_linked_from_the_readme() -> None:
    readme = PAGES[0].read_text(encoding="utf-8")
    assert [page.name for page in PAGES[1:] if f"docs/{page.name}" not in readme] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_compile(page: Path) -> None:
    for language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            compile(code, page.name, "exec")


def test_the_configuration_reference_is_up_to_date() -> None:
    reference = tool("make_config_reference")
    page = reference.PAGE.read_text(encoding="utf-8")
    assert reference.updated(page) == page, "run python tools/make_config_reference.py"


def test_the_diagram_is_up_to_date() -> None:
    diagram = tool("make_pipeline_diagram")
    assert diagram.PICTURE.read_text(encoding="utf-8") == diagram.render(), "run python tools/make_pipeline_diagram.py"


def test_the_family_page_quotes_the_example_as_it_is() -> None:
    folder = ROOT / "examples" / "toy_family"
    page = (ROOT / "docs" / "adding_a_family.md").read_text(encoding="utf-8")
    quoted = 0
    for _, code in BLOCK.findall(page):
        head, _, body = code.partition("\n")
        if head.startswith("# ") and (folder / head[2:]).is_file():
            quoted += 1
            assert body.strip() in (folder / head[2:]).read_text(encoding="utf-8"), head
    assert quoted == 6


def test_the_sampling_page_lists_every_field_with_its_default() -> None:
    page = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    for params in (omnistage.SamplingParams, omnistage.CodecParams):
        for name, field in params.model_fields.items():
            default = "null" if field.default is None else str(field.default)
            shown = default.lower() if isinstance(field.default, bool) else default
            assert f"| `{name}` | {shown} |" in page, name


def test_the_error_codes_on_the_pages_exist() -> None:
    from omnistage.core import errors

    page = (ROOT / "docs" / "media.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+Error)` \| `(\w+)` \|", page, re.MULTILINE)
    assert rows
    for name, code in rows:
        assert getattr(errors, name).code == code


# ------------------------------------------------------------------------------------------------- limits


def bounds() -> dict[str, float | None]:
    """Every bound of the configuration and of `omnistage serve`, by its key, with its default."""
    from omnistage.cli.serve import ServiceOptions
    from omnistage.cli.serve_options import AccessOptions, MediaOptions
    from omnistage.config import DeploymentConfig, LimitsConfig
    from omnistage.media.limits import MediaLimits

    found: dict[str, float | None] = {}
    models = {"deployment": DeploymentConfig, "limits": LimitsConfig, "limits.media": MediaLimits}
    for path, model in models.items():
        found |= {f"{path}.{name}": field.default for name, field in model.model_fields.items()}
    for options in (ServiceOptions, AccessOptions, MediaOptions):
        for field in dataclasses.fields(options):
            found["--" + field.name.replace("_", "-")] = field.default
    return {key: value for key, value in found.items() if re.search(r"\bmax[_-]|[_-]max[_-]|[_-]seconds$", key)}


def test_the_table_of_limits_has_every_key_with_its_default() -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    section = page[page.index("\n## Limits") : page.index("\n## What it does not")]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")]
    found = bounds()
    assert len(found) > 25
    for key, default in found.items():
        row = next((row for row in rows if f"`{key}`" in row[1]), None)
        assert row is not None, f"{key} is not in the table of limits in docs/security.md"
        if default is not None:
            units = f"{default / 1e6:,.3g} MP", f"{default / 2**20:,.0f} MiB", f"{default / 2**30:,.0f} GiB"
            spellings = "|".join(map(re.escape, (f"{default:,.0f}", *units)))
            assert re.search(rf"(?<![\d,.])({spellings})\b", row[2]), f"{key}: {default} is not in {row[2]!r}"
