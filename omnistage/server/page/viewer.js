// The larger view of a picture.

import { $, el, icon } from "./dom.js";

/** A button around a picture that opens the larger view. */
export function viewable(image, name) {
  const button = el("button", { type: "button", class: "view", "aria-label": `Enlarge ${name}` }, image);
  button.addEventListener("click", () => view(image.src, name));
  return button;
}

function view(url, name) {
  const save = el("a", { class: "tool small", href: url, download: name, title: "Save the picture" }, icon("save"));
  save.append(el("span", { class: "unseen" }, `Save ${name}`));
  $("picture-save").replaceChildren(save);
  $("picture-title").textContent = name;
  Object.assign($("picture-large"), { src: url, alt: name });
  $("picture-dialog").showModal();
}

export function setUpViewer() {
  $("picture-close").addEventListener("click", () => $("picture-dialog").close());
  // A click beside the picture closes it as well.
  $("picture-dialog").addEventListener("click", ({ target }) => target === $("picture-dialog") && $("picture-dialog").close());
}
