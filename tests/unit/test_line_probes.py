"""What probes see of a module is what coverage.py's tracing sees, lines and branches."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import coverage
import pytest
from coverage.parser import PythonParser

from tools import line_probes

SOURCE = '''"""A module."""

from __future__ import annotations
from __future__ import division

import contextlib
import functools


@functools.cache
def decorated(
    x: int,
) -> int:
    """A function."""
    return (
        x
        + 1
    )


class Thing:
    """A class."""

    size: int
    many = 3

    def grow(self) -> None:
        self.size = 2

    @classmethod
    @functools.cache
    def unused(cls) -> None:
        raise NotImplementedError


def branches(x):
    if x == 1:
        y = 1
    elif x == 2:
        y = 2
    elif x == 3: y = 3
    else:
        y = 4
    if x > 0:
        y += 1
    if x > 100:
        y += 1
    return y


def loops(n):
    total = 0
    for i in range(n):
        if i == 2:
            continue
        total += i
    for i in range(n):
        if i == 1:
            break
    else:
        total += 1
    while total > 3:
        total -= 1
    while True:
        total += 1
        if total > 5:
            return total


def handlers(kind):
    try:
        if kind is not None:
            raise kind("it")
        done = True
    except KeyError:
        done = 1
    except (ValueError, TypeError):
        done = 2
    else:
        done = 3
    finally:
        kind = None
    return done


def raises():
    x = 1
    x += undefined
    return x


def cases(value):
    match value:
        case 1:
            return "one"
        case [first, *_]:
            return first
        case _:
            pass
    return None


def manager(fails):
    with contextlib.suppress(KeyError):
        if fails:
            raise KeyError
        return 1
    return 2


def generator():
    yield 1
    yield 2


async def waits():
    async def numbers():
        yield 1

    async for n in numbers():
        n += 1
    return n


def never():
    for _ in ():
        pass
    return [x for x in range(3) if x]
'''
CALLS = """
decorated(1)
Thing().grow()
branches(1), branches(3)
loops(0), loops(4)
handlers(None), handlers(ValueError)
cases(1), cases([2, 3]), cases("x")
manager(True)
next(generator())
try:
    waits().send(None)
except StopIteration:
    pass
try:
    raises()
except NameError:
    pass
"""


def traced(path: Path) -> set[tuple[int, int]]:
    """The ways through the module as tracing sees them."""
    before = sys.gettrace()
    measured = coverage.Coverage(data_file=None, branch=True, include=[str(path)], config_file=False)
    measured.start()
    try:
        module: dict[str, object] = {}
        exec(compile(path.read_text(), str(path), "exec"), module)
        exec(CALLS, module)
    finally:
        measured.stop()
        sys.settrace(before)
    return set(measured.get_data().arcs(str(path)) or ())


def probed(path: Path) -> set[tuple[int, int]]:
    lines: dict[int, None] = {}
    module: dict[str, object] = {line_probes.NAME: lines}
    exec(line_probes.instrument(path.read_text(), str(path)), module)
    exec(CALLS, module)
    return line_probes.arcs_of(path.read_text(), lines)


def test_lines_and_branches_are_those_of_tracing(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(SOURCE)
    parser = PythonParser(text=SOURCE)
    parser.parse_source()
    found, expected = probed(path), traced(path)
    for what in (found, expected):
        assert what
    lines = [{parser.first_line(line) for way in ways for line in way if line > 0} for ways in (found, expected)]
    assert lines[0] & parser.statements == lines[1] & parser.statements
    splits = {start for start, count in parser.exit_counts().items() if count > 1}
    branches = [
        {way for way in parser.translate_arcs(ways) & parser.arcs() if way[0] in splits} for ways in (found, expected)
    ]
    assert branches[0] == branches[1]


def test_only_the_packages_to_measure_have_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("measured_package", "other_package"):
        (tmp_path / f"{name}.py").write_text("x = 1\nif x > 1:\n    x = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [line_probes.Finder(["measured_package"]), *sys.meta_path])
    import measured_package  # type: ignore[import-not-found]
    import other_package  # type: ignore[import-not-found]

    assert set(vars(measured_package)[line_probes.NAME]) == {1, 2, -2}
    assert line_probes.NAME not in vars(other_package)
    assert measured_package.__file__ == str(tmp_path / "measured_package.py")


def test_lines_of_all_workers_come_into_one_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "measured_parts"
    package.mkdir()
    for name in ("__init__", "both", "unused"):
        (package / f"{name}.py").write_text("x = 1\nif x:\n    x = 2\nx = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    both = str(package / "both.py")
    outputs = []
    for lines in ([1, 2], [2, -2, 4]):
        monkeypatch.setattr(line_probes, "LINES", defaultdict(dict, {both: dict.fromkeys(lines)}))
        worker = SimpleNamespace(workeroutput={})
        line_probes.Recorder(worker).pytest_sessionfinish()
        outputs.append(worker.workeroutput)
    monkeypatch.setattr(line_probes, "LINES", defaultdict(dict))
    session = line_probes.Recorder(SimpleNamespace())
    for output in outputs:
        session.pytest_testnodedown(SimpleNamespace(workeroutput=output))
    session.pytest_testnodedown(SimpleNamespace())  # a worker that crashed has sent nothing
    line_probes.write_data(tmp_path / "data", line_probes.LINES, ["measured_parts"])
    report = coverage.Coverage(data_file=str(tmp_path / "data"), branch=True, config_file=False)
    report.load()
    assert report.analysis2(both)[3] == [3]
    assert report.analysis2(str(package / "unused.py"))[3] == [1, 2, 3, 4]
