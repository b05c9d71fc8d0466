"""The page before axe-core: no finding that keeps people out, in either theme, with everything that can be open."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.harness import Watched, ask, ended
from tests.browser.test_page import picture_file, use

FINDINGS = """async () => {
  const { violations } = await axe.run(document, { resultTypes: ["violations"] });
  const grave = violations.filter(({ impact }) => impact === "serious" || impact === "critical");
  return grave.flatMap(({ id, nodes }) => nodes.map(({ html }) => `${id}: ${html.slice(0, 160)}`));
}"""


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 820), ("light", 360)])
def test_axe_finds_nothing_serious(
    page: Page, watched: Watched, axe: str, tmp_path: Path, scheme: str, width: int
) -> None:
    watched.expected = ("400",)
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light", reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 800})
    page.evaluate(axe)  # as the debugger does: the page's own policy would not let it in
    assert page.evaluate(FINDINGS) == []
    use(page, "omni", "audio")
    page.locator("#file").set_input_files(picture_file(tmp_path))
    page.locator(".attachment").wait_for()
    ended(ask(page, "Look:\n```python\n# a comment\nprint('hello', 1)\n```"))
    page.locator("#model").select_option("draw")
    page.evaluate("document.getElementById('param-size').value = ''")
    if width > 980:
        page.locator("#param-size").fill("50x50")
        ended(ask(page, "A refusal"), "error")
        page.locator("#model").select_option("omni")
        page.locator("#show-past").click()
    page.locator("#file").set_input_files(picture_file(tmp_path))
    expect(page.locator(".attachment")).to_have_count(1)
    page.evaluate("document.getElementById('live').hidden = false")
    page.get_by_role("button", name="Edit this message").first.click()
    assert page.evaluate(FINDINGS) == []
    page.get_by_role("button", name="Cancel").click()
    for opener, closer in (("show-code", "code-close"), ("show-past", "hide-past"), ("show-panel", "hide-panel")):
        if width > 980 and opener != "show-code":
            continue
        page.locator(f"#{opener}").click()
        assert page.evaluate(FINDINGS) == []
        page.locator(f"#{closer}").click()
