// The models that this key may use, their inputs and outputs, and the selection.

import { getJson } from "./api.js";
import { $, el } from "./dom.js";

const NAMES = { text: "Text", audio: "Speech", image: "Picture", video: "Video" };

export class Model {
  constructor({ id, modalities, voices, stages, defaults }) {
    Object.assign(this, { id, voices, stages, defaults });
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

/** Fill the chooser; the model that was chosen before stays chosen. */
export function showModels(models) {
  const before = $("model").value;
  $("model").replaceChildren(...models.map(({ id }) => el("option", { value: id }, id)));
  $("model").disabled = models.length === 0;
  if (models.some(({ id }) => id === before)) $("model").value = before;
}

/** One switch per optional modality; text output is always on. */
export function showOutputs(model) {
  const chips = model.output.map((kind) => {
    const fixed = kind === "text" || model.output.length === 1;
    const input = el("input", { type: "checkbox", name: kind, id: `out-${kind}`, checked: true, disabled: fixed });
    return el("label", { class: "chip", for: input.id }, input, el("span", {}, NAMES[kind] ?? kind));
  });
  $("outputs").replaceChildren(...[...$("outputs").children].slice(0, 1), ...chips);
  $("voice").replaceChildren(...model.voices.map((voice) => el("option", { value: voice }, voice)));
  showVoice();
}

export function showVoice() {
  $("voice-label").hidden = !outputs().includes("audio") || $("voice").options.length === 0;
}

/** The requested modalities. */
export const outputs = () =>
  [...$("outputs").querySelectorAll("input")].filter(({ checked }) => checked).map(({ name }) => name);

const EXAMPLES = {
  text: [
    ["spark", "Explain gapless playback in two sentences"],
    ["spark", "Write a haiku about pipelines"],
  ],
  audio: [["speaker", "Tell me a very short story, aloud"]],
  image: [
    ["image", "A lighthouse at dusk, watercolour"],
    ["image", "A paper boat on a calm lake, morning light"],
    ["image", "An isometric library full of plants"],
  ],
  video: [["image", "Waves rolling onto a quiet beach"]],
};

/** Example prompts for this model; actions are "attach" and "record". */
export function examplesFor(model) {
  const examples = model.output.flatMap((kind) => EXAMPLES[kind] ?? []).map(([icon, text]) => ({ icon, text }));
  if (model.chats && model.input.includes("image")) {
    examples.push({ icon: "image", text: "What do you see in this picture?", action: "attach" });
  }
  if (model.chats && model.input.includes("audio")) examples.push({ icon: "mic", text: "Ask with your voice", action: "record" });
  return examples.slice(0, 4);
}

const TAKES = { text: "text", image: "pictures", audio: "sound", video: "video" };
const GIVES = { text: "text", audio: "speech", image: "pictures", video: "video" };
const together = new Intl.ListFormat("en", { type: "conjunction" });

/** A model's inputs and outputs, in a sentence. */
export function describe(model) {
  const words = (names, kinds) => together.format(Object.keys(names).filter((kind) => kinds.includes(kind)).map((kind) => names[kind]));
  return `${model.id} takes ${words(TAKES, model.input)}, and answers with ${words(GIVES, model.output)}.`;
}
