// Attachments of a message: images, audio, videos and text files, from the button, the clipboard or a drop.

import { toBase64 } from "./api.js";
import { $, announce, bytes, el, icon, iconButton } from "./dom.js";
import { inWords } from "./models.js";

const MAX_TEXT_BYTES = 200_000; // bytes; more would fill a model's context by itself
const AUDIO_FORMATS = ["wav", "mp3", "flac", "ogg", "opus", "m4a", "aac", "webm"];
const TEXT_NAMES = /\.(txt|md|csv|tsv|json|ya?ml|toml|xml|html|css|js|ts|py|rs|go|c|h|cpp|java|sh|log)$/i;

/** A file's bytes inside a request. As JSON it is what the service takes; in snippets it is the file's name. */
export class FileData {
  constructor(name, mime, base64, asUrl) {
    Object.assign(this, { name, mime, base64, asUrl });
  }

  toJSON() {
    return this.asUrl ? `data:${this.mime};base64,${this.base64}` : this.base64;
  }
}

/** A file's modality, "text" for text files; null for other types. */
function kindOf(file) {
  const head = file.type.split("/")[0];
  if (["image", "audio", "video"].includes(head)) return head;
  return head === "text" || file.type === "application/json" || TEXT_NAMES.test(file.name) ? "text" : null;
}

/** A part of a chat message's content; where the file is no longer kept, what was heard in it, or null. */
export function partOf({ kind, name, file, text, base64, heard }) {
  if (kind === "text") return { type: "text", text: `File ${name}:\n\`\`\`\n${text}\n\`\`\`` };
  if (!file) return heard ? { type: "text", text: heard } : null;
  if (kind === "image") return { type: "image_url", image_url: { url: new FileData(name, file.type, base64, true) } };
  if (kind === "video") return { type: "video_url", video_url: { url: new FileData(name, file.type, base64, true) } };
  const ending = name.split(".").pop().toLowerCase();
  const known = AUDIO_FORMATS.includes(ending) ? { format: ending } : {};
  return { type: "input_audio", input_audio: { data: new FileData(name, file.type, base64, false), ...known } };
}

/** How an attachment is shown, in the composer and in the message that was sent. */
export function preview({ kind, name, file, url }) {
  if (kind !== "text" && !file) return el("span", { class: "file muted" }, icon("file"), `${name} (no longer kept)`);
  if (kind === "image") return el("img", { src: url, alt: name });
  if (kind === "video") return el("video", { src: url, controls: true, preload: "metadata", "aria-label": name });
  if (kind === "audio") return el("audio", { src: url, controls: true, preload: "metadata", "aria-label": name });
  return el("span", { class: "file" }, icon("file"), name);
}

export class Attachments {
  /**
   * `refuse(message)` shows why a file was not attached; `changed()` is called when files were added or removed, and gives a
   * promise that is fulfilled when the list is stored: a file is shown from then on.
   */
  constructor(refuse, changed) {
    this.refuse = refuse;
    this.changed = changed;
    this.items = [];
    this.round = 0; // which conversation they are for
    this.accepted = new Set(["text"]);
    this.limit = 64 * 2 ** 20;
  }

  /** The model's input modalities. Attachments that it does not take stay, in `misfits`: another model may. */
  accept(modalities) {
    this.accepted = new Set([...modalities, "text"]);
    const types = [...this.accepted].map((kind) => `${kind}/*`);
    $("file").accept = [...types, ".json,.md,.csv,.log,.yaml,.yml,.py,.js"].join(",");
  }

  /** Names of attachments that the model does not take. */
  get misfits() {
    return this.misfitsOf(this.items);
  }

  /** Of these; one whose file is no longer kept is sent as words. */
  misfitsOf(items) {
    return items.filter(({ kind, file }) => file && !this.accepted.has(kind)).map(({ name }) => name);
  }

  get size() {
    return this.items.reduce((sum, item) => sum + item.file.size, 0);
  }

  async add(files) {
    for (const file of files) await this.addOne(file);
  }

  async addOne(file) {
    const kind = kindOf(file);
    const name = file.name || "The file";
    if (kind === null || !this.accepted.has(kind)) {
      this.refuse(`${name} was not attached: this model takes ${inWords([...this.accepted])}.`);
      return;
    }
    // base64 is a third longer, and the rest of the body needs some room too.
    if ((this.size + file.size) * 1.34 + 65_536 > this.limit) {
      this.refuse(`${name} was not attached: requests are limited to ${bytes(this.limit)}, and files grow by a third.`);
      return;
    }
    if (kind === "text" && file.size > MAX_TEXT_BYTES) {
      this.refuse(`${name} was not attached: text files are limited to ${bytes(MAX_TEXT_BYTES)}.`);
      return;
    }
    const { round } = this;
    const content = kind === "text" ? { text: await file.text() } : { base64: await toBase64(file) };
    if (round !== this.round) return; // another conversation has begun while it was read
    const item = { kind, name, file, url: URL.createObjectURL(file), ...content };
    this.items.push(item);
    await this.changed();
    if (!this.items.includes(item)) return; // it was sent meanwhile, or another conversation has begun
    this.draw();
    announce(`${name} attached`);
  }

  /** The attachments of the message that is being sent, which keeps them; the list is empty afterwards. */
  take() {
    const taken = this.items;
    this.items = [];
    this.draw();
    return taken;
  }

  /** Attach what was kept, before what was attached since. */
  put(items) {
    this.items = [...items, ...this.items];
    this.draw();
  }

  /** Attach nothing, not even what is still being read. */
  clear() {
    this.round += 1;
    for (const { url } of this.take()) URL.revokeObjectURL(url);
  }

  draw() {
    const list = $("attachments");
    list.hidden = this.items.length === 0;
    list.replaceChildren(
      ...this.items.map((item) => {
        const remove = iconButton("close", `Remove ${item.name}`, () => {
          URL.revokeObjectURL(item.url);
          this.items = this.items.filter((other) => other !== item);
          this.changed();
          this.draw();
          $("prompt").focus();
        });
        const name = item.kind === "text" ? null : el("span", { class: "attachment-name" }, item.name);
        const size = el("span", { class: "muted" }, bytes(item.file.size));
        return el("li", { class: "attachment", data: { kind: item.kind } }, preview(item), name, size, remove);
      }),
    );
  }
}

/** Files from the button, the clipboard and the desktop, all to one place. */
export function setUpAttachments(attachments) {
  $("attach").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", async () => {
    await attachments.add([...$("file").files]);
    $("file").value = "";
    $("prompt").focus();
  });
  document.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (files.length === 0) return;
    event.preventDefault();
    attachments.add(files);
  });
  let inside = 0; // enter and leave come for every element on the way
  const over = (change) => {
    inside = Math.max(0, inside + change);
    $("drop").classList.toggle("on", inside > 0);
  };
  const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragenter", (event) => carriesFiles(event) && over(1));
  document.addEventListener("dragleave", (event) => carriesFiles(event) && over(-1));
  document.addEventListener("dragover", (event) => carriesFiles(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    over(-inside);
    attachments.add([...event.dataTransfer.files]);
  });
}
