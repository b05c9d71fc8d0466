// A message of the user: what was written and attached, and what was heard in a recording. It can be edited.

import { preview } from "./attachments.js";
import { el, iconButton } from "./dom.js";
import { render } from "./render.js";
import { viewable } from "./viewer.js";

export class Question {
  /**
   * `edited(text)` is called with the new text, and gives whether it was asked; `editing()` when the turn's `edit`, the text in the
   * editor, is another; `hear(item)` gives what is said in a recording, as a promise.
   */
  constructor(turn, { edited, editing, hear }) {
    Object.assign(this, { turn, edited, editing, hear });
    this.places = new Map(); // where the transcripts of recordings stand
    this.bubble = el("div", { class: "bubble" });
    const edit = iconButton("edit", "Edit this message", () => this.edit().focus(), "act");
    this.actions = el("div", { class: "acts" }, edit);
    this.element = el("li", { class: "message user" }, el("h3", { class: "unseen" }, "You"), this.bubble, this.actions);
    this.show();
    if (turn.edit !== null) this.edit();
  }

  show() {
    const { text, attachments } = this.turn;
    this.bubble.replaceChildren(...attachments.map((item) => this.attachment(item)));
    if (!text) return;
    const words = el("div", { class: "said" });
    render(words, text);
    this.bubble.append(words);
  }

  attachment(item) {
    const shown = preview(item);
    const figure = el("figure", { class: "media", data: { kind: item.kind } });
    figure.append(item.kind === "image" && item.file ? viewable(shown, item.name) : shown);
    if (item.kind !== "text" && item.file) figure.append(el("figcaption", { class: "muted" }, item.name));
    if (item.kind === "audio") figure.append(this.transcript(item));
    return figure;
  }

  /** What was heard, or a button that asks for it. */
  transcript(item) {
    const place = el("p", { class: "heard" });
    this.places.set(item, place);
    if (item.heard !== undefined) {
      place.textContent = item.heard === "" ? "No speech was heard." : `Heard: “${item.heard}”`;
    } else if (item.file) {
      const ask = el("button", { type: "button", class: "plain" }, "What was heard?");
      ask.addEventListener("click", () => this.listen(item));
      place.append(ask);
    }
    return place;
  }

  /** Have the service say what is said in a recording. */
  async listen(item) {
    this.places.get(item).textContent = "Listening…";
    try {
      await this.hear(item);
      this.places.get(item).replaceWith(this.transcript(item));
    } catch (error) {
      this.places.get(item).textContent = `What was said could not be written down: ${error.message}`;
    }
  }

  /** Open the editor with the message, or with what was written in it before a reload; its field. */
  edit() {
    const field = el("textarea", { class: "editor", rows: 3, value: this.turn.edit ?? this.turn.text, "aria-label": "Edit this message" });
    const cancel = el("button", { type: "button", class: "button" }, "Cancel");
    const form = el("form", { class: "edit" }, field, el("p", { class: "row end" }, cancel, el("button", { class: "button main" }, "Send")));
    const keep = (text) => {
      if (text === this.turn.edit) return;
      this.turn.edit = text;
      this.editing();
    };
    const close = () => {
      form.replaceWith(this.bubble);
      this.actions.hidden = false;
      keep(null);
    };
    const cancelled = () => {
      close();
      this.actions.querySelector("button").focus();
    };
    cancel.addEventListener("click", cancelled);
    field.addEventListener("input", () => keep(field.value));
    form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === field) {
        event.preventDefault();
        form.requestSubmit();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        cancelled();
      }
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = field.value.trim();
      if (!text && this.turn.attachments.length === 0) return;
      if (this.edited(text)) close();
    });
    this.bubble.replaceWith(form);
    this.actions.hidden = true;
    return field;
  }
}
