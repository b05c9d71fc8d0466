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


FITS = "[document.documentElement, document.body, document.getElementById('scroll')].every((e) => e.scrollWidth <= e.clientWidth)"
ASK = """
  const set = (id, value) => {
    const field = document.getElementById(id);
    field.value = value;
    field.dispatchEvent(new Event(id === "model" ? "change" : "input", { bubbles: true }));
  };
  set("model", MODEL);
  set("param-max_tokens", 3);
  set("prompt", "Hello");
  document.getElementById("composer").requestSubmit();
"""


def test_it_works_in_firefox(tab: Tab, server: Running, axe: str) -> None:
    tab.go(f"{server.url}/")
    tab.until("document.querySelector('#status[data-state=ready]') !== null")
    tab.run(ASK.replace("MODEL", "'lm'"))
    said = tab.until("document.querySelector('.answer[data-ended=done]')?.querySelector('.words').innerText")
    tab.run("document.getElementById('model').value = 'draw'; document.getElementById('model').dispatchEvent(new Event('change'))")
    tab.run("document.getElementById('param-steps').value = 2; document.getElementById('param-steps').dispatchEvent(new Event('input', { bubbles: true }))")
    tab.run("document.getElementById('prompt').value = 'A boat'; document.getElementById('composer').requestSubmit()")
    tab.until("document.querySelectorAll('.answer[data-ended=done]').length === 2")
    tab.go(f"{server.url}/")  # as a reload: the tab is the same
    tab.until("document.querySelectorAll('.answer[data-ended=done]').length === 2")
    assert tab.run("return document.querySelector('.answer .words').innerText") == said
    assert tab.until("document.querySelector('.picture img').naturalWidth") > 0
    tab.until("document.querySelector('#status[data-state=ready]') !== null")
    tab.run("document.getElementById('model').value = 'omni'; document.getElementById('model').dispatchEvent(new Event('change'))")
    tab.run("document.getElementById('talk').click()")
    tab.until("document.getElementById('live').dataset.state === 'listening'")
    tab.until("document.getElementById('live').dataset.heard === 'true'")  # Firefox's own test tone
    tab.run("document.getElementById('live-end').click()")
    tab.run(f"{axe}; return null")
    for width in (360, 820, 1280):
        tab.size(width, 800)
        assert tab.run(f"return {FITS}")
        assert tab.run(f"return await ({FINDINGS})()") == []
    assert tab.problems == []
