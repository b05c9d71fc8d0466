// What can be asked of a model, as buttons on the empty page.

import { $, el, icon } from "./dom.js";
import { choose } from "./models.js";

const SMALL = 256; // pixels: pictures below it have room for one thing
const TEXTS = ["What is the capital of France?", "Write a haiku about the sea"];
const PICTURES = ["A lighthouse at dusk, watercolour", "A paper boat on a calm lake, morning light", "An isometric library full of plants"];
const SMALL_PICTURES = ["A red apple", "A blue butterfly", "A yellow flower"];

/** Example prompts for this model; actions are "attach", "record" and "talk", `output` is what the answer needs. */
function examplesFor(model) {
  const takes = (kind) => model.input.includes(kind);
  if (model.reads) return [{ icon: "speaker", text: "The sea is calm tonight." }];
  if (model.films && !model.chats) return [{ icon: "image", text: "Waves rolling onto a quiet beach" }];
  const pictures = (model.defaults.drawing?.width ?? 1024) < SMALL ? SMALL_PICTURES : PICTURES;
  if (!model.chats) return pictures.map((text) => ({ icon: "image", text }));
  const examples = [{ icon: "spark", text: TEXTS[0] }];
  if (model.draws) examples.push({ icon: "image", text: `Draw ${pictures[0].toLowerCase()}`, output: "image" });
  if (model.speaks) examples.push({ icon: "speaker", text: "Tell me a very short story, aloud", output: "audio" });
  if (takes("image")) examples.push({ icon: "image", text: "What do you see in this picture?", action: "attach" });
  if (takes("audio")) examples.push({ icon: "mic", text: "Ask with your voice", action: "record" });
  if (examples.length < 4) examples.push({ icon: "spark", text: TEXTS[1] });
  return examples.slice(0, 5);
}

/** Show the examples for a model; `write(text)` puts one into the message box. */
export function showExamples(model, write) {
  $("examples").replaceChildren(...examplesFor(model).map((one) => example(one, write)));
}

function example({ icon: name, text, action, output }, write) {
  const button = el("button", { type: "button", class: "example" }, icon(name), el("span", {}, text));
  button.addEventListener("click", () => {
    if (output) choose(output);
    if (action === "record" || action === "talk") {
      $(action === "talk" ? "talk" : "mic").click();
      return;
    }
    write(text);
    if (action === "attach") $("attach").click();
  });
  return el("li", {}, button);
}
