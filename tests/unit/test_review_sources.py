"""Where the review tool reads changes: diffs, ranges of commits, trees, and pull requests through a fake `gh`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from omnistage_review.cli import main
from omnistage_review.contents import decode, new_version
from omnistage_review.diff import parse_diff
from omnistage_review.model import ReviewError
from omnistage_review.sources import from_diff, from_range, from_tree

ROOT = Path(__file__).parents[2]

# ------------------------------------------------------------------------------------------------------- diffs

GIT_DIFF = r"""diff --git a/old name.py b/new name.py
similarity index 90%
rename from old name.py
rename to new name.py
--- a/old name.py
+++ b/new name.py
@@ -1,2 +1,2 @@
 a = 1
-b = 2
+b = 3
\ No newline at end of file
diff --git a/logo.png b/logo.png
index 1..2 100644
Binary files a/logo.png and b/logo.png differ
diff --git a/gone.py b/gone.py
deleted file mode 100644
--- a/gone.py
+++ /dev/null
@@ -1 +0,0 @@
--- looks like a header
diff --git "a/\303\244.py" "b/\303\244.py"
new file mode 100644
--- /dev/null
+++ "b/\303\244.py"
@@ -0,0 +1,2 @@
+x = 1
+++ y
diff --git a/mode.sh b/mode.sh
old mode 100644
new mode 100755
diff --git a/link.py b/link.py
new file mode 120000
--- /dev/null
+++ b/link.py
@@ -0,0 +1 @@
+/elsewhere/x.py
"""


def test_git_diffs_with_renames_binaries_deletions_and_quoted_paths() -> None:
    files = {file.path: file for file in parse_diff(GIT_DIFF)}
    assert list(files) == ["new name.py", "logo.png", "gone.py", "ä.py", "mode.sh", "link.py"]
    assert [file.status for file in files.values()] == ["renamed", "modified", "deleted", "added", "modified", "added"]
    renamed = files["new name.py"]
    assert (renamed.old_path, renamed.added_lines, renamed.removed) == ("old name.py", {2}, 1)
    assert files["logo.png"].binary
    assert files["link.py"].binary  # what it points to is not part of the change
    assert files["gone.py"].removed == 1
    assert files["ä.py"].hunks[0].new_lines == ("x = 1", "++ y")
    assert files["mode.sh"].size == 0


def test_quoted_paths_with_blanks_end_in_a_tab() -> None:
    text = '--- /dev/null\n+++ "b/a \\"b\\".py"\t\n@@ -0,0 +1 @@\n+x\n'
    assert [file.path for file in parse_diff(text)] == ['a "b".py']


def test_plain_diffs_of_several_files() -> None:
    text = "--- a.py\t2024-01-01\n+++ a.py\t2024-01-02\n@@ -1 +1 @@\n-x\n+y\n--- b.py\n+++ b.py\n@@ -3,0 +4 @@\n+z\n"
    assert [(file.path, file.added_lines) for file in parse_diff(text)] == [("a.py", {1}), ("b.py", {4})]


@pytest.mark.parametrize("text", ["", "\n", "hello\nworld\n", "@@ -1 +1 @@\n-x\n+y\n"])
def test_text_without_a_diff_has_no_files(text: str) -> None:
    assert parse_diff(text) == []


def test_a_diff_that_was_cut_keeps_what_is_there() -> None:
    (file,) = parse_diff("--- a.py\n+++ b.py\n@@ -1,9 +1,9 @@\n a\n+b\n")
    assert file.added_lines == {2}


def test_the_new_version_comes_from_the_old_one_and_the_diff() -> None:
    (file,) = parse_diff("--- a/m.py\n+++ b/m.py\n@@ -2,1 +2,2 @@\n-b\n+c\n+d\n@@ -4,0 +6,1 @@\n+f\n")
    new = "a\nc\nd\ne\nx\nf\n"
    assert new_version("a\nb\ne\nx\n", file) == new
    assert new_version(new, file) == new
    assert new_version("something else\n", file) is None
    assert new_version(None, file) is None


def test_bytes_are_decoded_as_python_does() -> None:
    assert decode(b"\xef\xbb\xbfx = 1\r\n", "m.py") == "x = 1\n"
    assert decode("# coding: latin-1\nx = 'ä'\n".encode("latin-1"), "m.py") == "# coding: latin-1\nx = 'ä'\n"
    assert decode(b"x = '\xff'\n", "m.py") == "x = '\ufffd'\n"
    assert decode(b"# coding: nonsense\n", "m.py") == "# coding: nonsense\n"
    assert decode(b"a\0b", "m.py") is None


def test_a_diff_file_is_completed_from_the_folder_and_not_from_outside_it(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "m.py").write_text("import torch\nx = torch.load(p)\n")
    (tmp_path / "outside.py").write_text("import torch\nx = torch.load(p)\n")
    hunk = "@@ -2,1 +2,1 @@\n-x = 1\n+x = torch.load(p)\n"
    diff = tmp_path / "change.diff"
    diff.write_text(f"--- a/m.py\n+++ b/m.py\n{hunk}--- a/../outside.py\n+++ b/../outside.py\n{hunk}")
    inside, outside = from_diff(str(diff), root).files
    assert inside.text == "import torch\nx = torch.load(p)\n"
    assert outside.text is None


def test_a_combined_diff_of_a_merge_is_said_not_to_be_checked(tmp_path: Path) -> None:
    diff = tmp_path / "merge.diff"
    diff.write_text("diff --cc m.py\n--- a/m.py\n+++ b/m.py\n@@@ -1,1 -1,1 +1,2 @@@\n  a\n++eval(b)\n")
    assert "use --range" in from_diff(str(diff), tmp_path).notes[0]


def test_diff_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ReviewError, match="cannot be read"):
        from_diff(str(tmp_path / "missing.diff"), tmp_path)
    (tmp_path / "text").write_text("hello\n")
    with pytest.raises(ReviewError, match="no unified diff"):
        from_diff(str(tmp_path / "text"), tmp_path)
    (tmp_path / "binary").write_bytes(b"\0\1")
    with pytest.raises(ReviewError, match="binary"):
        from_diff(str(tmp_path / "binary"), tmp_path)
    (tmp_path / "empty").write_text("")
    assert from_diff(str(tmp_path / "empty"), tmp_path).files == []


# ------------------------------------------------------------------------------------------------------ ranges


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(root: Path, message: str, files: dict[str, str | bytes]) -> str:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    git(root, "add", "-A")
    git(root, "commit", "-qm", message)
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """`main`, and `feature` that left it, merged it once and added a finding, a rename and a binary file."""
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    commit(root, "first", {"engine/pool.py": "import torch\n" + "a = 1\n" * 9, "engine/name.py": "b = 2\n" * 9})
    git(root, "checkout", "-qb", "feature")
    commit(
        root,
        "Load weights\n\nWhy: faster by 20 %.",
        {"engine/pool.py": "import torch\n" + "a = 1\n" * 9 + "x = torch.load(p)\n"},
    )
    git(root, "checkout", "-q", "main")
    commit(root, "main goes on", {"engine/other.py": "import pickle\nx = pickle.loads(d)\n"})
    git(root, "checkout", "-q", "feature")
    git(root, "merge", "-q", "--no-edit", "main")
    git(root, "checkout", "-q", "main")
    commit(root, "main goes on again", {"engine/late.py": "x = 1\n"})
    git(root, "checkout", "-q", "feature")
    git(root, "mv", "engine/name.py", "engine/renamed.py")
    commit(
        root, "rename, binary, latin-1", {"logo.bin": b"\0\1\2", "engine/odd.py": b"# coding: latin-1\nx = '\xe4'\n"}
    )
    return root


def test_a_range_is_what_the_branch_adds_without_what_it_merged(repository: Path) -> None:
    change = from_range("main..feature", repository)
    files = {file.path: file for file in change.files}
    assert set(files) == {"engine/pool.py", "engine/renamed.py", "engine/odd.py", "logo.bin"}
    assert files["engine/renamed.py"].status == "renamed"
    assert files["logo.bin"].binary
    assert files["engine/odd.py"].text == "# coding: latin-1\nx = 'ä'\n"
    assert "faster by 20 %" in f"{change.title}\n{change.description}"
    assert {file.path for file in from_range("main...feature", repository).files} == set(files)


def test_the_first_commit_and_an_empty_range_can_be_reviewed(repository: Path) -> None:
    first = git(repository, "rev-list", "--max-parents=0", "HEAD")
    assert len(from_range(f"{first}^..{first}", repository).files) == 2
    assert len(from_range(f"{first}~1..{first}", repository).files) == 2
    assert from_range("feature..feature", repository).files == []


def test_the_command_reviews_a_range_and_fails_on_what_it_should(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--root", str(repository), "--range", "main..feature"]
    assert main(arguments) == 0
    report = capsys.readouterr().out
    assert "`engine/pool.py:11` `torch.load` without weights_only=True" in report
    assert "engine/other.py" not in report
    assert main([*arguments, "--fail-on", "high"]) == 1
    baseline = repository / "baseline.json"
    assert main([*arguments, "--write-baseline", str(baseline)]) == 0
    assert main([*arguments, "--baseline", str(baseline), "--fail-on", "low"]) == 0


@pytest.mark.parametrize(
    ("spec", "message"),
    [("main", "is not a range"), ("main..nowhere", "no revision 'nowhere'"), ("--output=x..main", "not a revision")],
)
def test_ranges_that_do_not_exist_are_named(
    repository: Path, spec: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--root", str(repository), f"--range={spec}"]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_no_repository_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(tmp_path), "--range", "a..b"]) == 2
    assert "not a git repository" in capsys.readouterr().err


def test_a_tree_leaves_out_what_git_ignores(repository: Path) -> None:
    (repository / ".gitignore").write_text("build/\n")
    commit(repository, "ignore", {"kept.py": "x = 1\n"})
    (repository / "build").mkdir()
    (repository / "build" / "made.py").write_text("import pickle\npickle.loads(d)\n")
    paths = {file.path for file in from_tree(["."], repository).files}
    assert {"kept.py", "engine/pool.py"} <= paths
    assert "build/made.py" not in paths
    assert {file.path for file in from_tree(["build"], repository).files} == {"build/made.py"}  # asked for by name


def test_a_tree_follows_no_links(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text("import pickle\npickle.loads(d)\n")
    (repository / "link.py").symlink_to(tmp_path / "outside.py")
    assert "link.py" not in {file.path for file in from_tree(["."], repository).files}
    git(repository, "rm", "-rqf", "--cached", ".")
    (repository / ".git").rename(tmp_path / "no-git")
    assert "link.py" not in {file.path for file in from_tree(["."], repository).files}


# --------------------------------------------------------------------------------------- pull requests, fake gh

FAKE_GH = '''#!{python}
import json, os, sys
args, case = sys.argv[1:], os.environ["FAKE_GH_CASE"]
def fail(text, code=1):
    print(text, file=sys.stderr)
    sys.exit(code)
if case == "no login":
    fail("To get started with GitHub CLI, please run:  gh auth login", 4)
if case == "missing":
    fail("GraphQL: Could not resolve to a PullRequest with the number of 7. (repository.pullRequest)")
if case == "rate limit":
    fail("GraphQL: API rate limit exceeded for user ID 1.")
DIFF = """diff --git a/engine/pool.py b/engine/pool.py
--- a/engine/pool.py
+++ b/engine/pool.py
@@ -1,1 +1,2 @@
 import torch
