// Colours for code: comments, strings, numbers and words of the language. It only tells them apart; it checks nothing.

import { el } from "./dom.js";

const words = (text) => new Set(text.split(" "));
const COMMON = "if else for while return break continue in not and or true false null import from as class try finally with";
const C_LIKE = `${COMMON} const let var function new this typeof instanceof switch case default do throw catch export async await yield extends static void
 int long float double char bool boolean string struct enum interface public private protected type namespace using template fn mut impl use match pub
 self Self trait where unsafe func package go defer chan range map nil None Some Ok Err undefined`.replaceAll("\n", "");
const PYTHON = `${COMMON} def elif except raise lambda pass yield async await global nonlocal del assert is None True False self match case`;
const SHELL = "if then else elif fi for in do done while case esac function return export local echo cd set exit";
const SQL = "select from where and or not insert into values update set delete create table join left right inner on group by order limit as null is in like having distinct";

// The one group of each that matched names the kind.
const STRINGS = String.raw`(?<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\x60(?:\\.|[^\x60\\])*\x60)`;
const NUMBER = String.raw`(?<number>\b\d[\w.]*)`;
const WORD = String.raw`(?<word>[A-Za-z_$][\w$-]*)`;
const language = (comment, strings, known) => ({
  known: words(known),
  pattern: new RegExp(`${comment}|${strings}|${NUMBER}|${WORD}`, "g"),
});
const HASH = String.raw`(?<comment>#[^\n]*)`;
const SLASHES = String.raw`(?<comment>\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$))`;
const LANGUAGES = {
  c: language(SLASHES, STRINGS, C_LIKE),
  python: language(HASH, STRINGS.replace("(?<string>", '(?<string>"""[\\s\\S]*?(?:"""|$)|'), PYTHON),
  shell: language(String.raw`(?<comment>(?<=^|\s)#[^\n]*)`, STRINGS, SHELL),
  sql: language(String.raw`(?<comment>--[^\n]*)`, STRINGS, `${SQL} ${SQL.toUpperCase()}`),
  markup: {
    known: new Set(),
    pattern: /(?<comment><!--[\s\S]*?(?:-->|$))|(?<word><\/?[\w:-]+|\/?>)|(?<string>"[^"\n]*"|'[^'\n]*')/g,
  },
  data: language(HASH, STRINGS, "true false null yes no"),
};
const NAMES = {
  python: "python py",
  shell: "bash sh shell zsh console",
  sql: "sql",
  markup: "html xml svg vue",
  data: "json yaml yml toml ini",
  c: "js javascript ts typescript jsx tsx java c cpp c++ cs csharp go rust rs kotlin swift php css scala dart",
};
const BY_NAME = new Map(Object.entries(NAMES).flatMap(([kind, names]) => names.split(" ").map((name) => [name, LANGUAGES[kind]])));
const MAX_LENGTH = 20_000; // characters; longer code stays plain

/** The code as text and coloured elements; plain for a language that is not known. */
export function highlighted(code, name) {
  const known = BY_NAME.get(name.toLowerCase());
  if (known === undefined || code.length > MAX_LENGTH) return [code];
  const parts = [];
  let end = 0;
  for (const match of code.matchAll(known.pattern)) {
    const [kind] = Object.entries(match.groups).find(([, text]) => text !== undefined);
    if (kind === "word" && known.known.size > 0 && !known.known.has(match[0])) continue;
    parts.push(code.slice(end, match.index), el("span", { class: `code-${kind}` }, match[0]));
    end = match.index + match[0].length;
  }
  return [...parts, code.slice(end)];
}
