"""The rules of the review tool: what each finds, what it leaves alone, and only on changed lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from review_examples import EXAMPLES

from omnistage_review.analysis import Analysis, analyse, read_baseline, write_baseline
from omnistage_review.contents import decode
from omnistage_review.diff import parse_diff
from omnistage_review.model import Change, ChangedFile, Finding, ReviewError, Severity
from omnistage_review.registry import RULES

CHANGE_RULES = {"CFG01", "SUP01", "TST01"}  # over a change rather than a file: they have tests of their own


def review(text: str, path: str = "package/engine/module.py") -> Analysis:
    return analyse(Change("test", files=[ChangedFile(path, "modified", text=text, all_lines=True)], is_tree=True))


def rules_of(analysis: Analysis) -> list[str]:
    return [item.rule for item in analysis.findings]


CASES = [
    pytest.param(rule, path, text, fails, id=f"{rule}-{'fails' if fails else 'passes'}-{number}")
    for rule, (path, bad, good) in EXAMPLES.items()
    for fails, texts in ((True, bad), (False, good))
    for number, text in enumerate(texts)
]


@pytest.mark.parametrize(("rule", "path", "text", "fails"), CASES)
def test_a_rule_finds_its_failing_examples_and_no_passing_one(rule: str, path: str, text: str, fails: bool) -> None:
    analysis = review(text, path)
    assert analysis.notes == []
    assert (rule in rules_of(analysis)) is fails


def test_every_rule_has_a_failing_and_a_passing_example() -> None:
    assert set(EXAMPLES) | CHANGE_RULES == set(RULES)
    assert all(bad and good for _, bad, good in EXAMPLES.values())
    assert len(RULES) >= 25


def test_every_rule_says_why_and_how_to_fix_it() -> None:
    for rule in RULES.values():
        assert rule.title, rule.id
        assert rule.why.endswith("."), rule.id
        assert rule.fix.endswith("."), rule.id


def test_findings_name_the_line_the_severity_and_the_cause() -> None:
    (found,) = review("import pickle\n\nx = pickle.loads(data)\n").findings
    assert (found.line, found.severity, found.rule) == (3, Severity.HIGH, "SEC04")
    assert "pickle.loads" in found.message


def test_unchanged_lines_are_not_reported() -> None:
    diff = "--- a/m.py\n+++ b/m.py\n@@ -2,1 +2,2 @@\n x = pickle.loads(a)\n+y = pickle.loads(b)\n"
    (file,) = parse_diff(diff)
    file.text = "import pickle\nx = pickle.loads(a)\ny = pickle.loads(b)\n"
    assert [item.line for item in analyse(Change("test", files=[file])).findings if item.rule == "SEC04"] == [3]


def test_a_finding_on_several_lines_counts_when_any_of_them_changed() -> None:
    diff = "--- a/m.py\n+++ b/m.py\n@@ -3,1 +3,1 @@\n-    path,\n+    other,\n"
    (file,) = parse_diff(diff)
    file.text = "import torch\nx = torch.load(\n    other,\n)\n"
    assert rules_of(analyse(Change("test", files=[file]))) == ["SEC05"]


# ------------------------------------------------------------------------------------------------ suppression


def test_a_suppression_with_a_reason_hides_a_finding_and_is_counted() -> None:
    analysis = review("import pickle\nx = pickle.loads(d)  # review: allow[SEC04] our own child wrote it\n")
    assert analysis.findings == []
    ((finding, reason),) = analysis.suppressed
    assert (finding.rule, reason) == ("SEC04", "our own child wrote it")


def test_a_suppression_may_stand_in_comments_above() -> None:
    text = "import pickle\n# A long reason:\n# review: allow[SEC04] our own child wrote it\nx = pickle.loads(d)\n"
    assert review(text).findings == []


@pytest.mark.parametrize(
    ("comment", "rules"),
    [
        ("# review: allow[SEC04]", {"SEC04", "SUP01"}),
        ("# review: allow[] because", {"SEC04", "SUP01"}),
        ("# review: allow[SEC05] because", {"SEC04", "SUP01"}),
        ("# review: allow[SEC99] because", {"SEC04", "SUP01"}),
        ("# review: allow[SEC04, SEC05] because", {"SUP01"}),
    ],
)
def test_a_suppression_without_a_reason_or_effect_is_a_finding(comment: str, rules: set[str]) -> None:
    assert set(rules_of(review(f"import pickle\nx = pickle.loads(d)  {comment}\n"))) == rules


def test_a_suppression_inside_a_string_is_none() -> None:
    assert rules_of(review('import pickle\nx = pickle.loads("# review: allow[SEC04] because")\n')) == ["SEC04"]


def test_rules_over_a_change_can_be_suppressed_too() -> None:
    config = ChangedFile("models/p.yaml", text="a: 1  # TODO review: allow[CFG01]\n", all_lines=True)
    assert rules_of(analyse(Change("test", files=[config]))) == ["CFG01"]
    config.text = "a: 1  # TODO measure # review: allow[CFG01] users set it\n"
    assert rules_of(analyse(Change("test", files=[config]))) == []
    text = "# review: allow[TST01] the demo runs it\ndef f() -> int:\n    return 1\n"
    analysis = analyse(Change("test", files=[ChangedFile("package/pool.py", "added", text=text, all_lines=True)]))
    assert (analysis.findings, [reason for _, reason in analysis.suppressed]) == ([], ["the demo runs it"])


# --------------------------------------------------------------------------------------------------- baseline


def test_a_baseline_hides_known_findings_also_when_they_move(tmp_path: Path) -> None:
    path, line = tmp_path / "baseline.json", "x = pickle.loads(d)\n"
    write_baseline(path, review(f"import pickle\n{line}").findings)
    change = Change(
        "test", files=[ChangedFile("package/engine/module.py", text=f"import pickle\n\n{line}{line}", all_lines=True)]
    )
    analysis = analyse(change, read_baseline(path))
    assert (analysis.num_baseline, [item.line for item in analysis.findings]) == (1, [4])  # the second one is new


def test_a_broken_baseline_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    with pytest.raises(ReviewError, match="no such baseline"):
        read_baseline(path)
    path.write_text("[1]")
    with pytest.raises(ReviewError, match="not a baseline"):
        read_baseline(path)


# ----------------------------------------------------------------------------------------- rules over a change


def config_findings(path: str, text: str) -> list[Finding]:
    return analyse(Change("test", files=[ChangedFile(path, text=text, all_lines=True)])).findings


def test_a_todo_in_a_shipped_configuration_is_found() -> None:
    (found,) = config_findings("models/pipeline.yaml", "model: x\nsteps: 8  # TODO: measure\n")
    assert (found.rule, found.line) == ("CFG01", 2)
    assert config_findings("models/pipeline.yaml", "model: x\ntodo_list: 8\n") == []
    assert config_findings("tests/pipeline.yaml", "steps: 8  # TODO\n") == []


def test_a_new_module_needs_a_test_that_names_it() -> None:
    module = ChangedFile("package/engine/pool.py", "added", text="def f() -> int:\n    return 1\n", all_lines=True)
    assert rules_of(analyse(Change("test", files=[module]))) == ["TST01"]
    test = ChangedFile("tests/test_x.py", text="from package.engine import pool\n", all_lines=True)
    assert rules_of(analyse(Change("test", files=[module, test]))) == []
    modified = ChangedFile("package/engine/pool.py", "modified", text=module.text, all_lines=True)
    assert rules_of(analyse(Change("test", files=[modified]))) == []


# ------------------------------------------------------------------------------------------------- odd sources


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "x = 1",
        "\ufeffx = 1\n",
        "# -*- coding: latin-1 -*-\nx = 'ä'\n",
        "x = 1\r\ny = 2\r\n",
        "x = '\\d'\n",
        "\f\nx = 1\n",
    ],
)
def test_odd_files_are_read_in_silence(text: str, recwarn: pytest.WarningsRecorder) -> None:
    analysis = review(decode(text.encode("latin-1" if "latin" in text else "utf-8"), "m.py") or "")
    assert (analysis.findings, analysis.notes, list(recwarn)) == ([], [], [])


@pytest.mark.parametrize("text", ["def f(:\n", "x = \0", "(" * 5000, "def f[T: int = str](x): ...\nclass\n"])
def test_what_does_not_parse_is_noted(text: str) -> None:
    analysis = review(text)
    assert analysis.findings == []
    assert len(analysis.notes) == 1
    assert "module.py" in analysis.notes[0]


def test_a_carriage_return_alone_hides_no_code() -> None:
    (file,) = parse_diff("--- a/m.py\n+++ b/m.py\n@@ -1,1 +1,1 @@\n-# b\n+# a\n")
    file.text = "# a\rimport pickle\rx = pickle.loads(d)\n"
    analysis = analyse(Change("test", files=[file]))
    assert [(item.rule, item.line) for item in analysis.findings] == [("SEC04", 3)]
    assert "carriage returns" in analysis.notes[0]


def test_code_that_is_nested_too_deeply_is_noted() -> None:
    assert "cannot be parsed" in review("x = " + "1+" * 20000 + "1\n").notes[0]


def test_pieces_of_a_diff_are_checked_alone_where_the_file_is_not_at_hand() -> None:
    hunk = "     if ready:\n         a()\n+        time.sleep(1)\n+        b = torch.load(path)\n     else:\n"
    (file,) = parse_diff(f"--- a/m.py\n+++ b/m.py\n@@ -10,3 +10,5 @@ def f():\n{hunk}")
    analysis = analyse(Change("test", files=[file]))
    assert [(item.rule, item.line) for item in analysis.findings] == [("SEC05", 13)]
    assert "not at hand" in analysis.notes[0]
