// A text as elements: paragraphs, headings, lists, code, bold and italic words. Markup and links in it stay text.

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
      if (source !== "") blocks.push(...partsOf(source).map((part) => ({ source: part.join("\n"), make: () => prose(part) })));
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

const ITEM = /^(\s*)(?:[-*+•]|(\d{1,9})[.)])\s+(?=\S)/;
const HEADING = /^#{1,6}\s+(?=\S)/;

/** The lines of a paragraph in runs: a heading, a list with what continues its items, or plain lines. */
function partsOf(source) {
  const parts = [];
  let kind = null;
  for (const line of source.split("\n")) {
    const next = HEADING.test(line) ? "heading" : ITEM.test(line) ? "list" : kind === "list" && /^\s/.test(line) ? "list" : "plain";
    if (next === kind && kind !== "heading") parts.at(-1).push(line);
    else parts.push([line]);
    kind = next;
  }
  return parts;
}

function prose(lines) {
  if (HEADING.test(lines[0])) return el("h4", {}, ...inline(lines[0].replace(HEADING, "")));
  if (ITEM.test(lines[0])) return list(lines);
  return el("p", {}, ...inline(lines.join("\n")));
}

/** A list; what is indented deeper than its first item is a list below the item before. */
function list(lines) {
  const [, margin, first] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const [mark, indent] = ITEM.exec(line) ?? [null];
    if (mark !== null && (items.length === 0 || indent.length <= margin.length)) items.push({ text: [line.slice(mark.length)], below: [] });
    else if (mark !== null || items.at(-1).below.length > 0) items.at(-1).below.push(line);
    else items.at(-1).text.push(line.trim());
  }
  const rows = items.map(({ text, below }) => el("li", {}, ...inline(text.join("\n")), below.length > 0 ? list(below) : null));
  return first === undefined ? el("ul", {}, ...rows) : el("ol", { start: Number(first) }, ...rows);
}

const CODE = "`[^`\\n]+`";
const BOLD = "\\*\\*(?=\\S)[^\\n]{0,500}?\\S\\*\\*(?!\\*)";
const ITALIC = "(?<![\\w*])\\*(?=[^\\s*])[^*\\n]*?[^\\s*]\\*(?![\\w*])|(?<![\\w*])\\*[^\\s*]\\*(?![\\w*])";
const STYLED = new RegExp(`(${CODE}|${BOLD}|${ITALIC})`);

function inline(text) {
  return text.split(STYLED).map((piece, number) => {
    if (number % 2 === 0) return piece;
    if (piece.startsWith("`")) return el("code", {}, piece.slice(1, -1));
    if (piece.startsWith("**")) return el("strong", {}, ...inline(piece.slice(2, -2)));
    return el("em", {}, ...inline(piece.slice(1, -1)));
  });
}
