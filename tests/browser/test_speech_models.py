"""The page with other speech models: Qwen3-Omni as with Qwen2.5-Omni, one that thinks, and one that only speaks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from omnistage.omni import AsyncOmni
from tests.browser.harness import Watched, ask, ended
from tests.browser.test_page import (  # noqa: F401  (the same tests, with the models below)
    CHAT,
    hold,
    test_a_picture_goes_along,
    test_speech_is_scheduled_without_a_gap,
    test_the_microphone_is_heard,
    test_the_timeline_fills_while_the_request_runs,
    use,
)
from tests.server.harness import SERVE_LIMITS, make
from tests.server.test_reasoning import script  # noqa: F401

OVERRIDES = {
    "omni": ("talker.max_tokens=40", "code2wav.max_hold_seconds=0"),
    "thinking": (),
    "csm": ("backbone.max_tokens=12", "codec.max_hold_seconds=0"),
    "lm": ("thinker.ignore_eos=true",),
}


@pytest.fixture(scope="module", autouse=True)  # before the browser, whose loop would be in the way at the end
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, AsyncOmni]]:
    place = tmp_path_factory.mktemp("page")
    made = {}
    for name, limits in OVERRIDES.items():
        family = {"csm": "csm", "lm": "causal_lm"}.get(name, "qwen3_omni_moe")
        folder = make(family, place / name, **({"variant": name} if name == "thinking" else {}))
        overrides = (*SERVE_LIMITS, *limits)
        made[name] = AsyncOmni(folder, device="cpu", dtype="float32", overrides=overrides, progress=False)
    yield made
    for omni in made.values():
        asyncio.run(omni.shutdown(drain=False))


def test_reasoning_can_be_opened_and_is_no_part_of_the_answer(page: Page, script: list[str]) -> None:  # noqa: F811
    script += ["Hm", ".", "</think>", "It", " rains."]
    use(page, "thinking", max_tokens=5, temperature=0)
    answer = ask(page, "Weather in Rome?")
    ended(answer)
    expect(answer.locator(".words")).to_have_text("It rains.")
    expect(answer.locator(".reasoning")).to_be_hidden()
    answer.locator("summary").click()
    expect(answer.locator(".reasoning")).to_have_text("Hm.")


def test_a_text_is_spoken_as_it_is(page: Page, watched: Watched) -> None:
    use(page, "csm")
    expect(page.locator("#prompt")).to_have_attribute("placeholder", "Text to speak")
    expect(page.locator("#mic")).to_be_hidden()
    for text in ("Hello there", "And again"):  # each by itself: what was said before is not sent
        answer = ask(page, text)
        ended(answer)
        expect(answer.locator(".replay a")).to_have_count(1)
        sent = watched.sent(CHAT).post_data_json
        assert (sent["messages"], sent["modalities"]) == ([{"role": "user", "content": text}], ["audio"])
    expect(page.locator("#speech-meter")).to_have_attribute("data-received", str(12 * 1920))
