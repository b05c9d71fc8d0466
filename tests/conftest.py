"""Shared set-up: torchvision's import is repaired before any test imports transformers."""

from omnistage.compat import prepare_torchvision

prepare_torchvision(required=False)

from collections.abc import Iterator  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny networks gain nothing from threads, and wait long for each other's where the cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
