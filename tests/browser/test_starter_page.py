"""The page with the starter behind it: a question is written or spoken, the answer read, heard and seen."""

from __future__ import annotations

import asyncio
import json
import wave
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from omnistage_starter import tiny
from omnistage_starter.text_to_speech import Voice
from omnistage_starter.tiny_speech_to_text import write_speech_to_text
from playwright.sync_api import Browser, Page, WebSocket, expect

from omnistage.omni import AsyncOmni
from tests.browser.conftest import launched
from tests.browser.harness import CHAT, SLOW, Watched, ask, ended
from tests.server.harness import SERVE_LIMITS

pytest.importorskip("onnx", reason="the tiny speech recognition networks are written with it")
pytest.importorskip("hibari", reason="the voice is that package's")
pytest.importorskip("silero_vad", reason="it finds the turns of a live conversation")
RATE = 24_000  # of the voice
HEARD = "Heard: “the cat sees a bird”"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, AsyncOmni]]:
    folder = tmp_path_factory.mktemp("starter page") / "starter"
    tiny.write(folder, seed=1)
    write_speech_to_text(folder / "hear", script=("the", "cat", "sees", "a", "bird", "</s>"))
    overrides = (*SERVE_LIMITS, "think.kv_blocks=256", "draw.steps=3")
    omni = AsyncOmni(folder, device="cpu", dtype="float32", overrides=overrides, progress=False)
    yield {"starter": omni}
    asyncio.run(omni.shutdown(drain=False))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Its microphone hears a sentence again and again, with four seconds of silence between."""
    silence = np.zeros(2 * RATE, np.float32)
    samples = np.concatenate([silence, Voice().synthesise("What is the capital of France?"), silence])
    path = tmp_path_factory.mktemp("microphone") / "spoken.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    with launched(f"--use-file-for-fake-audio-capture={path}") as browser:
        yield browser


def test_one_answer_is_read_heard_and_seen(page: Page, watched: Watched) -> None:
    page.locator("#param-max_tokens").fill("8")
    page.locator("#out-image").check()
    page.locator("#out-audio").check()
    expect(page.locator("#voice-label")).to_be_hidden()  # it has one
    expect(page.locator("#param-size, #param-negative_prompt")).to_have_count(0)  # it takes neither
    expect(page.locator("#param-steps")).to_have_count(1)
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
    expect(page.locator(".heard")).to_have_text(HEARD, timeout=SLOW)
    page.reload()
    expect(page.locator(".heard")).to_have_text(HEARD)


def test_a_live_conversation_is_heard_answered_interrupted_and_kept(page: Page) -> None:
    sent: list[dict[str, Any]] = []

    def opened(socket: WebSocket) -> None:
        socket.on("framesent", lambda payload: sent.append(json.loads(payload)))

    page.on("websocket", opened)
    page.locator("#param-max_tokens").fill("120")  # spoken for longer than until the next question
    page.locator("#talk").click()
    live = page.locator("#live")
    expect(live).to_have_attribute("data-heard", "true", timeout=SLOW)
    expect(page.locator("#prompt")).to_be_hidden()
    expect(page.locator("#timeline-note")).to_have_text("A live conversation has no timeline.")
    expect(page.locator(".bubble .heard").first).to_have_text(HEARD, timeout=SLOW)
    expect(page.locator(".answer .words").first).not_to_be_empty(timeout=SLOW)
    expect(page.locator(".user")).to_have_count(2, timeout=SLOW)  # the next question came into the answer
    page.get_by_role("button", name="Mute").click()
    expect(page.locator(".answer[data-ended]").first).to_be_visible(timeout=SLOW)
    cut = [event for event in sent if event["type"] == "conversation.item.truncate"]
    assert cut or page.locator(".answer").first.get_attribute("data-ended") == "stopped"
    played = page.evaluate("window.started")
    assert sum(piece["samples"] for piece in played) > 0 or not cut
    ends = accumulate((piece["until"] for piece in played), max)  # what was cut off has ended where it was
    assert all(piece["when"] >= end - 1e-6 for end, piece in zip(ends, played[1:], strict=False))
    page.get_by_role("button", name="End the conversation").click()
    expect(live).to_be_hidden()
    ended(page.locator(".answer").first, page.locator(".answer").first.get_attribute("data-ended") or "")
    said = page.locator(".answer .words").first.inner_text()
    page.reload()
    expect(page.locator(".bubble .heard").first).to_have_text(HEARD)
    assert page.locator(".answer .words").first.inner_text() == said
    page.locator("#param-max_tokens").fill("4")
    ended(ask(page, "In writing"))
    assert len(page.locator(".user").all()) >= 3
