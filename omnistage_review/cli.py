"""The command `omnistage-review`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from omnistage_review import __version__
from omnistage_review.analysis import analyse, read_baseline, write_baseline
from omnistage_review.documentation import rules_page
from omnistage_review.github import from_pull_request
from omnistage_review.model import Change, ReviewError, Severity
from omnistage_review.outputs import FORMATS, SUFFIXES, printable
from omnistage_review.report import Report, build_report
from omnistage_review.sources import from_diff, from_range, from_tree

OK, FAILED, UNUSABLE = 0, 1, 2
_EPILOGUE = "Exit status: 0, or 1 with a finding of --fail-on or worse, or 2 where the change could not be read."


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a pull request")
    return int(text)


def _export(text: str) -> Path:
    if Path(text).suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r}: the name must end in .md, .json or .sarif")
    return Path(text)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        "omnistage-review", description="Reviews a change to PyTorch inference code.", epilog=_EPILOGUE
    )
    source = result.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--pr-number", type=_number, metavar="N", help="a pull request on GitHub, through the command gh"
    )
    source.add_argument(
        "--range", metavar="BASE..HEAD", help="what HEAD adds since it left BASE, in the local repository"
    )
    source.add_argument("--diff", metavar="FILE", help="a unified diff; - for standard input")
    source.add_argument("--tree", nargs="+", metavar="PATH", help="all files below these paths, every line of them")
    source.add_argument("--rules", action="store_true", help="print the documentation of all rules and exit")
    result.add_argument("--repo", metavar="OWNER/NAME", help="of the pull request; by default that of this folder")
    result.add_argument("--root", type=Path, default=Path(), metavar="DIR", help="the checkout; by default this folder")
    result.add_argument(
        "--format", choices=sorted(FORMATS), default="markdown", help="what is printed (default: markdown)"
    )
    result.add_argument(
        "--export", type=_export, action="append", default=[], metavar="FILE",
        help="write the report to FILE (.md, .json or .sarif) and print a summary; may be given several times",
    )  # fmt: skip
    result.add_argument(
        "--fail-on", choices=[level.value for level in Severity], help="exit with 1 from this severity on"
    )
    result.add_argument("--baseline", type=Path, metavar="FILE", help="findings that are known and not reported")
    result.add_argument(
        "--write-baseline", type=Path, metavar="FILE", help="write all findings as the baseline and exit"
    )
    result.add_argument("--version", action="version", version=f"omnistage-review {__version__}")
    return result


def _read(arguments: argparse.Namespace) -> Change:
    root: Path = arguments.root
    if not root.is_dir():
        raise ReviewError(f"--root {root}: no such folder")
    if arguments.pr_number is not None:
        return from_pull_request(arguments.pr_number, arguments.repo, root)
    if arguments.range is not None:
        return from_range(arguments.range, root)
    return from_diff(arguments.diff, root) if arguments.diff is not None else from_tree(arguments.tree, root)


def main(argv: Sequence[str] | None = None) -> int:
    command = parser()
    arguments = command.parse_args(argv)
    if arguments.repo and arguments.pr_number is None:
        command.error("--repo needs --pr-number")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a file name need not be in the terminal's encoding
    if arguments.rules:
        print(rules_page(), end="")
        return OK
    try:
        baseline = read_baseline(arguments.baseline) if arguments.baseline else frozenset[str]()
        change = _read(arguments)
        analysis = analyse(change, baseline)
        if arguments.write_baseline:
            write_baseline(arguments.write_baseline, analysis.findings)
            print(f"{len(analysis.findings)} findings written to {arguments.write_baseline}")
            return OK
        report = build_report(change, analysis)
        for path in arguments.export:
            path.write_text(FORMATS[SUFFIXES[path.suffix]](report), encoding="utf-8", errors="replace")
    except ReviewError as error:
        print(f"error: {error}", file=sys.stderr)
        return UNUSABLE
    except OSError as error:
        print(f"error: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return UNUSABLE
    try:
        print(_summary(report) if arguments.export else FORMATS[arguments.format](report), end="", flush=True)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    limit = Severity(arguments.fail_on).rank if arguments.fail_on else len(Severity)
    return FAILED if any(item.severity.rank >= limit for item in report.findings) else OK


def _summary(report: Report) -> str:
    counts = ", ".join(f"{report.count(level)} {level.value}" for level in reversed(Severity))
    lines = [
        f"{len(report.change.files)} files: {counts}; "
        f"{len(report.suppressed)} suppressed, {report.num_baseline} in the baseline"
    ]
    lines += [
        f"{item.path}:{item.line}: {item.rule} {item.message}"
        for item in report.findings
        if item.severity is Severity.HIGH
    ]
    lines += [f"note: {note}" for note in report.notes]
    lines.append(f"recommendation: {report.recommendation}")
    return "\n".join(map(printable, lines)) + "\n"
