// What the page sends: the draft, the conversation and the parameters as one request of the API.

import { FileData, partOf } from "./attachments.js";

const PARTIAL_IMAGES = 3;

/** A user's message: plain text where there are no attachments, which reads best in snippets. */
export function userMessage(text, attachments) {
  const parts = attachments.map(partOf).filter((part) => part !== null);
  if (parts.length === 0) return { role: "user", content: text || attachments.map(({ name }) => name).join(", ") };
  if (text) parts.push({ type: "text", text });
  return { role: "user", content: parts };
}

/**
 * A request as `{kind, path, body}`, with `files` for a form.
 * `history` holds the messages so far, `draft` is `{text, attachments}`.
 */
export function buildRequest({ model, history, draft, params, outputs, voice }) {
  if (model.films && !model.chats) return videoRequest(model, draft, params);
  if (model.draws && !model.chats) return pictureRequest(model, draft, params);
  const { system, size, steps, guidance, negative_prompt, ...sampling } = params;
  const messages = [...history, userMessage(draft.text, draft.attachments)];
  if (system) messages.unshift({ role: "system", content: system });
  const body = { model: model.id, messages, stream: true, stream_options: { include_usage: true } };
  if (model.output.length > 1 || outputs.includes("audio")) body.modalities = outputs;
  if (outputs.includes("audio")) body.audio = { ...(voice ? { voice } : {}), format: "pcm16" };
  const drawing = defined({ steps, guidance, negative_prompt, ...sides(size) });
  if (outputs.includes("image")) body.drawing = { ...drawing, preview_every: 4 };
  return { kind: "chat", path: "v1/chat/completions", body: { ...body, ...sampling } };
}

function pictureRequest(model, draft, params) {
  const shown = { stream: true, partial_images: PARTIAL_IMAGES, progress: true };
  const body = { model: model.id, prompt: draft.text, ...params, ...shown };
  const files = pictures(draft);
  if (files.length === 0) return { kind: "image", path: "v1/images/generations", body };
  return { kind: "edit", path: "v1/images/edits", body, files };
}

function videoRequest(model, draft, params) {
  const body = { model: model.id, prompt: draft.text, ...params };
  const [first] = pictures(draft);
  if (first) body.input_reference = { image_url: first };
  return { kind: "video", path: "v1/videos", body };
}

const pictures = (draft) =>
  draft.attachments
    .filter(({ kind, file }) => kind === "image" && file)
    .map(({ name, file, base64 }) => new FileData(name, file.type, base64, true));

function sides(size) {
  if (!size) return {};
  const [width, height] = size.split("x").map(Number);
  return { width, height };
}

const defined = (values) => Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined));
