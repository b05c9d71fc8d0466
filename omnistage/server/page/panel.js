// The two side panels, which are sheets on small screens, and the theme.

import { $ } from "./dom.js";

const NARROW = matchMedia("(max-width: 980px)");
const WIDE = matchMedia("(min-width: 1500px)");
const setters = new Map();

export const openPanel = () => setters.get("panel")(true);

/** A side that a button opens and closes; on a large screen the choice is remembered. */
function setUpSide(id, open) {
  const side = $(id);
  const button = $(`show-${id}`);
  const place = `omnistage.${id}`;
  const set = (on, focus = false) => {
    side.classList.toggle("open", on);
    side.inert = !on;
    document.body.classList.toggle(`has-${id}`, on);
    button.setAttribute("aria-expanded", String(on));
    if (focus) (on && NARROW.matches ? $(`hide-${id}`) : button).focus();
  };
  const choose = (on) => {
    if (!NARROW.matches) localStorage.setItem(place, String(on));
    set(on, true);
  };
  const arrange = () => set(!NARROW.matches && (localStorage.getItem(place) ?? String(open())) === "true");
  setters.set(id, set);
  button.addEventListener("click", () => choose(!side.classList.contains("open")));
  $(`hide-${id}`).addEventListener("click", () => choose(false));
  side.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !NARROW.matches) return;
    event.stopPropagation();
    set(false, true);
  });
  NARROW.addEventListener("change", arrange);
  arrange();
}

export function setUpPanels() {
  setUpSide("panel", () => true);
  setUpSide("past", () => WIDE.matches);
  // On a small screen an opened conversation is to be seen.
  $("past-list").addEventListener("click", ({ target }) => NARROW.matches && target.closest(".past-open") && setters.get("past")(false));
}

const THEMES = [
  ["", "as the system"],
  ["light", "light"],
  ["dark", "dark"],
];

export function setUpTheme() {
  const root = document.documentElement;
  const show = () => {
    const [, words] = THEMES.find(([name]) => name === (root.dataset.theme ?? "")) ?? THEMES[0];
    $("theme-name").textContent = `Theme: ${words}`;
    $("theme").title = `Theme: ${words}`;
  };
  $("theme").addEventListener("click", () => {
    const at = THEMES.findIndex(([name]) => name === (root.dataset.theme ?? ""));
    const [next] = THEMES[(at + 1) % THEMES.length];
    if (next === "") delete root.dataset.theme;
    else root.dataset.theme = next;
    localStorage.setItem("omnistage.theme", next);
    show();
  });
  show();
}
