// A text as elements: paragraphs, code blocks and inline code. It is never parsed as markup.

import { el } from "./dom.js";

/** Elements for a text that may still grow: an unclosed code block counts as one. */
export function rendered(text) {
  const elements = [];
  const pieces = text.split(/^```[^\n]*(?:\n|$)/m);
  pieces.forEach((piece, index) => {
    if (index % 2 === 1) {
      elements.push(el("pre", { tabIndex: 0 }, el("code", {}, piece.replace(/\n$/, ""))));
      return;
    }
    for (const paragraph of piece.split(/\n{2,}/)) {
      if (paragraph.trim() !== "") elements.push(el("p", {}, ...inline(paragraph.trim())));
    }
  });
  return elements;
}

function inline(text) {
  return text.split(/(`[^`\n]+`)/).map((piece) =>
    piece.length > 2 && piece.startsWith("`") && piece.endsWith("`") ? el("code", {}, piece.slice(1, -1)) : piece,
  );
}
