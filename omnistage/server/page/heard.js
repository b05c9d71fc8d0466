// What is said in a recording, by the service's transcription.

import { call } from "./api.js";

/** The words of an audio attachment, which keeps them; an empty text where nothing was said. */
export async function hear(item, model) {
  const form = new FormData();
  form.set("model", model.id);
  form.set("file", item.file, item.name);
  const answer = await (await call("v1/audio/transcriptions", { form })).json();
  item.heard = answer.text.trim();
  return item.heard;
}
