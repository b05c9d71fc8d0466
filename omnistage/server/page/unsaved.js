// What a page that is left had not stored yet: its texts, in storage that a page can write while it goes. The next page stores them.

import { fromBase64 } from "./api.js";

const PREFIX = "omnistage.unsaved.";

/** Leave a conversation's entry, and messages by position, without their files; those from `end` on are no longer its own. */
export function leave({ entry, messages, end }) {
  const texts = [...messages].map(([position, message]) => [position, withoutFiles(message)]);
  const left = { entry: { ...entry, draft: entry.draft && withoutFiles(entry.draft) }, messages: texts, end: Number.isFinite(end) ? end : null };
  for (const kept of [left, { ...left, messages: texts.map(([position, message]) => [position, { ...message, sound: null }]) }]) {
    try {
      localStorage.setItem(PREFIX + entry.id, JSON.stringify(kept));
      return;
    } catch (error) {
      if (error?.name !== "QuotaExceededError") throw error; // else once more without the sound
    }
  }
}

const names = () => Array.from({ length: localStorage.length }, (_, index) => localStorage.key(index)).filter((one) => one.startsWith(PREFIX));

/** Everything that pages have left, one conversation after the other. */
export function* leftovers() {
  for (const name of names()) {
    const { entry, messages, end } = JSON.parse(localStorage.getItem(name));
    yield { entry, messages: new Map(messages), end: end ?? Infinity };
  }
}

export const discard = (id) => localStorage.removeItem(PREFIX + id);

/** Whatever it is: another release may have written it. */
export const discardAll = () => names().forEach((name) => localStorage.removeItem(name));

/** A message whose files are only names, but for text files. */
export function withoutFiles(message) {
  const bare = { ...message };
  if (message.attachments) bare.attachments = message.attachments.map((item) => (item.kind === "text" ? item : { ...item, file: null }));
  if (message.pictures) bare.pictures = message.pictures.map((picture) => ({ ...picture, blob: null }));
  if (message.speech) bare.speech = null;
  if (message.video) bare.video = null;
  return bare;
}

/** A message that was left, with the files that are stored: of the message as it was, or of the draft that it was. */
export function withFiles({ sound, ...message }, stored, draft) {
  const whole = { ...message };
  const files = [...(stored?.attachments ?? []), ...(draft?.attachments ?? [])];
  const fileOf = ({ kind, name, text }) => {
    const at = files.findIndex((item) => item.file && item.kind === kind && item.name === name);
    if (at >= 0) return files.splice(at, 1)[0].file;
    return kind === "text" ? new File([text], name, { type: "text/plain" }) : null;
  };
  if (message.attachments) whole.attachments = message.attachments.map((item) => ({ ...item, file: fileOf(item) }));
  if (message.pictures) whole.pictures = message.pictures.map((picture, index) => ({ ...picture, blob: stored?.pictures?.[index]?.blob ?? null }));
  if ("video" in message) whole.video = stored?.video ?? null;
  if ("speech" in message) whole.speech = sound ? new Blob([fromBase64(sound)], { type: "audio/wav" }) : (stored?.speech ?? null);
  return whole;
}
