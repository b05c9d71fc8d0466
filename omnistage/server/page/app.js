// The page: ties the parts together. One request runs at a time; its signal ends everything that belongs to it.

import { ApiError, readiness } from "./api.js";
import { Attachments, setUpAttachments } from "./attachments.js";
import { Answer, showQuestion } from "./chat.js";
import { $, count, el, icon, seconds } from "./dom.js";
import { Gauges } from "./gauges.js";
import { onKey, setUpKey } from "./key.js";
import { describe, examplesFor, loadModels, outputs, showModels, showOutputs, showVoice } from "./models.js";
import { Params } from "./params.js";
import { Player, unlockAudio } from "./player.js";
import { buildRequest, userMessage } from "./request.js";
import { run, watchTrace } from "./run.js";
import { setUpSnippets } from "./snippets.js";
import { Timeline } from "./timeline.js";
import { setUpMicrophone } from "./microphone.js";
import { setUpPanel, setUpTheme } from "./panel.js";

const RETRY = 1000; // milliseconds between two looks at a service that is not ready

let models = [];
let history = []; // the conversation as the service takes it
let last = null; // the latest request, for snippets
let running = null; // the AbortController of the request that runs
let watched = null; // whose stages the timeline shows
let player = null;

const timeline = new Timeline();
const params = new Params();
const attachments = new Attachments(notice);
const gauges = new Gauges(
  (reachable) => (reachable ? state("ready", "Ready") : connect()),
  (limits) => (attachments.limit = limits.max_body_bytes),
);
const microphone = setUpMicrophone(attachments, notice);
const model = () => models.find(({ id }) => id === $("model").value);

function notice(text = "") {
  $("notice").textContent = text;
  $("notice").hidden = text === "";
}

function state(name, text) {
  if ($("status").dataset.state === name && $("status-text").textContent === text) return;
  $("status").dataset.state = name;
  $("status-text").textContent = text;
}

// ------------------------------------------------------------------------------------------------- connecting

let connecting = false;

/** Wait until the service is ready, then list its models. */
async function connect() {
  if (connecting) return;
  connecting = true;
  try {
    for (let now = await readiness(); now !== "ready"; now = await readiness()) {
      const words = { loading: "Models are loading", draining: "Shutting down", offline: "No connection" };
      state(now === "offline" ? "bad" : "wait", words[now] ?? now);
      await new Promise((resolve) => setTimeout(resolve, RETRY));
    }
    models = await loadModels();
    showModels(models);
    state("ready", "Ready");
    notice(models.length === 0 ? "This key may not use any model." : "");
    if (models.length > 0) choose();
  } catch (error) {
    state("bad", error instanceof ApiError && error.status === 401 ? "API key required" : "No connection");
    if (!(error instanceof ApiError)) setTimeout(connect, RETRY);
  } finally {
    connecting = false;
  }
}

/** Show what the chosen model can do. */
function choose() {
  const chosen = model();
  showOutputs(chosen);
  params.show(chosen);
  attachments.accept(chosen.reads ? [] : chosen.input);
  gauges.watch(chosen);
  $("speech-card").hidden = !chosen.speaks || player === null || player.received === 0;
  $("mic").hidden = chosen.reads || !chosen.input.includes("audio");
  $("prompt").placeholder = placeholder(chosen);
  $("empty-text").textContent = describe(chosen);
  $("examples").replaceChildren(...examplesFor(chosen).map(example));
}

function placeholder(chosen) {
  if (chosen.reads) return "Text to speak";
  return chosen.chats ? "Message" : `Describe a ${chosen.films ? "video" : "picture"}`;
}

function example({ icon: name, text, action }) {
  const button = el("button", { type: "button", class: "example" }, icon(name), el("span", {}, text));
  button.addEventListener("click", () => {
    if (action === "record") {
      $("mic").click();
      return;
    }
    $("prompt").value = text;
    fitPrompt();
    $("prompt").focus();
    if (action === "attach") $("attach").click();
  });
  return el("li", {}, button);
}

// ---------------------------------------------------------------------------------------------------- sending

function draftRequest(draft) {
  const chosen = model();
  const kept = chosen.chats ? history : [];
  const wanted = chosen.output.length > 1 ? outputs() : chosen.output;
  return buildRequest({ model: chosen, history: kept, draft, params: params.values(), outputs: wanted, voice: $("voice").value });
}