+x = torch.load(p)
"""
if args[:2] == ["pr", "view"]:
    assert args[2:5] == ["7", "--repo", "owner/name"], args
    url = "https://github.com/owner/name/pull/7"
    print(json.dumps({{"title": "Load <b>weights</b>", "body": "", "url": url, "headRefOid": "0" * 40}}))
elif args[:2] == ["pr", "diff"]:
    if case in ("huge", "huger"):
        fail("could not find pull request diff: HTTP 406: Sorry, the diff exceeded the maximum number of lines (20000)")
    print(DIFF, end="")
elif args[0] == "api" and "/files" in args[-1]:
    if case == "huger":
        fail("gh: Server Error (HTTP 502)")
    patch = DIFF[DIFF.index("@@"):]
    print(json.dumps([{{"filename": "engine/pool.py", "status": "modified", "patch": patch}}]))
    print(json.dumps([{{"filename": "logo.png", "status": "added"}},
                      {{"filename": "engine/large.py", "status": "modified"}},
                      {{"filename": "gone.py", "status": "removed", "patch": "@@ -1 +0,0 @@\\n-x"}}]))
elif args[0] == "api" and "/contents/" in args[-1]:
    if case == "no contents":
        fail("gh: API rate limit exceeded (HTTP 403)")
    sys.stdout.write("import torch\\nx = torch.load(p)\\n")
else:
    fail("unexpected: %r" % args)
'''


@pytest.fixture
def gh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a fake `gh` at the front of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "gh"
    script.write_text(FAKE_GH.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def review_pull_request(root: Path, *more: str) -> int:
    return main(["--root", str(root), "--pr-number", "7", "--repo", "owner/name", *more])


def test_a_pull_request_is_reviewed(
    gh: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_GH_CASE", "success")
    assert review_pull_request(gh, "--format", "json", "--fail-on", "high") == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["title"], data["url"]) == ("Load <b>weights</b>", "https://github.com/owner/name/pull/7")
    assert [(item["rule"], item["path"], item["line"]) for item in data["findings"]] == [("SEC05", "engine/pool.py", 2)]
    assert data["notes"] == []


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no login", "gh auth login"),
        ("missing", "no pull request #7"),
        ("rate limit", "rate limit"),
        ("huger", "failed: gh: Server Error"),
    ],
)
def test_what_gh_refuses_is_said_in_a_line(
    gh: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str, message: str
) -> None:
    monkeypatch.setenv("FAKE_GH_CASE", case)
    assert review_pull_request(gh) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_huge_pull_request_is_read_file_by_file(
    gh: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_GH_CASE", "huge")
    assert review_pull_request(gh, "--format", "json") == 0
    data = json.loads(capsys.readouterr().out)
    assert [item["rule"] for item in data["findings"]] == ["SEC05"]
    assert {file["path"]: file["status"] for file in data["files"]} == {
        "engine/pool.py": "modified", "logo.png": "added", "engine/large.py": "modified", "gone.py": "deleted",
    }  # fmt: skip
    assert any("engine/large.py: GitHub gives no diff" in note for note in data["notes"])


def test_a_pull_request_whose_files_cannot_be_fetched_is_checked_by_its_diff(
    gh: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_GH_CASE", "no contents")
    assert review_pull_request(gh, "--format", "json") == 0
    data = json.loads(capsys.readouterr().out)
    assert [item["rule"] for item in data["findings"]] == ["SEC05"]
    assert any("rules saw the diff only" in note for note in data["notes"])


def test_without_gh_the_other_sources_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert review_pull_request(tmp_path) == 2
    assert "gh is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--pr-number", "0"], ["--pr-number", "x"], [], ["--range", "a..b", "--repo", "a/b"]]
)
def test_wrong_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "error" in capsys.readouterr().err


def test_a_repository_that_is_no_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(tmp_path), "--pr-number", "7", "--repo", "https://x"]) == 2
    assert "OWNER/NAME" in capsys.readouterr().err


def test_the_script_runs_without_an_installation_and_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("import torch\nx = torch.load(p)\n")
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['review_pr.py', '--tree', {str(tmp_path)!r}, '--fail-on', 'high']\n"
        "try:\n"
        f"    runpy.run_path({str(ROOT / 'tools' / 'review_pr.py')!r}, run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    print('status', stop.code, {'torch', 'omnistage', 'yaml', 'typer', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("status 1 set()\n")
