// The page: ties the parts together. One request, or one live conversation, runs at a time.

import { Attachments, setUpAttachments } from "./attachments.js";
import { Answer, append } from "./chat.js";
import { Connection } from "./connection.js";
import { Conversation, attachmentRecord, restored } from "./conversation.js";
import { $ } from "./dom.js";
import { showExamples } from "./examples.js";
import { Exchange } from "./exchange.js";
import { Gauges } from "./gauges.js";
import { hear } from "./heard.js";
import { Keeper } from "./keeper.js";
import { onKey, setUpKey } from "./key.js";
import { setUpMicrophone } from "./microphone.js";
import { chooseModel, describe, outputs, placeholder, refusal, rememberOutputs, showModels, showOutputs } from "./models.js";
import { setUpPanels, setUpTheme } from "./panel.js";
import { Params } from "./params.js";
import { Past } from "./past.js";
import { unlockAudio } from "./player.js";
import { Question } from "./question.js";
import { buildRequest } from "./request.js";
import { setUpSnippets } from "./snippets.js";
import { load, onOtherTab, recover } from "./store.js";
import { Talk, itemsOf, settingsOf } from "./talk.js";
import { Timeline } from "./timeline.js";
import { setUpViewer } from "./viewer.js";

const SHOWN = "omnistage.conversation"; // which conversation this tab shows

let models = [];
let conversation = new Conversation();
let last = null; // the latest request, for snippets

const model = () => models.find(({ id }) => id === $("model").value);
const timeline = new Timeline();
const params = new Params();
const attachments = new Attachments(notice, () => (keepDraft(), keeper.flush()));
const connection = new Connection(found);
const gauges = new Gauges(
  (reachable) => connection.seen(reachable),
  (limits) => (attachments.limit = limits.max_body_bytes),
);
const notKept = (error) => notice(`This browser does not keep all of the conversation: ${error?.message || error?.name || error}`);
const past = new Past({ current: () => conversation.id, open, deleted, problem: notKept });
const keeper = new Keeper(notKept, () => past.draw());
const exchange = new Exchange({ timeline, busy, grown: (...of) => keeper.answer(...of) });
const microphone = setUpMicrophone(attachments, notice);
const talk = new Talk({ notice, turn: spokenTurn, answer: spokenAnswer, grown: (view) => keeper.answer(view.of, view.turn, view), spoken: (...of) => exchange.showSpeech(...of), answered, changed: talking });

function notice(text = "") {
  $("notice").textContent = text;
  $("notice").hidden = text === "";
}

// ---------------------------------------------------------------------------------------------------- models

function found(list) {
  models = list;
  showModels(models);
  notice(models.length === 0 ? "This key may not use any model." : "");
  if (models.length > 0) choose();
}

/** Show what the chosen model can do. */
function choose() {
  const chosen = model();
  talk.end();
  showOutputs(chosen);
  params.show(chosen);
  attachments.accept(chosen.reads ? [] : chosen.input);
  gauges.watch(chosen);
  $("speech-card").hidden = !chosen.speaks || exchange.player === null || exchange.player.received === 0;
  $("mic").hidden = chosen.reads || !chosen.input.includes("audio");
  $("talk").hidden = !chosen.chats || !chosen.input.includes("audio");
  $("attach").hidden = chosen.reads;
  $("prompt").placeholder = placeholder(chosen);
  $("empty-text").textContent = describe(chosen);
  showExamples(chosen, write);
  const lost = chosen.chats ? conversation.unreadable(chosen.input) : [];
  notice(misfits() || refusal(chosen, lost, " from above; it gets the rest of the conversation."));
}

/** What hinders sending: attachments that the model does not take. */
const misfits = () => refusal(model(), attachments.misfits, ": remove it, or choose another model.");

/** Put a text into the message box. */
function write(text) {
  $("prompt").value = text;
  typed();
  $("prompt").focus();
}

// ---------------------------------------------------------------------------------------------------- messages

