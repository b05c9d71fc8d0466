// Writes conversations to the store while they grow: questions and files at once, growing answers once a second, drafts soon after
// a key. What is shown and not yet stored when the page is left, is left to the next page.

import { attachmentRecord } from "./conversation.js";
import { save, trim } from "./store.js";
import { discard, leave } from "./unsaved.js";

const GROWING = 1000; // milliseconds between two writes of an answer that grows
const TYPING = 400;

export class Keeper {
  /** `problem(error)` is called when something could not be kept, `changed()` when the list is another. */
  constructor(problem, changed) {
    Object.assign(this, { problem, changed });
    this.jobs = new Map(); // by conversation: what is to be written
    this.works = new Set(); // what is being written, in this order
    this.drafts = new Map();
    this.growing = new Map(); // by conversation: the answer that grows
    this.writing = Promise.resolve();
    // A page that is left may not come back.
    this.left = []; // the conversations of which something was left to the next page
    document.addEventListener("visibilitychange", () => (document.hidden ? this.leave() : this.back()));
    window.addEventListener("pagehide", () => {
      this.leave();
      this.gone = true; // what fails from now on, as connections do, is not to be kept
    });
    window.addEventListener("pageshow", () => this.back());
  }

  /** A question was asked or changed; what followed it is gone. */
  question(conversation, turn) {
    const position = 2 * conversation.turns.indexOf(turn);
    const job = this.job(conversation);
    for (const later of job.messages.keys()) if (later > position) job.messages.delete(later);
    job.messages.set(position, conversation.records(position / 2)[0]);
    job.end = Math.min(job.end, position + 1);
    this.growing.delete(conversation);
    return this.flush().then(() => trim(conversation.id).catch(this.problem));
  }

  /** An answer has grown, or has ended; `now` where what is new is shown only when it is stored. */
  answer(conversation, turn, view, now = false) {
    const number = conversation.turns.indexOf(turn);
    if (number < 0) return Promise.resolve();
    turn.answer = view.record;
    this.job(conversation).messages.set(2 * number + 1, turn.answer);
    if (turn.answer.ended) this.growing.delete(conversation);
    else this.growing.set(conversation, { turn, view });
    if (now || turn.answer.ended) return this.flush();
    this.soon(GROWING);
    return Promise.resolve();
  }

  /** What belongs to a question has changed: a recording, or what was heard in it. What follows stays. */
  message(conversation, turn) {
    const number = conversation.turns.indexOf(turn);
    if (number < 0) return Promise.resolve();
    this.job(conversation).messages.set(2 * number, conversation.records(number)[0]);
    return this.flush();
  }

  /** What is being written, which is no message yet. */
  draft(conversation, text, attachments) {
    const draft = text || attachments.length ? { text, attachments: attachments.map(attachmentRecord) } : null;
    if (draft === null && !this.drafts.get(conversation) && conversation.turns.length === 0) return;
    this.drafts.set(conversation, draft);
    this.job(conversation);
    this.soon(TYPING);
  }

  /** A message is being edited, or no longer. */
  edit(conversation) {
    this.job(conversation);
    this.soon(TYPING);
  }

  /** The draft that is stored of a conversation. */
  resume(conversation, draft) {
    this.drafts.set(conversation, draft);
  }

  /** Keep it as another conversation: a second tab goes on with the one that it was. */
  apart(conversation) {
    conversation.renew();
    const records = conversation.turns.flatMap((turn, number) => conversation.records(number).map((record, part) => [2 * number + part, record]));
    this.job(conversation).messages = new Map(records);
    this.flush();
  }

  forget(conversation) {
    this.jobs.delete(conversation);
    this.drafts.delete(conversation);
    this.growing.delete(conversation);
    conversation.forgotten = true;
  }

  job(conversation) {
    if (!this.jobs.has(conversation)) this.jobs.set(conversation, { messages: new Map(), end: Infinity });
    return this.jobs.get(conversation);
  }

  soon(delay) {
    this.timer ??= setTimeout(() => this.flush(), delay);
  }

  /** Write everything; fulfilled when it is stored, or when it was said that it cannot be. */
  flush() {
    clearTimeout(this.timer);
    this.timer = null;
    for (const [conversation, { messages, end }] of this.jobs) {
      if (conversation.forgotten) continue;
      const work = { entry: conversation.entry(this.drafts.get(conversation) ?? null), messages, end };
      this.works.add(work);
      this.writing = this.writing
        .then(() => conversation.forgotten || save(work.entry, messages, end))
        .catch(this.problem)
        .then(() => this.works.delete(work));
      this.writing.then(this.changed);
    }
    this.jobs.clear();
    return this.writing;
  }

  /** The page goes: the store may not get what is on its way there. */
  leave() {
    if (this.gone) return;
    for (const [conversation, { turn, view }] of this.growing) this.answer(conversation, turn, view);
    const sounds = new Map([...this.growing.values()].map(({ turn, view }) => [turn.answer, view.soundSoFar]));
    this.flush();
    const unsaved = new Map();
    for (const { entry, messages, end } of this.works) {
      const before = [...(unsaved.get(entry.id)?.messages ?? [])].filter(([position]) => position < end);
      const later = [...messages].map(([position, message]) => [position, sounds.get(message) ? { ...message, sound: sounds.get(message) } : message]);
      unsaved.set(entry.id, { entry, messages: new Map([...before, ...later]), end: Math.min(unsaved.get(entry.id)?.end ?? Infinity, end) });
    }
    this.left = [...unsaved.keys()];
    for (const work of unsaved.values()) leave(work);
  }

  /** The page is seen again, and stores by itself. */
  back() {
    const { left } = this;
    this.left = [];
    this.gone = false;
    this.writing.then(() => left.forEach(discard));
  }
}
