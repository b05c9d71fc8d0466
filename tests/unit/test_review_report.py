"""The reports of the review tool: what they say, and that Markdown, JSON and SARIF are well-formed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from markdown_it import MarkdownIt

from omnistage_review.analysis import analyse
from omnistage_review.areas import area_of
from omnistage_review.checklist import ITEMS, TOPICS, items_for
from omnistage_review.cli import main
from omnistage_review.documentation import guide_page, rules_page
from omnistage_review.model import Change, ChangedFile
from omnistage_review.outputs import to_json, to_markdown, to_sarif
from omnistage_review.registry import RULES
from omnistage_review.report import Report, build_report

ROOT = Path(__file__).parents[2]
BAD = "import pickle\nx = pickle.loads(d)\ny = pickle.loads(e)  # review: allow[SEC04] made by us\n"


def report_of(*files: ChangedFile, **about: Any) -> Report:
    change = Change("test", files=list(files), **about)
    return build_report(change, analyse(change))


def file(path: str, text: str = "x = 1\n", status: str = "modified") -> ChangedFile:
    return ChangedFile(path, status, text=text, all_lines=True)


def tokens(markdown: str) -> list[str]:
    return [token.type for token in MarkdownIt("commonmark", {"html": True}).enable("table").parse(markdown)]


# ------------------------------------------------------------------------------------------------------ contents


@pytest.mark.parametrize(
    ("path", "area"),
    [
        ("vllm/v1/core/sched/scheduler.py", "engine"),
        ("vllm/model_executor/layers/linear.py", "model executor"),
        ("vllm/multimodal/processing.py", "multimodal"),
        ("omnistage/engines/diffusion/stage.py", "diffusion"),
        ("vllm/worker/gpu_worker.py", "worker"),
        ("omnistage/config/schema.py", "config"),
        ("omnistage/server/http/app.py", "server"),
        ("tests/server/test_app.py", "tests"),
        ("docs/config.md", "docs"),
        ("setup.py", "other"),
    ],
)
def test_files_are_classified_by_area(path: str, area: str) -> None:
    assert area_of(path) == area


def test_the_checklist_holds_the_items_of_the_touched_areas_and_no_others() -> None:
    items = report_of(file("package/diffusion/step.py")).checklist
    assert items
    assert all("diffusion" in item.areas for item in items)
    assert [item for item in items_for(["docs"]) if item.topic != "tests"] == []


def test_a_high_finding_asks_for_changes_and_tests_that_are_missing_are_named() -> None:
    report = report_of(file("package/engine/pool.py", f"{BAD}def f():\n" + "    pass\n" * 12, "added"))
    assert report.recommendation == "request changes"
    assert report.reasons[0] == "1 finding of high severity"
    assert report.missing_tests == ("package/engine/pool.py",)
    assert "What problem does this solve? The description is empty." in report.questions


def test_a_small_tested_change_is_ready_for_a_human() -> None:
    files = (file("package/other.py", "def f() -> int:\n    return 1\n"), file("tests/test_other.py", "import other\n"))
    report = report_of(*files, description="Adds f, 3 ms faster.")
    assert report.recommendation == "ready for a human's approval"
    assert (report.level, report.missing_tests, report.missing_docs) == ("low", (), ())


def test_a_change_of_the_server_without_docs_is_named() -> None:
    text = "x = 1\n" * 20
    assert report_of(file("package/server/app.py", text)).missing_docs
    assert not report_of(file("package/server/app.py", text), file("docs/api.md")).missing_docs


def test_what_could_not_be_checked_is_said_and_forbids_approval() -> None:
    report = report_of(file("package/other.py", "def f(:\n"))
    assert report.recommendation == "review by hand"
    assert "not valid Python" in report.notes[0]
    assert "## Limits of this report" in to_markdown(report)


def test_more_findings_and_more_critical_areas_are_more_risk() -> None:
    docs, engine = report_of(file("docs/a.md")), report_of(file("package/engine/pool.py"))
    worse = report_of(file("package/engine/pool.py", BAD))
    assert docs.risk < engine.risk < worse.risk <= 100


def test_an_empty_change_is_nothing_to_review() -> None:
    report = report_of()
    assert report.recommendation == "nothing to review"
    assert "None." in to_markdown(report)


# ------------------------------------------------------------------------------------------------------- outputs


def test_the_markdown_renders_with_its_tables_and_links() -> None:
    report = report_of(file("package/engine/pool.py", BAD), title="A change", url="https://github.com/a/b/pull/1")
    text = to_markdown(report)
    html = MarkdownIt("commonmark").enable("table").render(text)
    assert "<h1>Review: A change</h1>" in html
    assert "<td>engine</td>" in html
    assert "<code>package/engine/pool.py:2</code>" in html
    assert html.count("<h3>SEC04 Pickle (high)</h3>") == 1
    assert "|" not in html


@pytest.mark.parametrize(
    "title",
    [
        "<script>alert(1)</script>",
        "a | b `c` *d* [e](http://f)",
        "x\n# injected",
        "![i](http://t/p.png)",
        "\x1b[31mred",
        "@team",
    ],
)
def test_titles_and_paths_of_strangers_stay_text(title: str) -> None:
    text = to_markdown(report_of(file(f"package/engine/{title}.py", BAD), title=title, description=title))
    found = tokens(text)
    assert "html_block" not in found
    assert found.count("heading_open") == text.count("\n#") + 1
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    assert "<script" not in html
    assert "<a " not in html
    assert "<img" not in html
    assert "\x1b" not in text


@pytest.mark.parametrize(
    "path",
    [
        "package/server/x\n# injected\n.py",
        "package/server/\\<img src=x>.py",
        "package/server/a`b``<img src=x>`c.py",
        "package/server/@team https://evil.example www.evil.example.py",
    ],
)
def test_no_part_of_the_report_makes_markup_of_a_path(path: str) -> None:
    text = to_markdown(report_of(file(path, "def f() -> int:\n" + "    x = 1\n" * 12, "added"), file("b.py", "f(:")))
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    assert "<img" not in html
    assert "<h1>injected" not in html
    missing = text[text.index("## Missing docs") : text.index("## Checklist")]
    assert "@team" not in missing
    assert "://" not in missing
    assert "www." not in missing


def test_a_message_with_code_of_a_stranger_makes_no_markup() -> None:
    text = to_markdown(report_of(file("package/engine/m.py", "eval('a`b``<img src=x>`c' + d)\n")))
    assert "SEC07" in text
    assert "<img" not in MarkdownIt("commonmark", {"html": True}).render(text)


def test_a_path_with_a_bar_is_shown_as_it_is() -> None:
    html = MarkdownIt("commonmark").enable("table").render(to_markdown(report_of(file("package/engine/a|b.py", BAD))))
    assert "<code>package/engine/a|b.py:2</code>" in html


def test_suppressed_findings_are_listed_with_their_reasons() -> None:
    text = to_markdown(report_of(file("package/engine/pool.py", BAD)))
    assert "## Suppressed\n\n- `package/engine/pool.py:3` SEC04: made by us\n" in text


def test_binary_files_are_named_as_not_checked() -> None:
    report = report_of(ChangedFile("package/engine/pool.py", binary=True))
    assert report.notes == ("1 binary files, links or submodules were not checked: package/engine/pool.py",)
    assert report.recommendation == "review by hand"


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft4Validator:
    """The schema of SARIF 2.1.0 as Microsoft's jest-sarif ships it (MIT licence)."""
    return jsonschema.Draft4Validator(
        json.loads((ROOT / "tests/unit/sarif-2.1.0-rtm.5.json").read_text(encoding="utf-8"))
    )


