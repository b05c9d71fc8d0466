// The API key: requested when the service requires one, kept in this tab only.

import { $ } from "./dom.js";

const PLACE = "omnistage.key";
const listeners = [];

export const key = () => sessionStorage.getItem(PLACE);

/** Called once a key was entered. */
export const onKey = (listener) => listeners.push(listener);

/** The key was refused: drop it and ask for another. */
export function forgetKey(why) {
  const had = key() !== null;
  sessionStorage.removeItem(PLACE);
  $("show-key").hidden = false;
  askKey(had ? why : "");
}

function show(problem) {
  $("key-problem").textContent = problem;
  $("key-problem").hidden = problem === "";
}

/** Whether a header can carry it: otherwise the request would look like a lost connection. */
function sendable(value) {
  try {
    new Headers({ Authorization: `Bearer ${value}` });
    return true;
  } catch {
    return false;
  }
}

export function askKey(problem = "") {
  show(problem);
  $("key").value = key() ?? "";
  if (!$("key-dialog").open) $("key-dialog").showModal();
  $("key").focus();
}

export function setUpKey() {
  $("show-key").hidden = key() === null;
  $("show-key").addEventListener("click", () => askKey());
  $("key-cancel").addEventListener("click", () => $("key-dialog").close());
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const value = $("key").value.trim();
    if (!value) return;
    if (!sendable(value)) {
      show("This key has a character that cannot be sent. Copy it again.");
      $("key").focus();
      return;
    }
    sessionStorage.setItem(PLACE, value);
    $("key-dialog").close();
    for (const listener of listeners) listener();
  });
}
