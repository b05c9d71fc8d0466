// The side panel, which is a sheet on small screens, and the theme.

import { $ } from "./dom.js";

export function setUpPanel() {
  const panel = $("panel");
  const set = (open) => {
    panel.classList.toggle("open", open);
    $("show-panel").setAttribute("aria-expanded", String(open));
    if (open) $("hide-panel").focus();
    else $("show-panel").focus();
  };
  $("show-panel").addEventListener("click", () => set(!panel.classList.contains("open")));
  $("hide-panel").addEventListener("click", () => set(false));
  panel.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !panel.classList.contains("open")) return;
    event.stopPropagation();
    set(false);
  });
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
