// Helpers for elements, icons and formatted numbers.

export const $ = (id) => document.getElementById(id);

/** An element with properties and children; text goes in as text, never as markup. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));
}

/** A button that shows an icon and is read by its name. */
export function iconButton(name, label, action, more = "") {
  const button = el("button", { type: "button", class: `tool small ${more}`, title: label }, icon(name));
  button.append(el("span", { class: "unseen" }, label));
  button.addEventListener("click", action);
  return button;
}

export const seconds = (value) =>
  value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;

export const count = (value) => Math.round(value).toLocaleString("en");

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value;
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${size < 10 && unit > 0 ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
}

/** Announce something to users of screen readers. */
export function announce(text) {
  $("announce").textContent = text;
}

export async function copyText(text, button) {
  const before = button.textContent;
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    done = copyBySelection(text); // without https there is no clipboard object
  }
  announce(done ? "Copied" : "Copying is not allowed here");
  if (button.querySelector("svg") === null) {
    button.textContent = done ? "Copied" : "Not allowed";
    setTimeout(() => (button.textContent = before), 1500);
  }
}

function copyBySelection(text) {
  const area = el("textarea", { class: "unseen", value: text });
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
