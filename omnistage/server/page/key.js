// The API key: asked for when the service wants one, kept in this tab only.

import { $ } from "./dom.js";

const PLACE = "omnistage.key";
const listeners = [];

export const key = () => sessionStorage.getItem(PLACE);

/** Called with nothing once a key was given. */
export const onKey = (listener) => listeners.push(listener);

/** The service has refused: drop what we had and ask. */
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

/** Whether a browser can send it at all: what a header cannot carry would look like a lost connection. */
function sendable(given) {
  try {
    new Headers({ Authorization: `Bearer ${given}` });
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
    const given = $("key").value.trim();
    if (!given) return;
    if (!sendable(given)) {
      show("This key has a character that cannot be sent. Copy it again.");
      $("key").focus();
      return;
    }
    sessionStorage.setItem(PLACE, given);
    $("key-dialog").close();
    for (const listener of listeners) listener();
  });
}
