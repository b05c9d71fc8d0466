// The list of past conversations: open one, export it, delete it.

import { $, bytes, el, iconButton } from "./dom.js";
import { exported } from "./conversation.js";
import { listed, load, remove, removeAll } from "./store.js";

const TIME = new Intl.DateTimeFormat(undefined, { timeStyle: "short" });
const DATE = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });

/** The time of today, the date of other days: both do not fit beside the number of messages. */
const when = (time) => (new Date(time).toDateString() === new Date().toDateString() ? TIME : DATE).format(time);

export class Past {
  /** `current()` is the id of the one that is shown; `open(id)` shows another, `deleted(id)` follows a removal. */
  constructor({ current, open, deleted, problem }) {
    Object.assign(this, { current, open, deleted, problem });
    $("delete-all").addEventListener("click", () => this.deleteAll());
  }

  async draw() {
    let entries;
    try {
      entries = await listed();
    } catch (error) {
      this.problem(error);
      return;
    }
    const focused = document.activeElement?.closest?.("#past-list li")?.dataset.id;
    $("past-list").replaceChildren(...entries.map((entry) => this.row(entry)));
    $("past-none").hidden = entries.length > 0;
    $("past-foot").hidden = entries.length === 0;
    if (focused) $("past-list").querySelector(`[data-id="${CSS.escape(focused)}"] button`)?.focus();
  }

  row(entry) {
    const { id, title, updated, turns } = entry;
    const details = `${when(updated)} · ${turns === 1 ? "1 message" : `${turns} messages`}`;
    const name = el("button", { type: "button", class: "past-open", title: `${title} (${bytes(entry.bytes)})` }, el("span", {}, title), el("small", { class: "muted" }, details));
    if (id === this.current()) name.setAttribute("aria-current", "true");
    name.addEventListener("click", () => this.open(id));
    const save = iconButton("save", `Export “${title}”`, () => this.export(entry));
    const drop = iconButton("trash", `Delete “${title}”`, () => this.delete(entry));
    return el("li", { data: { id } }, name, save, drop);
  }

  async export({ id, title }) {
    const file = await exported(await load(id));
    const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation";
    const link = el("a", { href: URL.createObjectURL(file), download: `${name}.json` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }

  async delete({ id, title }) {
    if (!confirm(`Delete “${title}”? It is kept in this browser only.`)) return;
    this.deleted(id);
    await remove(id).catch(this.problem);
    this.draw();
  }

  async deleteAll() {
    if (!confirm("Delete all conversations? They are kept in this browser only.")) return;
    this.deleted(this.current());
    await removeAll().catch(this.problem);
    this.draw();
  }
}
