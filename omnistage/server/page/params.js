// The parameters for a model's modalities. Empty fields are not sent: the service's defaults apply.

import { $, el } from "./dom.js";
import { openPanel } from "./panel.js";

const ENTERED = "omnistage.params";

const number = (name, label, hint, range) => ({ name, label, hint, type: "number", ...range });

const SAMPLING = [
  number("temperature", "Temperature", "0 always takes the likeliest token", { min: 0, max: 2, step: 0.05 }),
  number("top_p", "Top p", "share of likely tokens kept", { min: 0.01, max: 1, step: 0.01 }),
  number("max_tokens", "Max tokens", "", { min: 1, max: 1_000_000, step: 1 }),
  number("seed", "Seed", "same seed, same answer", { min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 }),
];
const SYSTEM = { name: "system", label: "System prompt", hint: "", type: "textarea" };
const DRAWING = [
  { name: "size", label: "Size", hint: "width x height", type: "text", pattern: "[0-9]{2,5}x[0-9]{2,5}" },
  number("steps", "Steps", "", { min: 1, max: 1000, step: 1 }),
  number("guidance", "Guidance", "how closely to follow", { min: 0, max: 100, step: 0.1 }),
  number("seed", "Seed", "same seed, same picture", { min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 }),
  number("n", "Pictures", "", { min: 1, max: 16, step: 1 }),
  { name: "negative_prompt", label: "Negative prompt", hint: "what to avoid", type: "textarea" },
];
const WHOLE = new Set(["max_tokens", "seed", "steps", "n"]);

export class Params {
  constructor() {
    // By name, so that they survive a change of model; in this tab also a reload.
    this.entered = new Map(JSON.parse(sessionStorage.getItem(ENTERED) ?? "[]"));
    $("params").addEventListener("input", ({ target }) => {
      this.entered.set(target.name, target.value);
      this.keep();
    });
    $("params").addEventListener("submit", (event) => event.preventDefault());
    $("reset-params").addEventListener("click", () => {
      this.entered.clear();
      this.keep();
      if (this.model) this.show(this.model);
    });
  }

  keep() {
    sessionStorage.setItem(ENTERED, JSON.stringify([...this.entered]));
  }

  /** Draw the fields for a model. */
  show(model) {
    this.model = model;
    const fields = [];
    if (model.draws && !model.chats) fields.push(...DRAWING.filter(({ name }) => name !== "n" || !model.films));
    else fields.push(...SAMPLING);
    if (model.draws && model.chats) fields.push(...DRAWING.filter(({ name }) => !["seed", "n"].includes(name)));
    if (model.chats) fields.push(SYSTEM);
    this.fields = fields.filter(({ name }) => !model.unsupported.includes(name));
    $("params").replaceChildren(...this.fields.map((field) => this.field(field)));
  }

  field({ name, label, hint, type, ...range }) {
    const id = `param-${name}`;
    const value = this.entered.get(name) ?? "";
    const shared = { id, name, value, placeholder: this.placeholder(name) };
    const input =
      type === "textarea"
        ? el("textarea", { ...shared, rows: 2 })
        : el("input", { ...shared, type, autocomplete: "off", ...range });
    if (hint) input.setAttribute("aria-describedby", `${id}-hint`);
    const described = hint ? el("small", { id: `${id}-hint`, class: "muted" }, hint) : null;
    return el("div", { class: type === "textarea" ? "field broad" : "field" }, el("label", { for: id }, label), input, described);
  }

  placeholder(name) {
    const { sampling = {}, drawing = {} } = this.model.defaults;
    if (name === "size" && drawing.width) return `${drawing.width}x${drawing.height}`;
    const known = this.model.chats ? sampling[name] ?? drawing[name] : drawing[name];
    if (known !== undefined) return String(known);
    return name === "seed" ? "random" : name === "negative_prompt" || name === "system" ? "none" : "model’s default";
  }

  /** Whether all fields are valid; those that are not are shown with the browser's reason, also where the panel was closed. */
  valid() {
    if ($("params").checkValidity()) return true;
    openPanel();
    $("params").reportValidity();
    return false;
  }

  /** Say at a field why the service refused it, until it is changed. */
  mark(name, message) {
    const field = $(`param-${name.split(".").pop()}`);
    if (field === null) return;
    field.setAttribute("aria-invalid", "true");
    field.title = message;
    field.addEventListener("input", () => {
      field.removeAttribute("aria-invalid");
      field.title = "";
    }, { once: true });
  }

  /** The filled fields, numbers as numbers. */
  values() {
    const values = {};
    for (const { name, type } of this.fields) {
      const text = (this.entered.get(name) ?? "").trim();
      if (text !== "") values[name] = type === "number" ? (WHOLE.has(name) ? Math.round(Number(text)) : Number(text)) : text;
    }
    return values;
  }
}
