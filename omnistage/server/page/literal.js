// Values written as source: Python, and JSON for a shell. Files are written as whatever the language loads them with.

import { FileData } from "./attachments.js";

/** `value` over several lines; `write` knows the language: `{file, word}`. */
export function literal(value, write, indent = 0) {
  if (value instanceof FileData) return write.file(value);
  if (value === null || typeof value === "boolean") return write.word(value);
  if (typeof value === "number") return String(value);
  if (typeof value === "string") return write.text(value);
  const inner = "    ".repeat(indent + 1);
  const outer = "    ".repeat(indent);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const parts = Array.isArray(value)
    ? value.map((item) => literal(item, write, indent + 1))
    : Object.entries(value).map(([name, item]) => `${write.text(name)}: ${literal(item, write, indent + 1)}`);
  const short = `${open}${parts.join(", ")}${close}`;
  if (short.length + 4 * indent <= 88 && !short.includes("\n")) return short;
  return `${open}\n${parts.map((part) => inner + part).join(",\n")}\n${outer}${close}`;
}

// JSON's escapes are Python's too.
export const PYTHON = {
  text: (value) => JSON.stringify(value),
  word: (value) => ({ true: "True", false: "False", null: "None" })[String(value)],
  file: (file) => (file.asUrl ? `data_url(${JSON.stringify(file.name)}, ${JSON.stringify(file.mime)})` : `encoded(${JSON.stringify(file.name)})`),
};

/** Text inside a here-document that the shell expands: these three characters mean something to it there. */
const expanded = (text) => text.replace(/[\\$`]/g, "\\$&");

export const SHELL = {
  text: (value) => expanded(JSON.stringify(value)),
  word: (value) => String(value),
  file: (file) => {
    const load = `$(base64 < ${quoted(file.name)} | tr -d '\\n')`;
    return file.asUrl ? `"data:${file.mime};base64,${load}"` : `"${load}"`;
  },
};

/** A word for the shell. */
export const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
