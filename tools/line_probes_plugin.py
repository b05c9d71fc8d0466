"""`pytest -p tools.line_probes_plugin`: the session's coverage by probes, written to `.coverage`.

A plugin that `-p` names is imported before any conftest.py, in pytest-xdist's workers too: no module of the packages
may have been imported before it.
"""

from __future__ import annotations

import sys

import pytest

from tools.line_probes import Finder, Recorder, packages


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config), "omnistage-line-probes")


def _install() -> None:
    measured = packages()
    early = sorted(set(measured) & sys.modules.keys())
    if early:
        raise pytest.UsageError(f"{', '.join(early)} was imported before the probes; give -p tools.line_probes_plugin")
    sys.meta_path.insert(0, Finder(measured))


_install()