def test_sarif_validates_against_its_schema(schema: jsonschema.Draft4Validator) -> None:
    strange = file("package/engine/a b%ä.py", BAD)
    report = report_of(file("package/engine/pool.py", BAD), strange, file("package/x.py", "def f(:\n"))
    log = json.loads(to_sarif(report))
    assert [error.message for error in schema.iter_errors(log)] == []
    (run,) = log["runs"]
    assert [result["level"] for result in run["results"]] == ["error"] * 4
    assert sum("suppressions" in result for result in run["results"]) == 2
    assert run["results"][0]["locations"][0]["physicalLocation"]["region"] == {"startLine": 2}
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == set(RULES)
    assert len(run["invocations"][0]["toolExecutionNotifications"]) == 1


def test_the_schema_refuses_a_broken_log(schema: jsonschema.Draft4Validator) -> None:
    log = json.loads(to_sarif(report_of(file("package/engine/pool.py", BAD))))
    log["runs"][0]["results"][0]["level"] = "terrible"
    assert not schema.is_valid(log)


def test_json_holds_what_the_markdown_says() -> None:
    data = json.loads(to_json(report_of(file("package/engine/pool.py", BAD))))
    (found,) = data["findings"]
    assert (found["rule"], found["line"], found["severity"]) == ("SEC04", 2, "high")
    assert found["why"] == RULES["SEC04"].why
    assert data["suppressed"][0]["reason"] == "made by us"
    assert data["recommendation"] == "request changes"


def test_the_summary_prints_no_control_sequences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a\nb\x1b[31m.py").write_text(BAD)
    assert main(["--root", str(tmp_path), "--tree", ".", "--export", str(tmp_path / "r.sarif")]) == 0
    out = capsys.readouterr().out
    assert "a b [31m.py:2: SEC04" in out
    assert "\x1b" not in out


def test_exports_are_chosen_by_their_suffix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.py").write_text(BAD)
    exports = [tmp_path / f"report.{suffix}" for suffix in ("md", "json", "sarif")]
    arguments = [word for path in exports for word in ("--export", str(path))]
    assert main(["--root", str(tmp_path), "--tree", "m.py", *arguments]) == 0
    assert "m.py:2: SEC04" in capsys.readouterr().out
    assert exports[0].read_text().startswith("# Review")
    assert json.loads(exports[1].read_text())["findings"]
    assert json.loads(exports[2].read_text())["version"] == "2.1.0"
    with pytest.raises(SystemExit):
        main(["--tree", "m.py", "--export", "report.pdf"])


# ---------------------------------------------------------------------------------------------------------- docs


@pytest.mark.parametrize(("name", "page"), [("rules.md", rules_page()), ("guide.md", guide_page())])
def test_the_pages_are_those_that_the_tool_makes(name: str, page: str) -> None:
    written = (ROOT / "docs" / "review" / name).read_text(encoding="utf-8")
    assert written == page, "run python tools/make_review_docs.py"


def test_every_rule_is_in_the_guide_and_every_topic_has_items() -> None:
    assert {name for item in ITEMS for name in item.rules} == set(RULES)
    assert {item.topic for item in ITEMS} == set(TOPICS) == {rule.topic for rule in RULES.values()} | set(TOPICS)
    assert all(any(not item.rules for item in ITEMS if item.topic == topic) for topic in TOPICS)


def test_our_own_tree_has_no_high_finding(capsys: pytest.CaptureFixture[str]) -> None:
    folders = ["omnistage", "omnistage_review", "starter", "tools", "benchmarks", "examples", "training"]
    assert main(["--root", str(ROOT), "--tree", *folders, "--fail-on", "high"]) == 0, capsys.readouterr().out
