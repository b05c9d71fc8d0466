// A text as elements: paragraphs, code blocks and inline code. It is never parsed as markup.

import { copyText, el } from "./dom.js";
import { highlighted } from "./highlight.js";

/** Show a text that may still grow in `place`. Blocks that stay the same stay: a selection in them survives. */
export function render(place, text) {
  const blocks = blocksOf(text);
  const before = place.blocks ?? [];
  let same = 0;
  while (same < blocks.length && same < before.length && blocks[same].source === before[same].source) same += 1;
  while (place.children.length > same) place.lastElementChild.remove();
  place.append(...blocks.slice(same).map((block) => block.make()));
  place.blocks = blocks;
}

/** An unclosed code block counts as one. */
function blocksOf(text) {
  const blocks = [];
  const pieces = text.split(/^```([^\n]*)(?:\n|$)/m); // text, fence, code, fence, text, …
  for (let i = 0; i < pieces.length; i += 4) {
    for (const paragraph of pieces[i].split(/\n{2,}/)) {
      const source = paragraph.trim();
      if (source !== "") blocks.push({ source, make: () => el("p", {}, ...inline(source)) });
    }
    if (pieces[i + 1] === undefined) continue;
    const [language] = pieces[i + 1].trim().split(/\s/);
    const code = (pieces[i + 2] ?? "").replace(/\n$/, "");
    blocks.push({ source: `\`\`\`${language}\n${code}`, make: () => codeBlock(code, language) });
  }
  return blocks;
}

function codeBlock(code, language) {
  const copy = el("button", { type: "button", class: "plain", "aria-label": "Copy the code" }, "Copy");
  copy.addEventListener("click", () => copyText(code, copy));
  const head = el("div", { class: "code-head" }, el("span", { class: "muted" }, language || "code"), copy);
  const label = `Code${language ? `, ${language}` : ""}`;
  const pre = el("pre", { tabIndex: 0, role: "group", "aria-label": label }, el("code", {}, ...highlighted(code, language)));
  return el("div", { class: "code-block" }, head, pre);
}

function inline(text) {
  return text.split(/(`[^`\n]+`)/).map((piece) =>
    piece.length > 2 && piece.startsWith("`") && piece.endsWith("`") ? el("code", {}, piece.slice(1, -1)) : piece,
  );
}
