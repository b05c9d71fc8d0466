// Writes conversations to the store while they grow: questions at once, answers once a second, drafts soon after a key.

import { attachmentRecord } from "./conversation.js";
import { save, trim } from "./store.js";

const GROWING = 1000; // milliseconds between two writes of an answer that grows
const TYPING = 400;

export class Keeper {
  /** `problem(error)` is called when something could not be kept, `changed()` when the list is another. */
  constructor(problem, changed) {
    Object.assign(this, { problem, changed });
    this.jobs = new Map(); // by conversation: what is to be written
    this.drafts = new Map();
    this.writing = Promise.resolve();
    // A page that is left may not come back.
    document.addEventListener("visibilitychange", () => document.hidden && this.flush());
    window.addEventListener("pagehide", () => this.flush());
  }

  /** A question was asked or changed; what followed it is gone. */
  question(conversation, turn) {
    const position = 2 * conversation.turns.indexOf(turn);
    const job = this.job(conversation);
    for (const later of job.messages.keys()) if (later > position) job.messages.delete(later);
    job.messages.set(position, conversation.records(position / 2)[0]);
    job.end = Math.min(job.end, position + 1);
    return this.flush().then(() => trim(conversation.id).catch(this.problem));
  }

  /** An answer has grown, or has ended. */
  answer(conversation, turn) {
    const number = conversation.turns.indexOf(turn);
    if (number < 0 || turn.answer === null) return;
    this.job(conversation).messages.set(2 * number + 1, turn.answer);
    if (turn.answer.ended) this.flush();
    else this.soon(GROWING);
  }

  /** What was heard stands with the question's attachments. */
  heard(conversation, turn) {
    const number = conversation.turns.indexOf(turn);
    if (number < 0) return;
    this.job(conversation).messages.set(2 * number, conversation.records(number)[0]);
    this.flush();
  }

  /** What is being written, which is no message yet. */
  draft(conversation, text, attachments) {
    const draft = text || attachments.length ? { text, attachments: attachments.map(attachmentRecord) } : null;
    if (draft === null && !this.drafts.get(conversation) && conversation.turns.length === 0) return;
    this.drafts.set(conversation, draft);
    this.job(conversation);
    this.soon(TYPING);
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
    conversation.forgotten = true;
  }

  job(conversation) {
    if (!this.jobs.has(conversation)) this.jobs.set(conversation, { messages: new Map(), end: Infinity });
    return this.jobs.get(conversation);
  }

  soon(delay) {
    this.timer ??= setTimeout(() => this.flush(), delay);
  }

  flush() {
    clearTimeout(this.timer);
    this.timer = null;
    for (const [conversation, { messages, end }] of this.jobs) {
      if (conversation.forgotten) continue;
      const entry = conversation.entry(this.drafts.get(conversation) ?? null);
      this.writing = this.writing.then(() => save(entry, messages, end)).catch(this.problem).then(this.changed);
    }
    this.jobs.clear();
    return this.writing;
  }
}
