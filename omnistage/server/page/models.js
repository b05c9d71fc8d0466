// The models that this key may use, their inputs and outputs, and the selection.

import { getJson } from "./api.js";
import { $, el } from "./dom.js";

const NAMES = { text: "Text", audio: "Speech", image: "Picture", video: "Video" };

export class Model {
  constructor({ id, modalities, voices, stages, defaults, transcribes, unsupported }) {
    Object.assign(this, { id, voices, stages, defaults, transcribes, unsupported });
    this.input = modalities.input;
    this.output = modalities.output;
  }

  get chats() {
    return this.output.includes("text");
  }

  get speaks() {
    return this.output.includes("audio");
  }

  /** Speaks a text as it is, and nothing else. */
  get reads() {
    return this.speaks && this.output.length === 1;
  }

  get draws() {
    return this.output.includes("image") || this.films;
  }

  get films() {
    return this.output.includes("video");
  }
}

export async function loadModels() {
  return (await getJson("v1/models")).data.map((entry) => new Model(entry));
}

const CHOSEN = "omnistage.model"; // in this tab

/** Choose a model, where it is served. */
export function chooseModel(id) {
  if (![...$("model").options].some(({ value }) => value === id)) return;
  $("model").value = id;
  sessionStorage.setItem(CHOSEN, id);
}

/** Fill the chooser; the model that was chosen before stays chosen. */
export function showModels(models) {
  $("model").replaceChildren(...models.map(({ id }) => el("option", { value: id }, id)));
  $("model").disabled = models.length === 0;
  chooseModel(sessionStorage.getItem(CHOSEN));
}

const WANTED = "omnistage.outputs"; // what answers are made of besides text, as it was chosen last

const wanted = () => new Set((localStorage.getItem(WANTED) ?? "").split(",").filter(Boolean));

/** One switch per optional modality; text is always on, the others as they were chosen last. */
export function showOutputs(model) {
  const chosen = wanted();
  const chips = model.output.map((kind) => {
    const fixed = kind === "text" || model.output.length === 1;
    const checked = fixed || chosen.has(kind) || !model.chats;
    const input = el("input", { type: "checkbox", name: kind, id: `out-${kind}`, checked, disabled: fixed });
    return el("label", { class: "chip", for: input.id }, input, el("span", {}, NAMES[kind] ?? kind));
  });
  $("outputs").replaceChildren(...[...$("outputs").children].slice(0, 1), ...chips);
  $("voice").replaceChildren(...model.voices.map((voice) => el("option", { value: voice }, voice)));
  showVoice();
}

export function rememberOutputs() {
  const chosen = wanted();
  for (const { name, checked, disabled } of $("outputs").querySelectorAll("input")) {
    if (!disabled) chosen[checked ? "add" : "delete"](name);
  }
  localStorage.setItem(WANTED, [...chosen].join(","));
  showVoice();
}

/** Switch an output on. */
export function choose(kind) {
  const input = $("outputs").querySelector(`input[name="${kind}"]`);
  if (input === null || input.checked) return;
  input.checked = true;
  rememberOutputs();
}

/** One voice needs no menu. */
export function showVoice() {
  $("voice-label").hidden = !outputs().includes("audio") || $("voice").options.length < 2;
}

/** The requested modalities. */
export const outputs = () =>
  [...$("outputs").querySelectorAll("input")].filter(({ checked }) => checked).map(({ name }) => name);

const TAKES = { text: "text", image: "pictures", audio: "sound", video: "video" };
const GIVES = { text: "text", audio: "speech", image: "pictures", video: "video" };
const together = new Intl.ListFormat("en", { type: "conjunction" });

const words = (names, kinds) => together.format(Object.keys(names).filter((kind) => kinds.includes(kind)).map((kind) => names[kind]));

/** Input modalities in words. */
export const inWords = (kinds) => words(TAKES, kinds);

/** What to say of files that a model does not take; nothing where there are none. */
export const refusal = (model, names, end) => (names.length ? `${model.id} does not take ${together.format(names)}${end}` : "");

/** A model's inputs and outputs, in a sentence. */
export const describe = (model) => `${model.id} takes ${inWords(model.input)}, and answers with ${words(GIVES, model.output)}.`;

/** What the message box asks for. */
export function placeholder(model) {
  if (model.reads) return "Text to speak";
  return model.chats ? "Message" : `Describe a ${model.films ? "video" : "picture"}`;
}
