"""Shared set-up: torchvision's import is repaired before any test imports transformers."""

from omnistage.compat import prepare_torchvision

prepare_torchvision(required=False)

import gc  # noqa: E402
import inspect  # noqa: E402
import random  # noqa: E402
import secrets  # noqa: E402
from collections.abc import Iterator  # noqa: E402

import httpx  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

# An example may take any time: on cores that others use too, hypothesis' 200 ms fail now and then.
settings.register_profile("omnistage", deadline=None)
settings.load_profile("omnistage")
# httpx gives up after 5 seconds by default, which is too early beside other load; all its calls share these.
_timeouts = inspect.signature(httpx.get).parameters["timeout"].default
_timeouts.connect = _timeouts.read = _timeouts.write = _timeouts.pool = 120.0


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny networks gain nothing from threads, and wait long for each other's where the cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed get the same ones in every run: random weights sample an end, or anything else that a
    test does not expect, once in a hundred runs."""
    monkeypatch.setattr(secrets, "randbits", random.Random(0).getrandbits)


@pytest.hookimpl(trylast=True)  # once the terminal's reporter is there
def pytest_configure(config: pytest.Config) -> None:
    """Give the summary's lines room for the reason of a failure, also where there is no terminal."""
    writer = config.get_terminal_writer()
    writer.fullwidth = max(writer.fullwidth, 200)
    config.pluginmanager.register(_FailureNames(config), "omnistage-failure-names")


class _FailureNames:
    """Names a failure when it happens: the summary comes at the end, and not where a run is ended before."""

    def __init__(self, config: pytest.Config) -> None:
        self._reporter = config.pluginmanager.getplugin("terminalreporter")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self._reporter is not None:
            self._reporter.ensure_newline()
            self._reporter.write_line(f"failed: {report.nodeid}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse exceptions as parameters: one that was raised keeps its frames, and with them a service, to the end."""
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            for name, value in item.callspec.params.items():
                if isinstance(value, BaseException):
                    raise pytest.UsageError(f"{item.nodeid}: {name} is an exception; give a function that makes it")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take what was imported out of the garbage collector's sight: millions of objects that every pass went through."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()
