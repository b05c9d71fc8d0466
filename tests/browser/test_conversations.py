"""Conversations on the page: kept in the browser, edited, asked again, exported, deleted."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.browser.harness import CHAT, SLOW, Watched, ask, ended, letters
from tests.browser.test_page import Hold, dropped, hold, picture_file, use  # noqa: F401  (a fixture)

CODE = 'Look:\n```python\n# greet\ndef hello(name):\n    return f"hi {name}", 42\n```\nand so on'


def reload(page: Page) -> None:
    page.reload()
    page.locator("#status[data-state=ready]").wait_for()


def kept(page: Page, what: str) -> None:
    """Wait until something of the conversation is in the store: answers and drafts are written a little later."""
    page.evaluate(
        f"""async () => {{
          const {{ load }} = await import("/page/store.js");
          while (!(await load(sessionStorage.getItem("omnistage.conversation")))?.{what}) {{
            await new Promise((done) => setTimeout(done, 20));
          }}
        }}"""
    )


def test_a_reload_loses_nothing(page: Page, watched: Watched, tmp_path: Path) -> None:
    """Text, what was attached, speech, pictures, the draft, the model and its parameters."""
    use(page, "omni", "audio", max_tokens=3, temperature=0)
    file = picture_file(tmp_path)
    page.locator("#file").set_input_files(file)
    page.locator(".attachment").wait_for()
    expect(page.locator(".attachment-name")).to_have_text(file.name)
    spoken = ask(page, "What is it?")
    ended(spoken)
    said = spoken.locator(".words").inner_text()
    use(page, "draw", size="64x64", steps=2)
    ended(ask(page, "A lighthouse"))
    page.locator("#prompt").fill("half a thought")
    dropped(page, "notes.txt", "text/plain", "remember the milk")
    expect(page.locator(".attachment")).to_have_count(1)
    kept(page, "draft?.attachments.length")
    reload(page)
    expect(page.locator(".message")).to_have_count(4)
    expect(page.locator("#model")).to_have_value("draw")
    expect(page.locator("#param-size")).to_have_value("64x64")
    expect(page.locator("#prompt")).to_have_value("half a thought")
    expect(page.locator(".attachment .file")).to_have_text("notes.txt")
    assert page.locator(".answer").first.locator(".words").inner_text() == said
    assert page.locator(".picture img").evaluate("image => image.decode().then(() => image.naturalWidth)") == 64
    expect(page.locator(".bubble figcaption")).to_have_text(file.name)
    page.wait_for_function("() => document.querySelector('.replay audio').duration > 0.1")
    use(page, "omni")
    page.locator("#out-audio").uncheck()
    ended(ask(page, "And now?"))
    messages = watched.sent(CHAT).post_data_json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]  # the picture's turn has no text
    sent = messages[0]["content"][0]["image_url"]["url"].removeprefix("data:image/png;base64,")
    assert base64.b64decode(sent) == file.read_bytes()
    assert letters(messages[1]["content"]) == letters(said)
    assert "remember the milk" in messages[2]["content"][0]["text"]


def test_an_answer_that_a_reload_cut_short_is_there(page: Page, hold: Hold) -> None:  # noqa: F811
    use(page, "lm", max_tokens=1500)
    hold("lm", "thinker", 8)  # or it ends before a slow browser reloads
    answer = ask(page, "Never ending")
    expect(answer.locator(".words")).not_to_be_empty(timeout=SLOW)
    kept(page, "messages[1]?.text")
    reload(page)
    ended(page.locator(".answer"), "stopped")
    expect(page.locator(".answer .words")).not_to_be_empty()
    expect(page.locator(".foot-row")).to_contain_text("interrupted")


def test_past_conversations_are_listed_opened_exported_and_deleted(page: Page) -> None:
    use(page, "lm", max_tokens=3)
    ended(ask(page, "First of all"))
    page.locator("#new-chat").click()
    expect(page.locator(".message")).to_have_count(0)
    ended(ask(page, "Second thoughts"))
    page.locator("#show-past").click()
    names = page.locator(".past-open span")
    expect(names).to_have_text(["Second thoughts", "First of all"])
    expect(page.locator(".past-open[aria-current]")).to_contain_text("Second thoughts")
    names.nth(1).click()
    expect(page.locator(".bubble")).to_have_text("First of all")
    ended(page.locator(".answer"))
    with page.expect_download() as saved:
        page.get_by_role("button", name="Export “First of all”").click()
    export = json.loads(saved.value.path().read_text(encoding="utf-8"))
    assert [message["role"] for message in export["messages"]] == ["user", "assistant"]
    assert letters(export["messages"][1]["content"]) == letters(page.locator(".answer .words").inner_text())
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete “First of all”").click()
    expect(names).to_have_text(["Second thoughts"])
    expect(page.locator(".message")).to_have_count(0)  # it was the one that was shown
    page.locator("#delete-all").click()
    expect(names).to_have_count(0)
    reload(page)
    expect(page.locator("#past-none")).to_be_visible()
    assert page.evaluate("indexedDB.databases().then((all) => all.map(({ name }) => name))") == ["omnistage"]


def test_the_oldest_conversations_lose_their_files_first(page: Page) -> None:
    found = page.evaluate(
        """async () => {
          const { save, load, trim } = await import("/page/store.js");
          const file = new Blob([new Uint8Array(100)], { type: "image/png" });
          const message = { text: "look", attachments: [{ kind: "image", name: "a.png", file }] };
          for (const [id, updated] of [["old", 1], ["new", 2]]) {
            const entry = { id, title: id, updated, bytes: 200 * 2 ** 20, files: true, turns: 1, draft: null };
            await save({ ...entry, bytes: 100 }, new Map([[0, message]]));
            await save(entry);  // as if it had been large
          }
          await trim("");
          const found = [...(await load("old")).messages, ...(await load("new")).messages];
          return found.map(({ text, attachments: [item] }) => [text, item.name, item.file !== null]);
        }"""
    )
    assert found == [["look", "a.png", False], ["look", "a.png", True]]


def test_a_message_is_edited_and_an_answer_asked_for_again(page: Page, watched: Watched) -> None:
    use(page, "lm", max_tokens=3, seed=1)
    ended(ask(page, "One"))
    ended(ask(page, "Two"))
    page.get_by_role("button", name="Regenerate").click()
    ended(page.locator(".answer").last)
    expect(page.locator(".message")).to_have_count(4)
    assert [message["content"] for message in watched.sent(CHAT).post_data_json["messages"]][::2] == ["One", "Two"]
    page.get_by_role("button", name="Edit this message").first.click()
    field = page.get_by_role("textbox", name="Edit this message")
    expect(field).to_be_focused()
    field.press("Escape")
    expect(page.locator(".bubble").first).to_have_text("One")
    page.get_by_role("button", name="Edit this message").first.click()
    field.fill("Eins")
    field.press("Enter")
    ended(page.locator(".answer"))
    expect(page.locator(".bubble")).to_have_text(["Eins"])  # what followed is gone
    assert [message["content"] for message in watched.sent(CHAT).post_data_json["messages"]] == ["Eins"]
    reload(page)
    expect(page.locator(".bubble")).to_have_text(["Eins"])


def test_code_has_colours_and_can_be_copied_and_pictures_have_a_larger_view(page: Page, tmp_path: Path) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write", "microphone"])
    use(page, "omni", max_tokens=2)
    page.locator("#file").set_input_files(picture_file(tmp_path))
    page.locator(".attachment").wait_for()
    ended(ask(page, CODE))
    block = page.locator(".bubble .code-block")
    expect(block.locator(".code-head span").first).to_have_text("python")
    kinds = {kind: block.locator(f".code-{kind}").all_inner_texts() for kind in ("comment", "word", "string", "number")}
    assert kinds == {"comment": ["# greet"], "word": ["def", "return"], "string": ['"hi {name}"'], "number": ["42"]}
    block.get_by_role("button", name="Copy the code").click()
    assert page.evaluate("navigator.clipboard.readText()") == CODE.split("```")[1].removeprefix("python\n").rstrip("\n")
    page.get_by_role("button", name="Enlarge cat's picture.png").click()
    dialog = page.get_by_role("dialog", name="cat's picture.png")
    expect(dialog.locator("img")).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_two_tabs_go_on_with_one_conversation_and_lose_nothing(page: Page, hold: Hold) -> None:  # noqa: F811
    """What one tab adds, the other shows; where both are answered at once, they go on apart."""
    use(page, "lm", max_tokens=3)
    ended(ask(page, "First"))
    other = page.context.new_page()
    other.goto(page.url)
    other.locator("#status[data-state=ready]").wait_for()
    use(other, "lm", max_tokens=3)
    other.locator("#show-past").click()
    other.locator(".past-open").click()
    ended(other.locator(".answer"))
    other.locator("#prompt").fill("half a thought")
    ended(ask(page, "Second"))
    expect(other.locator(".answer[data-ended=done]")).to_have_count(2)
    expect(other.locator("#prompt")).to_have_value("half a thought")
    use(page, "lm", max_tokens=500)
    held = hold("lm", "thinker", 6)
    expect(ask(page, "Here").locator(".words")).not_to_be_empty(timeout=SLOW)
    expect(other.locator(".user")).to_have_count(3)
    ask(other, "There")
    expect(other.locator(".past-open")).to_have_count(2)
    page.locator("#stop").click()
    held.go.set()
    ended(page.locator(".answer").last, "stopped")
    for tab, texts in ((page, ["First", "Second", "Here"]), (other, ["First", "Second", "Here", "There"])):
        tab.locator(".answer[data-ended]").nth(len(texts) - 2).wait_for()
        reload(tab)
        expect(tab.locator(".bubble")).to_have_text(texts)
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator("#delete-all").click()  # the list is open since the other tab opened it
    expect(other.locator(".message")).to_have_count(0)
    other.close()


def test_full_storage_still_keeps_text_and_says_so(page: Page, tmp_path: Path) -> None:
    page.evaluate(
        """() => {
          const put = IDBObjectStore.prototype.put;
          const holdsFile = (value) => value instanceof Blob
            || (value !== null && typeof value === "object" && Object.values(value).some(holdsFile));
          IDBObjectStore.prototype.put = function (value, ...key) {
            if (holdsFile(value)) throw new DOMException("", "QuotaExceededError");
            return put.call(this, value, ...key);
          };
        }"""
    )
    use(page, "omni", max_tokens=3)
    page.locator("#file").set_input_files(picture_file(tmp_path))
    expect(page.locator("#notice")).to_contain_text("its storage is full. Only text is kept now")
    ended(ask(page, "What is it?"))
    kept(page, "messages[1]?.ended")
    reload(page)
    expect(page.locator(".bubble")).to_contain_text("What is it?")
    expect(page.locator(".bubble")).to_contain_text("no longer kept")
    ended(page.locator(".answer"))


def test_files_that_a_model_does_not_take_are_named_and_another_model_goes_on_without(
    page: Page, watched: Watched, tmp_path: Path
) -> None:
    use(page, "omni", max_tokens=3)
    file = picture_file(tmp_path)
    page.locator("#file").set_input_files(file)
    page.locator(".attachment").wait_for()
    use(page, "lm", max_tokens=3)
    expect(page.locator("#notice")).to_have_text(f"lm does not take {file.name}: remove it, or choose another model.")
    page.locator("#prompt").fill("What is it?")
    page.locator("#send").click()
    expect(page.locator(".message")).to_have_count(0)
    use(page, "omni")
    expect(page.locator("#notice")).to_be_hidden()
    page.locator("#send").click()
    ended(page.locator(".answer"))
    use(page, "lm")
    expect(page.locator("#notice")).to_contain_text(f"lm does not take {file.name} from above")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator("#notice")).to_have_text(f"lm does not take {file.name}: choose another model.")
    page.get_by_role("button", name="Edit this message").click()
    page.get_by_role("textbox", name="Edit this message").fill("What else is it?")
    page.get_by_role("button", name="Send", exact=True).first.click()
    expect(page.get_by_role("textbox", name="Edit this message")).to_have_value("What else is it?")  # it is not lost
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".bubble")).to_contain_text(["What is it?"])
    expect(page.locator(".answer[data-ended=done]")).to_have_count(1)  # the answer stays
    ended(ask(page, "And now?"))
    messages = watched.sent(CHAT).post_data_json["messages"]
    assert messages[0]["content"] == "What is it?"
