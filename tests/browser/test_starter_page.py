"""The page with the starter behind it: a question is written or spoken, the answer read, heard and seen."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from omnistage_starter import tiny
from omnistage_starter.tiny_speech_to_text import write_speech_to_text
from playwright.sync_api import Page, expect

from omnistage.omni import AsyncOmni
from tests.browser.harness import CHAT, SLOW, Watched, ask, ended
from tests.server.harness import SERVE_LIMITS

pytest.importorskip("onnx", reason="the tiny speech recognition networks are written with it")
pytest.importorskip("hibari", reason="the voice is that package's")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, AsyncOmni]]:
    folder = tmp_path_factory.mktemp("starter page") / "starter"
    tiny.write(folder, seed=1)
    write_speech_to_text(folder / "hear", script=("the", "cat", "sees", "a", "bird", "</s>"))
    overrides = (*SERVE_LIMITS, "think.kv_blocks=256", "draw.steps=3")
    omni = AsyncOmni(folder, device="cpu", dtype="float32", overrides=overrides, progress=False)
    yield {"starter": omni}
    asyncio.run(omni.shutdown(drain=False))


def test_one_answer_is_read_heard_and_seen(page: Page, watched: Watched) -> None:
    page.locator("#param-max_tokens").fill("8")
    page.locator("#out-image").check()
    answer = ask(page, "Draw a red apple.")
    ended(answer)
    expect(answer.locator(".words")).not_to_be_empty()
    assert answer.locator(".picture img").evaluate("image => [image.naturalWidth, image.naturalHeight]") == [96, 96]
    assert sum(piece["samples"] for piece in page.evaluate("window.started")) > 0
    assert set(watched.sent(CHAT).post_data_json["modalities"]) == {"text", "audio", "image"}
    stages = page.locator("#timeline").inner_text()
    assert all(stage in stages for stage in ("think", "speak", "draw"))


def test_a_question_is_spoken_into_the_microphone(page: Page, watched: Watched) -> None:
    page.locator("#param-max_tokens").fill("8")
    page.locator("#mic").click()
    expect(page.locator("#recording")).to_have_attribute("data-heard", "true", timeout=SLOW)
    page.locator("#mic").click()
    expect(page.locator(".attachment[data-kind=audio]")).to_have_count(1)
    page.locator("#prompt").press("Enter")
    ended(page.locator(".answer"))
    expect(page.locator(".answer .words")).not_to_be_empty()
    assert watched.sent(CHAT).post_data_json["messages"][0]["content"][0]["type"] == "input_audio"
    assert "hear" in page.locator("#timeline").inner_text()
