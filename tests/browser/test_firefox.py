"""The page in Firefox: asked, kept over a reload, live, and before axe-core. Where there is no Firefox it skips."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.firefox import Tab, firefox
from tests.browser.test_accessibility import FINDINGS
from tests.server.harness import Running


@pytest.fixture
def tab(server: Running) -> Iterator[Tab]:
    with firefox() as tab:
        yield tab
        tab.go("about:blank")  # before the server ends: the page keeps asking it for its gauges


FITS = """['html', 'body', '#scroll'].map((name) => document.querySelector(name))
  .every((place) => place.scrollWidth <= place.clientWidth)"""
READY = "document.querySelector('#status[data-state=ready]') !== null"


def fill(tab: Tab, **values: object) -> None:
    for name, value in values.items():
        tab.run(
            f"""const field = document.getElementById({name.replace("_", "-", 1)!r});
            field.value = {value!r};
            field.dispatchEvent(new Event("input", {{ bubbles: true }}));
            field.dispatchEvent(new Event("change", {{ bubbles: true }}));"""
        )


def click(tab: Tab, name: str) -> None:
    tab.run(f"document.getElementById({name!r}).click()")


def answers(tab: Tab, number: int) -> None:
    tab.until(f"document.querySelectorAll('.answer[data-ended=done]').length === {number}")


def test_it_works_in_firefox(tab: Tab, server: Running, axe: str) -> None:
    tab.go(f"{server.url}/")
    tab.until(READY)
    for number, (model, parameters) in enumerate((("lm", {"param_max_tokens": 3}), ("draw", {"param_steps": 2})), 1):
        fill(tab, model=model)
        fill(tab, prompt="A boat", **parameters)
        click(tab, "send")
        answers(tab, number)
    said = tab.run("return document.querySelector('.answer .words').innerText")
    tab.go(f"{server.url}/")
    answers(tab, 2)
    assert tab.run("return document.querySelector('.answer .words').innerText") == said
    tab.until("document.querySelector('.picture img').naturalWidth")
    tab.until(READY)
    fill(tab, model="omni")
    click(tab, "talk")
    tab.until("document.getElementById('live').dataset.state === 'listening'")
    tab.until("document.getElementById('live').dataset.heard === 'true'")  # Firefox's own test tone
    click(tab, "live-end")
    tab.run(f"{axe}; return null")
    for width in (360, 820, 1280):
        tab.size(width, 800)
        assert tab.run(f"return {FITS}")
        assert tab.run(f"return await ({FINDINGS})()") == []
    assert tab.problems == []