function send() {
  const text = $("prompt").value.trim();
  if (running !== null || model() === undefined) return;
  if (!text && (attachments.items.length === 0 || !model().chats)) return;
  if (!params.valid()) return;
  notice();
  const draft = { text, attachments: attachments.take() };
  last = draftRequest(draft);
  $("prompt").value = "";
  fitPrompt();
  $("empty").hidden = true;
  showQuestion(text, draft.attachments);
  if (outputs().includes("audio") && model().speaks) unlockAudio();
  answer(last, model(), draft);
}

async function answer(request, chosen, draft) {
  const control = begin();
  const conversation = history; // even if another has been started when this one ends
  const traced = request.kind !== "video"; // a job has no trace
  const view = new Answer(chosen, traced ? (one) => one.trace && timeline.show(one.trace) : null);
  const tag = `page-${Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(36)).join("")}`;
  const watching = follow(tag, view, request);
  player?.stop();
  player = new Player((one) => showSpeech(one, view, running !== control));
  const speech = player;
  let failure = null;
  try {
    for await (const event of run(request, { signal: control.signal, tag })) {
      if (event.type === "audio") speech.push(event.data, event.rate);
      view.take(event);
    }
  } catch (error) {
    if (!control.signal.aborted) failure = error;
  }
  end(control);
  if (speech.received > 0) showSpeech(speech, view, true);
  view.finish(control.signal.aborted ? "stopped" : "done", failure && displayed(failure));
  if (chosen.chats && (view.text || failure === null)) {
    conversation.push(userMessage(draft.text, draft.attachments), { role: "assistant", content: view.text });
  }
  if (failure) watching.abort();
  if (failure && !view.text && conversation === history) putBack(draft);
}

/** Restore a failed draft, unless another has been started. */
function putBack({ text, attachments: items }) {
  if ($("prompt").value !== "" || attachments.items.length > 0) return;
  $("prompt").value = text;
  fitPrompt();
  attachments.put(items);
}

const displayed = (error) => (error instanceof ApiError ? error : new Error("The connection was lost. Try again."));

/** Show the request's stages as they run; the answer keeps the last state. */
function follow(tag, view, request) {
  const control = new AbortController();
  watched = control;
  timeline.begin();
  if (request.kind === "video") {
    timeline.end("A video runs as a job; its progress is in the conversation.");
    return control;
  }
  const onTrace = (trace) => {
    if (watched !== control) return; // the next request has the timeline now
    timeline.update(trace);
    view.trace = timeline.snapshot;
  };
  watchTrace(tag, control.signal, onTrace).catch(() => watched === control && timeline.end());
  return control;
}

function begin() {
  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  gauges.wake(true);
  return running;
}

function end(control) {
  if (running !== control) return;
  running = null;
  const focused = document.activeElement === $("stop");
  $("stop").hidden = true;
  $("send").hidden = false;
  if (focused) $("prompt").focus();
  gauges.wake(false);
}

function stop() {
  player?.stop();
  running?.abort();
}

function stopAll() {
  stop();
  microphone.discard();
}

function showSpeech(one, view, over) {
  $("speech-card").hidden = false;
  const meter = $("speech-meter").dataset;
  Object.assign(meter, { received: one.received, scheduled: one.scheduled, underruns: one.underruns, rate: one.rate });
  $("speech-scheduled").textContent = `${count(one.scheduled)} samples`;
  $("speech-seconds").textContent = seconds(one.seconds);
  $("speech-gaps").textContent = String(one.underruns);
  $("speech-state").textContent = one.playing ? "playing" : "";
  view.showSpeech(one, over);
}

function newChat() {
  stopAll();
  history = [];
  last = null;
  attachments.clear();
  $("messages").replaceChildren();
  $("empty").hidden = false;
  notice();
  $("prompt").focus();
}

// --------------------------------------------------------------------------------------------------- the page

function fitPrompt() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, 220)}px`;
}

function currentRequest() {
  if (model() === undefined) return null;
  const text = $("prompt").value.trim();
  if (!text && attachments.items.length === 0 && last !== null) return last;
  return draftRequest({ text: text || "Hello", attachments: attachments.items });
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("input", fitPrompt);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && document.querySelector("dialog[open]") === null) stopAll();
});
$("stop").addEventListener("click", stop);
$("new-chat").addEventListener("click", newChat);
$("model").addEventListener("change", choose);
$("outputs").addEventListener("change", showVoice);

setUpKey();
onKey(connect);
setUpTheme();
setUpPanel();
setUpAttachments(attachments);
setUpSnippets(currentRequest);
connect();
