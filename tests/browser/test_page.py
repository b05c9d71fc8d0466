"""The page at `/` in a real browser: what people do with it, and what they then see and hear."""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
import subprocess
import sys
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import BrowserContext, Page, Route, expect

from omnistage.omni import AsyncOmni
from omnistage.pipeline.outputs import OutputChunk
from omnistage.server.access.keys import Holder, Keyring, digest_of
from omnistage.server.observe.audit import AuditRecord
from omnistage.server.service import Service
from tests.browser.harness import CHAT, SLOW, Watched, ask, ended, letters
from tests.server.harness import Held, Running, until

NAMED = "button|checkbox|combobox|dialog|heading|img|link|meter|navigation|spinbutton|textbox|complementary|main"


def use(page: Page, model: str, *outputs: str, **parameters: object) -> None:
    """Choose a model, what its answers are made of besides text, and parameters."""
    page.locator("#model").select_option(model)
    for name in outputs:
        page.locator(f"#out-{name}").check()
    for name, value in parameters.items():
        page.locator(f"#param-{name}").fill(str(value))


def picture_file(folder: Path, name: str = "cat's picture.png") -> Path:
    file = folder / name
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)).save(file)
    return file


Hold = Callable[..., Held]


@pytest.fixture
def hold(models: dict[str, AsyncOmni], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    """Make a stage of a model wait, so that what is seen meanwhile can be looked at."""
    made: list[Held] = []

    def make(model: str, stage: str, free: int = 0) -> Held:
        made.append(Held(models[model].orchestrator.stages[stage], monkeypatch, free))
        return made[-1]

    yield make
    for held in made:
        held.go.set()
    until(lambda: all(omni.stats().inflight == 0 for omni in models.values()), "the end of held requests")


# ---------------------------------------------------------------------------------------------------- answers


def test_text_grows_while_it_is_written(page: Page, server: Running, hold: Hold) -> None:
    use(page, "lm", max_tokens=24, temperature=0)
    held = hold("lm", "thinker", 8)
    answer = ask(page, "Once upon a time")
    words = answer.locator(".words")
    expect(words).not_to_be_empty(timeout=SLOW)
    expect(answer).to_have_attribute("aria-busy", "true")
    early = words.inner_text()
    held.go.set()
    ended(answer)
    body = {"model": "lm", "messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 24}
    whole = httpx.post(f"{server.url}{CHAT}", json={**body, "temperature": 0}, timeout=60).json()
    written = whole["choices"][0]["message"]["content"]
    assert letters(page.evaluate("document.querySelector('.words').textContent")) == letters(written)
    assert len(early) < len(words.inner_text())
    expect(page.locator("#announce")).to_contain_text("Answer:")


def test_the_conversation_goes_on_and_begins_anew(page: Page, watched: Watched) -> None:
    use(page, "lm", max_tokens=4, seed=1, system="Be brief")
    ended(ask(page, "First"))
    ended(ask(page, "Second"))
    sent = watched.sent(CHAT).post_data_json
    assert [message["role"] for message in sent["messages"]] == ["system", "user", "assistant", "user"]
    assert (sent["max_tokens"], sent["seed"], "temperature" in sent) == (4, 1, False)
    page.locator("#new-chat").click()
    expect(page.locator(".message")).to_have_count(0)
    ended(ask(page, "Third"))
    messages = watched.sent(CHAT).post_data_json["messages"]
    assert [message["content"] for message in messages] == ["Be brief", "Third"]


def test_an_answer_that_ends_late_stays_in_its_conversation(
    page: Page, watched: Watched, models: dict[str, AsyncOmni], hold: Hold
) -> None:
    use(page, "lm", max_tokens=500)
    held = hold("lm", "thinker", 6)
    expect(ask(page, "A secret").locator(".words")).not_to_be_empty(timeout=SLOW)
    page.locator("#new-chat").click()
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#send")).to_be_visible()
    until(lambda: models["lm"].stats().inflight == 0, "the end of the old answer")
    held.go.set()
    use(page, "lm", max_tokens=3)
    ended(ask(page, "Something else"))
    ended(ask(page, "And more"))
    messages = watched.sent(CHAT).post_data_json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert [messages[0]["content"], messages[2]["content"]] == ["Something else", "And more"]


def test_what_is_said_is_never_read_as_markup(page: Page) -> None:
    use(page, "lm", max_tokens=2)
    ended(ask(page, "<b>bold</b> and `code`\n```html\n<img src=x onerror=alert(1)>\n```"))
    bubble = page.locator(".bubble")
    expect(bubble.locator("b, img")).to_have_count(0)
    expect(bubble.locator("p")).to_have_text("<b>bold</b> and code")
    expect(bubble.locator("p code")).to_have_text("code")
    expect(bubble.locator("pre code")).to_have_text("<img src=x onerror=alert(1)>")


def test_a_refusal_is_shown_and_what_was_asked_can_be_sent_again(page: Page, watched: Watched, tmp_path: Path) -> None:
    watched.expected = ("400",)
    use(page, "draw", size="50x50", steps=2)  # no multiple of what the model takes
    page.locator("#file").set_input_files(picture_file(tmp_path))
    page.locator(".attachment").wait_for()
    answer = ask(page, "Hello")
    ended(answer, "error")
    expect(answer.locator(".failure")).to_contain_text("size")
    expect(page.locator("#param-size")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#timeline-note")).to_contain_text("did not run")
    use(page, "draw", size="48x32")
    answer.get_by_role("button", name="Try again").click()
    ended(page.locator(".answer"))
    expect(page.locator(".picture img")).to_have_count(1)
    expect(page.locator(".bubble")).to_have_count(1)
    expect(page.locator(".bubble img")).to_have_count(1)  # it was sent along again
    page.locator("#show-panel").click()  # a field that is wrong is shown where the panel was closed
    page.locator("#param-size").evaluate("field => { field.value = 'wide' }")
    page.locator("#prompt").fill("More")
    page.locator("#prompt").press("Enter")
    expect(page.locator("#param-size")).to_be_focused()
    expect(page.locator(".bubble")).to_have_count(1)


def test_speech_is_scheduled_without_a_gap(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    count = AuditRecord.count

    def counted(record: AuditRecord, item: OutputChunk) -> None:
        sent.extend([len(item.audio.samples)] if item.audio is not None else [])
        count(record, item)

    monkeypatch.setattr(AuditRecord, "count", counted)
    use(page, "omni", "audio", max_tokens=6, temperature=0)
    answer = ask(page, "Say something")
    ended(answer)
    meter = page.locator("#speech-meter")
    assert len(sent) > 1
    expect(meter).to_have_attribute("data-scheduled", str(sum(sent)))
    expect(meter).to_have_attribute("data-received", str(sum(sent)))
    started = page.evaluate("window.started")
    assert sum(piece["samples"] for piece in started) == sum(sent)
    assert {piece["rate"] for piece in started} == {24_000}
    # Each piece begins on the very sample at which the one before it ends, but for those that came too late.
    pairs = itertools.pairwise(started)
    gaps = sum(round(a["when"] * 24_000) + a["samples"] != round(b["when"] * 24_000) for a, b in pairs)
    expect(meter).to_have_attribute("data-underruns", str(gaps))
    link = answer.locator(".replay a")
    link.wait_for()
    with page.expect_download() as saved:
        link.click()
    with wave.open(str(saved.value.path())) as file:
        assert (file.getframerate(), file.getnframes()) == (24_000, sum(sent))


def test_pieces_that_come_in_time_meet_sample_by_sample(page: Page) -> None:
    counted = page.evaluate(
        """async () => {
          const { Player, unlockAudio } = await import("/page/player.js");
          unlockAudio(24_000);
          const player = new Player(() => {});
          for (let piece = 0; piece < 20; piece += 1) player.push(new Uint8Array(2 * (1001 + piece)), 24_000);
          player.stop();
          return { scheduled: player.scheduled, underruns: player.underruns };
        }"""
    )
    lengths = [1001 + piece for piece in range(20)]
    assert counted == {"scheduled": sum(lengths), "underruns": 0}
    started = page.evaluate("window.started")
    assert [piece["samples"] for piece in started] == lengths
    begins = [piece["when"] * 24_000 for piece in started]
    expected = [begins[0] + sum(lengths[:piece]) for piece in range(20)]
    assert begins == pytest.approx(expected, abs=1e-3)


def test_text_is_the_default_and_speech_by_choice_is_remembered(page: Page, watched: Watched) -> None:
    use(page, "omni", max_tokens=3)
    expect(page.locator("#out-audio")).not_to_be_checked()
    expect(page.locator("#voice")).to_be_hidden()
    ended(ask(page, "Quietly"))
    sent = watched.sent(CHAT).post_data_json
    assert (sent["modalities"], "audio" in sent) == (["text"], False)
    assert page.evaluate("window.started") == []
    page.locator("#out-audio").check()
    page.reload()
    expect(page.locator("#out-audio")).to_be_checked()
    expect(page.locator("#voice")).to_be_visible()


def test_a_picture_appears_while_it_is_drawn(page: Page) -> None:
    use(page, "draw", size="64x64", steps=8, seed=3)
    answer = ask(page, "A lighthouse")
    ended(answer)
    assert int(answer.locator(".progress").get_attribute("data-most") or 0) >= 1
    figure = answer.locator(".picture")
    assert int(figure.get_attribute("data-previews") or 0) >= 1
    expect(figure).not_to_have_class(re.compile("early"))
    assert figure.locator("img").evaluate("image => [image.naturalWidth, image.naturalHeight]") == [64, 64]
    expect(figure.locator("figcaption")).to_have_text("seed 3")


def test_a_picture_is_changed(page: Page, tmp_path: Path) -> None:
    use(page, "draw", size="48x32", steps=3)
    page.locator("#file").set_input_files(picture_file(tmp_path))
    page.locator(".attachment").wait_for()
    answer = ask(page, "In red")
    ended(answer)
    expect(answer.locator(".picture img")).to_have_count(1)


# ----------------------------------------------------------------------------------------------- what goes in


def test_a_picture_goes_along(page: Page, watched: Watched, tmp_path: Path) -> None:
    use(page, "omni", max_tokens=3)
    file = picture_file(tmp_path)
    page.locator("#file").set_input_files(file)
    expect(page.locator(".attachment img")).to_have_attribute("alt", file.name)
    ended(ask(page, "What is it?"))
    content = watched.sent(CHAT).post_data_json["messages"][0]["content"]
    url = content[0]["image_url"]["url"]
    assert base64.b64decode(url.removeprefix("data:image/png;base64,")) == file.read_bytes()
    assert content[1] == {"type": "text", "text": "What is it?"}
    expect(page.locator(".bubble img")).to_have_count(1)
    expect(page.locator(".attachment")).to_have_count(0)


def test_the_microphone_is_heard(page: Page, watched: Watched) -> None:
    use(page, "omni", max_tokens=3)
    page.locator("#mic").click()
    expect(page.locator("#recording")).to_have_attribute("data-heard", "true", timeout=SLOW)
    page.locator("#mic").click()
    expect(page.locator(".attachment[data-kind=audio]")).to_have_count(1)
    page.locator("#prompt").press("Enter")  # the recording is a message by itself
    ended(page.locator(".answer"))
    (part,) = watched.sent(CHAT).post_data_json["messages"][0]["content"]
    assert (part["type"], part["input_audio"]["format"]) == ("input_audio", "wav")
    with wave.open(io.BytesIO(base64.b64decode(part["input_audio"]["data"]))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16_000, 1, 2)
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
    assert len(samples) > 1000
    assert np.abs(samples).max() > 100


@pytest.mark.parametrize("how", ["escape", "new chat", "new chat while it is being attached"])
def test_a_recording_can_be_dropped(page: Page, how: str) -> None:
    use(page, "omni")
    page.evaluate(
        """() => {
          window.opened = [];
          const open = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
          navigator.mediaDevices.getUserMedia = async (wanted) => {
            const stream = await open(wanted);
            window.opened.push(...stream.getTracks());
            return stream;
          };
        }"""
    )
    recording = page.locator("#recording")
    page.locator("#mic").click()
    expect(recording).to_have_attribute("data-heard", "true", timeout=SLOW)
    if how == "escape":
        page.keyboard.press("Escape")
    elif how == "new chat":
        page.locator("#new-chat").click()
    else:
        page.evaluate("['mic', 'new-chat'].forEach((id) => document.getElementById(id).click())")
    expect(recording).to_be_hidden()
    expect(page.locator("#mic")).to_have_attribute("aria-pressed", "false")
    assert page.evaluate("window.opened.map((track) => track.readyState)") == ["ended"]
    page.evaluate("document.getElementById('recording').dataset.heard = 'false'")
    page.locator("#mic").click()
    expect(recording).to_have_attribute("data-heard", "true", timeout=SLOW)
    expect(page.locator(".attachment")).to_have_count(0)
    page.locator("#mic").click()
    expect(page.locator(".attachment[data-kind=audio]")).to_have_count(1)


def test_a_blocked_microphone_is_explained(context: BrowserContext, page: Page) -> None:
    page.evaluate(
        """() => {
          navigator.mediaDevices.getUserMedia = async () => { throw new DOMException("no", "NotAllowedError"); };
        }"""
    )
    page.locator("#mic").click()
    expect(page.locator("#notice")).to_contain_text("The microphone is blocked")
    expect(page.locator("#recording")).to_be_hidden()


def dropped(page: Page, name: str, kind: str, data: str) -> None:
    carried = page.evaluate_handle(
        """([name, type, data]) => {
          const carried = new DataTransfer();
          carried.items.add(new File([data], name, { type }));
          return carried;
        }""",
        [name, kind, data],
    )
    page.locator("#chat").dispatch_event("drop", {"dataTransfer": carried})


def test_files_are_dropped_refused_and_removed(page: Page, watched: Watched) -> None:
    use(page, "lm", max_tokens=2)
    dropped(page, "cat.png", "image/png", "not read")
    expect(page.locator("#notice")).to_contain_text("this model takes text")
    dropped(page, "large.txt", "text/plain", "x" * 300_000)
    expect(page.locator("#notice")).to_contain_text("text files are limited to")
    expect(page.locator(".attachment")).to_have_count(0)
    dropped(page, "notes.txt", "text/plain", "remember the milk")
    dropped(page, "more.md", "", "and the bread")
    expect(page.locator(".attachment")).to_have_count(2)
    page.get_by_role("button", name="Remove more.md").click()
    ended(ask(page, "Summarise"))
    content = watched.sent(CHAT).post_data_json["messages"][0]["content"]
    assert [part["type"] for part in content] == ["text", "text"]
    assert content[0]["text"] == "File notes.txt:\n```\nremember the milk\n```"


# ------------------------------------------------------------------------------------- the timeline, gauges, stop


def test_the_timeline_fills_while_the_request_runs(page: Page, hold: Hold, models: dict[str, AsyncOmni]) -> None:
    use(page, "omni", "audio", max_tokens=12, temperature=0)
    held = hold("omni", "thinker", 6)
    ask(page, "Tell me a story")
    answer = page.locator(".answer").first
    expect(page.locator(".lane")).to_have_count(3, timeout=SLOW)
    stages = page.locator(".lane").evaluate_all("lanes => lanes.map(lane => lane.dataset.stage)")
    assert stages == list(models["omni"].orchestrator.graph.order)
    expect(page.locator("[data-stage=talker] .run")).to_have_count(1, timeout=SLOW)  # before the thinker has ended
    expect(page.locator("[data-stage=thinker] .run")).to_have_count(1)
    expect(page.locator("[data-stage=thinker] .last")).to_have_count(0)
    expect(answer).to_have_attribute("aria-busy", "true")
    in_flight = page.get_by_role("meter", name="In flight")
    expect(in_flight).to_have_attribute("aria-valuenow", "1", timeout=SLOW)
    held.go.set()
    ended(answer)
    expect(page.locator(".lane .last")).to_have_count(3, timeout=SLOW)
    bars = page.locator(".lane .run").evaluate_all(
        "bars => bars.map(bar => [bar.x.baseVal.value, bar.width.baseVal.value])"
    )
    assert bars[1][0] < bars[0][0] + bars[0][1], "the talker begins before the thinker ends"
    assert all(width > 0 for _, width in bars)
    expect(page.locator("#timeline-note")).to_contain_text("before")
    assert f"{stages[-1]} from" in (page.locator("#timeline svg").get_attribute("aria-label") or "")
    page.locator("#timeline-table summary").click()
    expect(page.get_by_role("rowheader")).to_have_text(stages)
    use(page, "lm", max_tokens=2)
    ended(ask(page, "Shortly"))
    expect(page.locator(".lane")).to_have_count(1, timeout=SLOW)
    answer.get_by_role("button", name="timeline").click()  # an earlier answer's comes back
    expect(page.locator(".lane .last")).to_have_count(3)
    page.locator("#model").select_option("omni")
    expect(in_flight).to_have_attribute("aria-valuenow", "0", timeout=SLOW)


def test_each_process_of_a_group_has_a_gauge(page: Page) -> None:
    def with_replicas(route: Route) -> None:
        stats = route.fetch().json()
        counts = {"pid": 1, "running": 1, "requests": 12, "failures": 0, "restarts": 0}
        lost = {**counts, "number": 1, "state": "rebuilding", "running": 0, "failures": 2, "restarts": 1}
        stats["models"]["lm"]["replicas"] = [
            {**counts, "group": "voice", "number": 0, "state": "up"},
            {**lost, "group": "voice"},
        ]
        route.fulfill(json=stats)

    page.route("**/v1/stats", with_replicas)
    use(page, "lm", max_tokens=2)
    first, second = (page.get_by_role("meter", name=f"voice · process {number}") for number in (0, 1))
    expect(first).to_have_attribute("aria-valuetext", "1 running, 12 in all", timeout=SLOW)
    expect(second).to_have_attribute("aria-valuetext", "restarting, 12 in all, 2 failures, 1 restarts")
    page.unroute_all()


@pytest.mark.parametrize(("how", "free"), [("button", 6), ("escape", 0)])
def test_stop_ends_the_request_in_the_engine(
    page: Page, models: dict[str, AsyncOmni], hold: Hold, how: str, free: int
) -> None:
    """Also before there is anything to see: then its stage is queued on the timeline, and nothing has begun."""
    use(page, "lm", max_tokens=500)
    held = hold("lm", "thinker", free)
    answer = ask(page, "Never ending")
    expect(page.locator(".lane .run" if free else ".lane .queued")).to_have_count(1, timeout=SLOW)
    if free:
        expect(answer.locator(".words")).not_to_be_empty(timeout=SLOW)
    assert models["lm"].stats().inflight == 1
    if how == "button":
        page.get_by_role("button", name="Stop", exact=True).click()
    else:
        page.keyboard.press("Escape")
    ended(answer, "stopped")
    until(lambda: models["lm"].stats().inflight == 0, "the end of the request")
    assert not held.go.is_set()
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#prompt")).to_be_focused()


# ------------------------------------------------------------------------------------------- getting in, getting on


def test_a_key_is_asked_for_and_kept_out_of_snippets(
    context: BrowserContext, server: Running, service: Service, watched: Watched
) -> None:
    watched.expected = ("401",)
    service.keyring = Keyring([Holder("ann", digest_of("a-good-key"), models=frozenset({"lm"}))])
    page = context.new_page()
    page.goto(f"{server.url}/")
    dialog = page.get_by_role("dialog", name="API key")
    for key, problem in (("a-ключ", "cannot be sent"), ("a-bad-key", "check it"), ("a-good-key", None)):
        dialog.get_by_label("Key", exact=True).fill(key)
        dialog.get_by_role("button", name="Use this key").click()
        if problem is not None:
            expect(dialog.locator("#key-problem")).to_contain_text(problem)
    expect(dialog).to_be_hidden()
    expect(page.locator("#model option")).to_have_text(["lm"])
    use(page, "lm", max_tokens=2)
    ended(ask(page, "Hello"))
    expect(page.locator(".lane .run")).to_have_count(1, timeout=SLOW)
    page.locator("#show-code").click()
    for name in ("python", "curl"):
        expect(page.locator(f"#{name}")).to_contain_text("OMNISTAGE_API_KEY")
        expect(page.locator(f"#{name}")).not_to_contain_text("a-good-key")
    page.reload()
    expect(page.locator("#model option")).to_have_text(["lm"])  # the tab remembers it
    page.close()


def test_the_page_waits_for_the_models(
    context: BrowserContext, server: Running, service: Service, watched: Watched
) -> None:
    watched.expected = ("503",)
    service.loading = True
    page = context.new_page()
    page.goto(f"{server.url}/")
    expect(page.locator("#status")).to_have_text("Models are loading")
    service.loading = False
    expect(page.locator("#status")).to_have_text("Ready")
    expect(page.locator("#model option")).to_have_count(3)
    page.close()


def test_everything_by_keyboard(page: Page, hold: Hold) -> None:
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#prompt")).to_be_focused()
    page.locator("#model").focus()
    page.keyboard.type("lm")
    expect(page.locator("#model")).to_have_value("lm")
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    wanted = {"new-chat", "show-code", "theme", "prompt", "attach", "send", "reset-params", "param-seed"}
    assert wanted <= set(reached)
    held = hold("lm", "thinker", 4)
    page.locator("#prompt").focus()
    page.keyboard.type("two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    expect(page.locator("#prompt")).to_have_value("two\nlines")
    page.keyboard.press("Enter")
    expect(page.locator(".bubble")).to_have_text("two\nlines")
    expect(page.locator(".answer .words")).not_to_be_empty(timeout=SLOW)
    page.keyboard.press("Escape")
    ended(page.locator(".answer"), "stopped")
    held.go.set()
    page.locator("#show-code").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="This request as code")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#code-dialog")).to_be_hidden()
    expect(page.locator("#show-code")).to_be_focused()


def test_all_controls_have_names(page: Page, tmp_path: Path) -> None:
    page.locator("#file").set_input_files(picture_file(tmp_path))
    page.locator(".attachment").wait_for()
    use(page, "omni", max_tokens=2)
    ended(ask(page, "What is it?"))
    for model in ("omni", "draw"):
        page.locator("#model").select_option(model)
        tree = page.locator("body").aria_snapshot()
        assert len(re.findall(rf"- (?:{NAMED}) \"", tree)) > 20
        assert re.findall(rf"^\s*- (?:{NAMED})(?! \").*$", tree, re.MULTILINE) == []
    landmarks = [page.get_by_role(role).count() for role in ("main", "banner", "navigation", "complementary")]
    assert landmarks == [1, 1, 1, 1]
    assert page.evaluate("document.documentElement.lang") == "en"


# --------------------------------------------------------------------------------------------------- how it looks

CONTRAST = """
() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (text) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = rgba(getComputedStyle(at).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255, 255];
  };
  const poor = [];
  let looked = 0;
  for (const node of document.body.querySelectorAll("*")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility() || node.closest(".unseen, svg.sprite, dialog:not([open])")) continue;
    const style = getComputedStyle(node);
    const [a, b] = [light(rgba(node.closest("svg") ? style.fill : style.color)), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    looked += 1;
    if (ratio < 4.5) poor.push(`${node.tagName}.${node.className} ${ratio.toFixed(2)}`);
  }
  return { looked, poor };
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_themes(page: Page, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    use(page, "lm", max_tokens=3)
    ended(ask(page, "Hello"))
    expect(page.locator(".lane .last")).to_have_count(1, timeout=SLOW)
    seen = page.evaluate(CONTRAST)
    assert seen["looked"] > 30
    assert seen["poor"] == []
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) > 382) == (scheme == "light")
    other = "dark" if scheme == "light" else "light"
    button = page.locator("#theme")
    while page.evaluate("document.documentElement.dataset.theme") != other:
        button.click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground


def test_a_phone_has_room_for_it(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})

    def fits() -> bool:
        return all(
            page.locator(place).evaluate("place => place.scrollWidth <= place.clientWidth")
            for place in ("html", "body", "#scroll")
        )

    assert fits()
    page.locator("#out-audio").check()
    page.locator("#show-panel").click()
    expect(page.locator("#params")).to_be_visible()
    use_in_panel = page.locator("#param-max_tokens")
    use_in_panel.fill("6")
    page.keyboard.press("Escape")
    expect(page.locator("#params")).to_be_hidden()
    expect(page.locator("#show-panel")).to_be_focused()
    answer = ask(page, "averyverylongword" * 12)
    ended(answer)
    answer.locator(".replay").wait_for()
    assert fits()
    chips = ("label[for=out-text]", "label[for=out-audio]")
    for control in (*chips, "#send", "#attach", "#mic", "#talk", "#voice", "#show-past", "#show-code", "#show-panel"):
        box = page.locator(control).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
        assert min(box["width"], box["height"]) >= 24
        assert box["y"] + box["height"] <= 740


# ----------------------------------------------------------------------------------------------------- as code

NASTY = 'It\'s "quoted" $HOME `date` $(date) \\n \\\\ \nJSON\n äöü 😀'


def snippets(page: Page) -> tuple[str, str]:
    page.locator("#show-code").click()
    texts = [page.locator(f"#{name}").evaluate("code => code.textContent") for name in ("python", "curl")]
    page.locator("#code-close").click()
    return texts[0], texts[1]


def test_the_snippets_send_what_the_page_sends(page: Page, watched: Watched, tmp_path: Path) -> None:
    use(page, "omni", max_tokens=3, temperature=0)
    page.locator("#file").set_input_files(picture_file(tmp_path))
    page.locator(".attachment").wait_for()
    ended(ask(page, NASTY))
    sent = watched.sent(CHAT).post_data_json
    python, curl = snippets(page)
    assert len(python) + len(curl) < 5000, "attachments stay out of them"
    shown = ["bash", "-c", f"curl() {{ cat; }}\n{curl}"]
    assert json.loads(subprocess.run(shown, cwd=tmp_path, capture_output=True, check=True).stdout) == sent
    timed = curl.replace("curl -N", "curl -N -s -o answer.txt -w '%{http_code}'")
    done = subprocess.run(["bash", "-c", timed], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "200"
    compile(python, "snippet.py", "exec")
    ran = subprocess.run([sys.executable, "-c", python], cwd=tmp_path, capture_output=True, text=True, check=True)
    deltas = re.findall(r'"content":("(?:[^"\\]|\\.)*")', (tmp_path / "answer.txt").read_text(encoding="utf-8"))
    assert ran.stdout == "".join(json.loads(delta) for delta in deltas)


@pytest.mark.parametrize("changed", [False, True])
def test_the_snippets_of_pictures_work(page: Page, tmp_path: Path, changed: bool) -> None:
    use(page, "draw", size="48x32", steps=2, seed=1, negative_prompt="it's; `fog`")
    if changed:
        page.locator("#file").set_input_files(picture_file(tmp_path))
        page.locator(".attachment").wait_for()
    page.locator("#prompt").fill("A \"house\" & 'tree'")
    python, curl = snippets(page)
    timed = curl.replace("curl -N", "curl -N -s -o answer.txt -w '%{http_code}'")
    done = subprocess.run(["bash", "-c", timed], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "200"
    assert ".completed" in (tmp_path / "answer.txt").read_text(encoding="utf-8")
    subprocess.run([sys.executable, "-c", python], cwd=tmp_path, capture_output=True, check=True)
    with Image.open(tmp_path / "picture.png") as picture:
        assert picture.size == (48, 32)