function requestFor(draft, before = null) {
  const chosen = model();
  const history = chosen.chats ? conversation.messages(before, chosen.input) : [];
  const wanted = chosen.output.length > 1 ? outputs() : chosen.output;
  return buildRequest({ model: chosen, history, draft, params: params.values(), outputs: wanted, voice: $("voice").value });
}

function send() {
  const text = $("prompt").value.trim();
  if (exchange.running !== null || talk.active || model() === undefined) return;
  if (!text && (attachments.items.length === 0 || !model().chats)) return;
  if (!params.valid()) return;
  if (misfits()) return notice(misfits());
  $("prompt").value = "";
  const turn = conversation.add({ text, attachments: attachments.take() });
  typed();
  showTurn(conversation, turn);
  if (model().transcribes) turn.attachments.filter(({ kind }) => kind === "audio").forEach((item) => turn.question.listen(item));
  ask(turn);
}

/** Ask a turn's question, now or once more, with another text if it was edited. False where it cannot be asked now. */
function ask(turn, text = turn.text) {
  if (exchange.running !== null || talk.active || model() === undefined || !params.valid()) return false;
  const hindered = refusal(model(), attachments.misfitsOf(turn.attachments), ": choose another model.");
  notice(hindered);
  if (hindered) return false;
  if (text !== turn.text) {
    turn.text = text;
    turn.question.show();
  }
  conversation.cutAfter(turn);
  while (turn.question.element.nextSibling) turn.question.element.nextSibling.remove();
  turn.answer = null;
  keeper.question(conversation, turn);
  last = requestFor(turn, turn);
  if (outputs().includes("audio") && model().speaks) unlockAudio();
  const traced = last.kind !== "video"; // a job has no trace
  const view = new Answer(model(), { ...hooksOf(conversation, turn), showTimeline: traced ? (one) => one.trace && timeline.show(one.trace) : null });
  append(view.element);
  exchange.answer(last, view, conversation, turn).then((failure) => failure?.param && params.mark(failure.param, failure.message));
  return true;
}

const hooksOf = (of, turn) => ({ urlOf: (blob) => of.urlOf(blob), again: () => ask(turn) });

/** Show a turn's question, and its answer where it has one. */
function showTurn(of, turn) {
  $("empty").hidden = true;
  const edited = (text) => ask(turn, text);
  const editing = () => keeper.edit(of);
  const listened = async (item) => {
    await hear(item, model());
    await keeper.message(of, turn); // before it is shown
  };
  turn.question = new Question(turn, { edited, editing, hear: listened });
  append(turn.question.element);
  if (turn.answer) append(Answer.from(turn.answer, hooksOf(of, turn)).element);
}

function busy(on) {
  $("send").hidden = on || talk.active;
  $("messages").dataset.busy = String(on);
  const focused = document.activeElement === $("stop");
  $("stop").hidden = !on;
  if (!on && focused) $("prompt").focus();
  gauges.wake(on);
}

function stopAll() {
  exchange.stop();
  microphone.discard();
  talk.end();
}

// ---------------------------------------------------------------------------------------------------- live voice

function talkLive() {
  if (talk.active || exchange.running !== null || model() === undefined || !params.valid()) return;
  microphone.discard();
  exchange.stop(); // also what is still being spoken
  exchange.unwatch("A live conversation has no timeline.");
  const chosen = model();
  talk.start(chosen.id, settingsOf({ model: chosen, voice: $("voice").value, params: params.values() }), itemsOf(conversation.turns));
}

function talking(on) {
  $("composer").dataset.live = String(on);
  $("send").hidden = on;
  $("messages").dataset.busy = String(on);
  if (!on && document.activeElement === document.body) $("prompt").focus();
  gauges.wake(on);
}

/** The user has spoken: a turn with the recording, which is shown when it is stored. */
async function spokenTurn(wav) {
  const of = conversation;
  const file = new File([wav], `spoken-${of.turns.length + 1}.wav`, { type: "audio/wav" });
  const turn = of.add({ text: "", attachments: [] });
  showTurn(of, turn);
  const item = await restored({ kind: "audio", name: file.name, file });
  turn.attachments.push(item);
  await keeper.message(of, turn);
  turn.question.show();
  if (model().transcribes) turn.question.listen(item);
}

