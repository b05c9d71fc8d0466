"""A reload at any moment: what was shown is there again, however slow the browser's database is."""

from __future__ import annotations

import wave
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.browser.harness import SLOW, ask, ended
from tests.browser.test_page import Hold, dropped, hold, picture_file, use  # noqa: F401  (a fixture)

BUSY = """async () => {
  const database = await new Promise((resolve) => {
    indexedDB.open("omnistage").onsuccess = ({ target }) => resolve(target.result);
  });
  let busy = true;
  window.waiting = 0;
  const ended = new Promise((resolve) => {
    const transaction = database.transaction(["conversations", "messages"], "readwrite");
    transaction.oncomplete = resolve;
    const again = () => {
      if (busy) transaction.objectStore("messages").count().onsuccess = again;
    };
    again();
  });
  const begin = IDBDatabase.prototype.transaction;
  IDBDatabase.prototype.transaction = function (stores, mode, ...rest) {
    if (mode === "readwrite") window.waiting += 1;
    return begin.call(this, stores, mode, ...rest);
  };
  window.letGo = () => {
    busy = false;
    return ended;
  };
}"""
"""Keeps the database busy until `letGo()`, or until the page is left: what is written meanwhile waits behind it, and is
counted in `waiting`."""


def busy(page: Page) -> None:
    page.evaluate(BUSY)


def reload(page: Page) -> None:
    page.reload()
    page.locator("#status[data-state=ready]").wait_for()


def sound_file(folder: Path) -> Path:
    path = folder / "spoken.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(bytes(2 * 8_000))
    return path


def test_a_message_its_files_a_growing_answer_and_a_draft_survive_a_busy_store(
    page: Page,
    tmp_path: Path,
    hold: Hold,  # noqa: F811
) -> None:
    use(page, "omni", max_tokens=200, temperature=0)
    page.locator("#file").set_input_files(picture_file(tmp_path))
    page.locator(".attachment").wait_for()
    dropped(page, "notes.txt", "text/plain", "remember the milk")
    expect(page.locator(".attachment")).to_have_count(2)
    held = hold("omni", "thinker", 8)
    busy(page)
    answer = ask(page, "What is it?")
    expect(answer.locator(".words")).not_to_be_empty(timeout=SLOW)
    words = answer.locator(".words").inner_text()
    page.locator("#prompt").fill("half a thought")
    reload(page)
    held.go.set()
    expect(page.locator(".bubble .said")).to_have_text("What is it?")
    assert page.locator(".bubble img").evaluate("image => image.decode().then(() => image.naturalWidth)") == 48
    expect(page.locator(".bubble .file")).to_have_text("notes.txt")
    ended(page.locator(".answer"), "stopped")
    assert page.locator(".answer .words").inner_text().startswith(words)
    expect(page.locator("#prompt")).to_have_value("half a thought")
    reload(page)  # it is stored now
    expect(page.locator(".message")).to_have_count(2)
    assert page.evaluate("Object.keys(localStorage).filter((name) => name.includes('unsaved'))") == []


def test_an_edited_message_does_not_get_its_old_answer_back(page: Page, hold: Hold) -> None:  # noqa: F811
    use(page, "lm", max_tokens=3)
    ended(ask(page, "One"))
    ended(ask(page, "Two"))
    use(page, "lm", max_tokens=500)
    held = hold("lm", "thinker", 6)
    busy(page)
    page.get_by_role("button", name="Edit this message").first.click()
    field = page.get_by_role("textbox", name="Edit this message")
    field.fill("Eins")
    field.press("Enter")
    expect(page.locator(".answer .words")).not_to_be_empty(timeout=SLOW)
    words = page.locator(".answer .words").inner_text()
    reload(page)
    held.go.set()
    expect(page.locator(".bubble")).to_have_text(["Eins"])
    ended(page.locator(".answer"), "stopped")
    expect(page.locator(".foot-row")).to_contain_text("interrupted")
    assert page.locator(".answer .words").inner_text().startswith(words)


def test_what_is_written_in_an_editor_survives_a_busy_store(page: Page) -> None:
    use(page, "lm", max_tokens=3)
    ended(ask(page, "One"))
    ended(ask(page, "Two"))
    field = page.get_by_role("textbox", name="Edit this message")
    page.get_by_role("button", name="Edit this message").first.click()
    expect(field).to_be_focused()
    busy(page)
    field.fill("Eins, oder")
    reload(page)
    expect(field).to_have_value("Eins, oder")
    expect(page.locator(".bubble")).to_have_text(["Two"])
    field.press("Escape")
    expect(page.locator(".bubble")).to_have_text(["One", "Two"])
    reload(page)
    expect(page.locator(".bubble")).to_have_text(["One", "Two"])
    page.get_by_role("button", name="Edit this message").last.click()
    field.fill("Zwei")
    reload(page)
    field.press("Enter")
    ended(page.locator(".answer").nth(1))
    reload(page)
    expect(page.locator(".bubble")).to_have_text(["One", "Zwei"])


