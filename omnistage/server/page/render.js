// A model's text as elements: paragraphs, code blocks and code in lines. Nothing of it is ever read as markup.

import { el } from "./dom.js";

/** Elements for a text that may still be growing: a code block that is not closed yet is one already. */
export function rendered(text) {
  const made = [];
  const pieces = text.split(/^```[^\n]*(?:\n|$)/m);
  pieces.forEach((piece, index) => {
    if (index % 2 === 1) {
      made.push(el("pre", { tabIndex: 0 }, el("code", {}, piece.replace(/\n$/, ""))));
      return;
    }
    for (const paragraph of piece.split(/\n{2,}/)) {
      if (paragraph.trim() !== "") made.push(el("p", {}, ...inline(paragraph.trim())));
    }
  });
  return made;
}

function inline(text) {
  return text.split(/(`[^`\n]+`)/).map((piece) =>
    piece.length > 2 && piece.startsWith("`") && piece.endsWith("`") ? el("code", {}, piece.slice(1, -1)) : piece,
  );
}
