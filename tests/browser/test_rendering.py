"""How answers look on the page: lists and bold words, the view that follows, the timeline of what broke off."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.browser.harness import SLOW, ask, ended
from tests.browser.test_page import Hold, hold, use  # noqa: F401  (a fixture)


def test_headings_lists_and_bold_words_look_like_it(page: Page) -> None:
    use(page, "lm", max_tokens=2)
    ended(ask(page, "## Plan\nDo **this *now***:\n3. one\n   - deeper\n4. two * 2 * 2\n\n- a_b_c `**x**`\nDone"))
    said = page.locator(".bubble .said")
    expect(said.locator("h4")).to_have_text("Plan")
    expect(said.locator("strong")).to_have_text("this now")
    expect(said.locator("strong em")).to_have_text("now")
    expect(said.locator("ol")).to_have_attribute("start", "3")
    expect(said.locator("ol > li")).to_have_text(["onedeeper", "two * 2 * 2"])
    expect(said.locator("ol > li > ul > li")).to_have_text("deeper")
    expect(said.locator(":scope > ul > li")).to_have_text("a_b_c **x**")
    expect(said.locator("p").last).to_have_text("Done")


AT_END = """() => {
  const { scrollTop, scrollHeight, clientHeight } = document.getElementById("scroll");
  return scrollHeight > clientHeight + 100 && scrollHeight - scrollTop - clientHeight < 2;
}"""


def test_the_end_stays_in_view_until_the_user_scrolls_up(page: Page, hold: Hold) -> None:  # noqa: F811
    page.set_viewport_size({"width": 1280, "height": 480})
    use(page, "draw", size="64x64", steps=2)
    ended(ask(page, "A lighthouse"))
    page.wait_for_function(AT_END)  # a picture has its size only after it is decoded
    use(page, "lm", max_tokens=600)
    held = hold("lm", "thinker", 300)
    answer = ask(page, "Once upon a time")
    expect(answer.locator(".words")).not_to_be_empty(timeout=SLOW)
    page.wait_for_function(AT_END)
    page.locator("#scroll").evaluate("place => { place.scrollTop = 20 }")
    held.go.set()
    ended(answer)
    assert page.locator("#scroll").evaluate("place => place.scrollTop") == 20
    use(page, "lm", max_tokens=2)
    ended(ask(page, "Go on"))
    page.wait_for_function(AT_END)
    page.reload()
    expect(page.locator(".answer")).to_have_count(3)
    page.wait_for_function(AT_END)


def test_the_timeline_of_a_request_that_broke_off_stands_still(page: Page) -> None:
    shown = page.evaluate(
        """async () => {
          const { Timeline } = await import("/page/timeline.js");
          const timeline = new Timeline();
          const times = { submitted: 0, started: null, first_chunk: null, last_chunk: null, finish: null };
          const stage = { stage: "hear", ...times, chunks: 0, tokens: 0 };
          timeline.begin();
          timeline.update({ stages: { hear: stage }, now: 1, finished: null });
          const running = document.getElementById("timeline-note").textContent;
          timeline.end();
          const total = document.getElementById("timeline-total").textContent;
          await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
          const { textContent: ended } = document.getElementById("timeline-note");
          return [running, ended, document.getElementById("timeline-total").textContent === total, timeline.running];
        }"""
    )
    assert shown == ["Running", "Ended before a stage ran.", True, False]