def test_a_question_whose_answer_had_not_begun_can_be_asked_again(page: Page, hold: Hold) -> None:  # noqa: F811
    use(page, "lm", max_tokens=3)
    held = hold("lm", "thinker")
    busy(page)
    ask(page, "Anybody there?")
    reload(page)
    held.go.set()
    expect(page.locator(".bubble")).to_have_text("Anybody there?")
    page.get_by_role("button", name="Regenerate").click()
    ended(page.locator(".answer"))
    expect(page.locator(".answer .words")).not_to_be_empty()


def test_speech_that_was_received_is_there_after_a_reload(page: Page) -> None:
    """A second of an answer that is still spoken: its sound is not stored before it is whole."""
    page.evaluate(
        """async () => {
          const [{ Answer, append }, { Conversation }, { Keeper }, { Player }] = await Promise.all(
            ["chat", "conversation", "keeper", "player"].map((name) => import(`/page/${name}.js`)),
          );
          const conversation = new Conversation(sessionStorage.getItem("omnistage.conversation"));
          const turn = conversation.add({ text: "Tell me a story", attachments: [] });
          const keeper = new Keeper((error) => console.error(error), () => {});
          await keeper.question(conversation, turn);
          const hooks = { urlOf: URL.createObjectURL, again: null, showTimeline: null };
          const view = new Answer({ id: "omni", chats: true }, hooks);
          append(view.element);
          const player = new Player((one) => view.showSpeech(one, false));
          player.push(new Uint8Array(2 * 24_000), 24_000);
          await keeper.answer(conversation, turn, view, true);
        }"""
    )
    reload(page)
    ended(page.locator(".answer"), "stopped")
    page.wait_for_function("() => document.querySelector('.replay audio')?.duration === 1")


def test_files_and_words_that_were_heard_are_shown_when_they_are_stored(page: Page, tmp_path: Path) -> None:
    page.route("**/v1/audio/transcriptions", lambda route: route.fulfill(json={"text": "the cat"}))
    use(page, "omni", max_tokens=3)
    busy(page)
    page.locator("#file").set_input_files(sound_file(tmp_path))
    page.wait_for_function("() => window.waiting > 0")
    expect(page.locator(".attachment")).to_have_count(0)
    page.evaluate("letGo()")
    expect(page.locator(".attachment[data-kind=audio]")).to_have_count(1)
    ended(ask(page, "Listen"))
    busy(page)
    page.get_by_role("button", name="What was heard?").click()
    page.wait_for_function("() => window.waiting > 0")
    expect(page.locator(".heard")).to_have_text("Listening…")
    page.evaluate("letGo()")
    expect(page.locator(".heard")).to_have_text("Heard: “the cat”")
    reload(page)
    expect(page.locator(".heard")).to_have_text("Heard: “the cat”")
    page.unroute_all()


def test_a_deleted_conversation_does_not_come_back(page: Page) -> None:
    """What was to be written of it is not, and what a page left of it goes too."""
    use(page, "lm", max_tokens=3)
    ended(ask(page, "First of all"))
    page.locator("#show-past").click()
    page.evaluate(
        """async () => {
          const { leave } = await import("/page/unsaved.js");
          const { load } = await import("/page/store.js");
          const { messages, ...entry } = await load(sessionStorage.getItem("omnistage.conversation"));
          const later = { ...entry, updated: Date.now() + 1000 };
          leave({ entry: later, messages: new Map([[0, messages[0]]]), end: Infinity });
        }"""
    )
    busy(page)
    page.locator("#prompt").fill("half a thought")
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete “First of all”").click()
    expect(page.locator(".message")).to_have_count(0)
    page.evaluate("letGo()")
    expect(page.locator("#past-none")).to_be_visible()
    reload(page)
    expect(page.locator("#past-none")).to_be_visible()
    expect(page.locator(".message")).to_have_count(0)


def test_all_is_deleted_also_what_this_page_cannot_read(page: Page) -> None:
    """What a page of another release left."""
    use(page, "lm", max_tokens=3)
    ended(ask(page, "First of all"))
    page.evaluate("localStorage.setItem('omnistage.unsaved.1', 'of another form')")
    page.locator("#show-past").click()
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator("#delete-all").click()
    expect(page.locator("#past-none")).to_be_visible()
    reload(page)
    expect(page.locator("#past-none")).to_be_visible()
    assert page.evaluate("Object.keys(localStorage).filter((name) => name.includes('unsaved'))") == []