function spokenAnswer() {
  const turn = conversation.turns.at(-1);
  const view = new Answer(model(), { ...hooksOf(conversation, turn), showTimeline: null });
  Object.assign(view, { turn, of: conversation });
  append(view.element);
  return view;
}

async function answered(view, how, failure) {
  view.settle(how, failure);
  await keeper.answer(view.of, view.turn, view);
  view.finish();
}

// ------------------------------------------------------------------------------------------- past conversations

function show(next, draft = null) {
  stopAll();
  conversation.close();
  conversation = next;
  keeper.resume(next, draft);
  sessionStorage.setItem(SHOWN, next.id);
  last = null;
  $("prompt").value = draft?.text ?? "";
  attachments.clear();
  $("messages").replaceChildren();
  $("empty").hidden = next.turns.length > 0;
  for (const turn of next.turns) showTurn(next, turn);
  fitPrompt();
  if (draft?.attachments.length) Promise.all(draft.attachments.map(restored)).then((items) => conversation === next && attachments.put(items));
  notice();
  past.draw();
}

function newChat() {
  show(new Conversation());
  $("prompt").focus();
}

/** Show a conversation that was kept, with the model that answered last. */
async function open(id) {
  try {
    const kept = await load(id);
    if (kept === null) return;
    show(await Conversation.from(kept), kept.draft);
  } catch (error) {
    notKept(error);
    return;
  }
  const answer = conversation.turns.at(-1)?.answer;
  if (!answer || answer.model === $("model").value) return;
  chooseModel(answer.model);
  if (model() !== undefined) choose();
}

/** A conversation is no longer kept: where it is the one that is shown, begin another. */
function deleted(id) {
  if (id !== conversation.id) return;
  keeper.forget(conversation);
  newChat();
}

/** Another tab has changed this conversation: show it so, or go on apart from it where an answer is running here. */
async function changedElsewhere({ id, gone }) {
  past.draw();
  if (id !== undefined && id !== conversation.id) return;
  if (exchange.running !== null || talk.active) {
    keeper.apart(conversation);
    sessionStorage.setItem(SHOWN, conversation.id);
  } else if (gone) {
    deleted(conversation.id);
  } else {
    const draft = { text: $("prompt").value, attachments: attachments.items.map(attachmentRecord) };
    const kept = await load(id).catch(() => null);
    if (kept !== null && id === conversation.id && exchange.running === null) show(await Conversation.from({ ...kept, edits: conversation.edits }), draft);
  }
}

function keepDraft() {
  keeper.draft(conversation, $("prompt").value, attachments.items);
}

// --------------------------------------------------------------------------------------------------- the page

function fitPrompt() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, 220)}px`;
}

function typed() {
  fitPrompt();
  keepDraft();
}

/** What this tab showed before a reload comes first: nobody writes into what is replaced. */
async function start() {
  $("composer").inert = true;
  const before = sessionStorage.getItem(SHOWN);
  await recover().catch(notKept);
  if (before) await open(before);
  sessionStorage.setItem(SHOWN, conversation.id);
  $("composer").inert = false;
  past.draw();
  connection.connect();
}

function currentRequest() {
  if (model() === undefined) return null;
  const text = $("prompt").value.trim();
  if (!text && attachments.items.length === 0 && last !== null) return last;
  return requestFor({ text: text || "Hello", attachments: attachments.items });
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("input", typed);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && document.querySelector("dialog[open]") === null) stopAll();
});
$("stop").addEventListener("click", () => exchange.stop());
$("talk").addEventListener("click", talkLive);
$("new-chat").addEventListener("click", newChat);
$("model").addEventListener("change", () => {
  chooseModel($("model").value);
  choose();
});
$("outputs").addEventListener("change", rememberOutputs);
window.addEventListener("resize", fitPrompt);
onOtherTab(changedElsewhere);

setUpKey();
onKey(() => connection.connect());
setUpTheme();
setUpPanels();
setUpViewer();
setUpAttachments(attachments);
setUpSnippets(currentRequest);
start();
