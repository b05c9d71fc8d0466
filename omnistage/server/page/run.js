// Runs a request and turns whatever the service streams into one kind of events for the answer:
// reasoning, text, audio, image, progress, video, finish, usage.

import { ApiError, call, errorOf, events, fromBase64, getJson } from "./api.js";

const POLL = 500; // milliseconds between two polls of a video job

/** Run a request; leaving the loop or aborting `signal` ends it in the service too. */
export function run(request, { signal, tag }) {
  if (request.kind === "chat") return runChat(request, signal, tag);
  if (request.kind === "video") return runVideo(request, signal, tag);
  return runPictures(request, signal, tag);
}

async function* runChat(request, signal, tag) {
  const response = await call(request.path, { json: request.body, signal, tag });
  for await (const { data } of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw errorOf(500, chunk);
    if (chunk.usage) yield { type: "usage", usage: chunk.usage };
    const choice = chunk.choices?.[0];
    if (choice === undefined) continue;
    yield* deltas(choice.delta);
    if (choice.finish_reason) yield { type: "finish", reason: choice.finish_reason };
  }
  throw new ApiError(0, "The response ended early. Try again.");
}

function* deltas({ content, reasoning_content: reasoning, audio, images, progress }) {
  if (reasoning) yield { type: "reasoning", text: reasoning };
  const text = content || audio?.transcript;
  if (text) yield { type: "text", text };
  if (audio?.data) yield { type: "audio", data: fromBase64(audio.data), rate: audio.sample_rate };
  for (const { image_url: picture, preview } of images ?? []) yield { type: "image", index: 0, url: picture.url, preview };
  if (progress) yield { type: "progress", done: progress.step, all: progress.steps, unit: "step" };
}

async function* runPictures(request, signal, tag) {
  const sent = request.kind === "edit" ? { form: formOf(request) } : { json: request.body };
  const response = await call(request.path, { ...sent, signal, tag });
  for await (const { name, data } of events(response)) {
    const event = JSON.parse(data);
    if (event.error) throw errorOf(500, event);
    const what = name.split(".").pop();
    if (what === "progress") {
      yield { type: "progress", done: event.step, all: event.steps, unit: "step" };
    } else {
      const url = `data:image/${event.output_format};base64,${event.b64_json}`;
      yield { type: "image", index: event.image_index, url, preview: what === "partial_image", seed: event.seed };
    }
  }
  yield { type: "finish", reason: "stop" };
}

function formOf({ body, files }) {
  const form = new FormData();
  for (const [name, value] of Object.entries(body)) form.set(name, String(value));
  for (const file of files) form.append("image[]", new Blob([fromBase64(file.base64)], { type: file.mime }), file.name);
  return form;
}

/** Videos are jobs: they continue without the page, so stopping one deletes it. */
async function* runVideo(request, signal, tag) {
  let job = await (await call(request.path, { json: request.body, signal, tag })).json();
  const place = `${request.path}/${encodeURIComponent(job.id)}`;
  try {
    while (job.status === "queued" || job.status === "in_progress") {
      yield { type: "progress", done: job.progress, all: 100, unit: "%" };
      await pause(POLL, signal);
      job = await getJson(place, { signal });
    }
  } catch (error) {
    if (signal.aborted) await call(place, { method: "DELETE" }).catch(() => {});
    throw error;
  }
  if (job.status !== "completed") throw new ApiError(500, job.error?.message || "The video could not be generated.");
  const content = await call(`${place}/content`, { signal });
  yield { type: "video", blob: await content.blob(), name: `${job.id}.mp4` };
  yield { type: "finish", reason: "stop" };
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}

/** Follow a request's trace while it runs; `onTrace` gets every change, the last one with `finished`. */
export async function watchTrace(tag, signal, onTrace) {
  const response = await call(`v1/requests/${tag}/events?wait=30`, { signal });
  for await (const { name, data } of events(response)) {
    if (name === "trace") onTrace(JSON.parse(data));
  }
}

