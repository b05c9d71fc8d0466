// Talking to the service: addresses, the API key, errors, streams of events.

import { forgetKey, key } from "./key.js";

/** Relative to the page, so that a proxy may put the service under a path of its own. */
export const address = (path) => new URL(path, document.baseURI).href;

export class ApiError extends Error {
  constructor(status, message, code = null, param = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
  }
}

/** The error of an answer's body or of an event in a stream. */
export function errorOf(status, body) {
  const error = body?.error;
  if (!error) return new ApiError(status, `The service answered ${status}.`);
  // The page has fields for parameters; what is wrong with a message stands below that message.
  const ofMessage = error.param?.startsWith("messages") && error.message.startsWith(`${error.param}: `);
  return new ApiError(status, ofMessage ? error.message.slice(error.param.length + 2) : error.message, error.code, error.param);
}

/** fetch with the key; raises `ApiError` for every answer that is not a success. */
export async function call(path, { json, form, tag, ...options } = {}) {
  const headers = new Headers();
  if (key()) headers.set("Authorization", `Bearer ${key()}`);
  if (tag) headers.set("X-Client-Request-Id", tag);
  let body;
  if (json !== undefined) {
    headers.set("Content-Type", "application/json");
    body = JSON.stringify(json);
  } else if (form !== undefined) {
    body = form;
  }
  const method = options.method ?? (body === undefined ? "GET" : "POST");
  const response = await fetch(address(path), { ...options, method, headers, body, cache: "no-store" });
  if (response.ok) return response;
  const problem = errorOf(response.status, await response.json().catch(() => null));
  if (response.status === 401) forgetKey(problem.message);
  throw problem;
}

export const getJson = async (path, options) => (await call(path, options)).json();

/** Whether the service takes requests: "ready", "loading", "draining" or "offline". */
export async function readiness() {
  try {
    const response = await fetch(address("ready"), { cache: "no-store" });
    return (await response.json()).status;
  } catch {
    return "offline";
  }
}

/** The events of a response, as they arrive: `{name, data}`. The body is closed when the reader stops. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      pending += value;
      const blocks = pending.split("\n\n");
      pending = blocks.pop();
      for (const block of blocks) yield parsed(block);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(block) {
  const event = { name: "message", data: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) event.name = line.slice(7);
    else if (line.startsWith("data: ")) event.data += line.slice(6);
  }
  return event;
}

export function fromBase64(text) {
  const binary = atob(text);
  const data = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) data[i] = binary.charCodeAt(i);
  return data;
}

const STEP = 8192; // bytes; a call takes only so many arguments

/** Bytes as base64, at once. */
export function base64Of(data) {
  let binary = "";
  for (let i = 0; i < data.length; i += STEP) binary += String.fromCharCode(...data.subarray(i, i + STEP));
  return btoa(binary);
}

export async function toBase64(blob) {
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
  return url.slice(url.indexOf(",") + 1);
}
