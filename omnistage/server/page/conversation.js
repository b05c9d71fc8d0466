// A conversation: turns of a question and an answer, as the service takes them and as the browser keeps them.

import { toBase64 } from "./api.js";
import { userMessage } from "./request.js";

const MAX_TITLE = 60; // characters
const newId = () => `${Date.now().toString(36)}-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;

export class Conversation {
  constructor(id = newId()) {
    this.id = id;
    // {text, attachments, answer, edit}: the answer is a record, as `Answer` gives it, `edit` what its open editor has
    this.turns = [];
    this.urls = [];
  }

  /** A kept conversation. */
  static async from({ id, messages, edits = [] }) {
    const conversation = new Conversation(id);
    const edited = new Map(edits);
    for (let position = 0; position < messages.length; position += 2) {
      if (messages[position] === undefined) continue; // deleted in another tab, which this one has heard of too late
      const { text, attachments } = messages[position];
      const turn = conversation.add({ text, attachments: await Promise.all(attachments.map(restored)) });
      turn.answer = messages[position + 1] ?? null;
      turn.edit = edited.get(position / 2) ?? null;
    }
    return conversation;
  }

  renew() {
    this.id = newId();
  }

  add({ text, attachments }) {
    const turn = { text, attachments, answer: null, edit: null };
    this.turns.push(turn);
    return turn;
  }

  /** Drop what follows a turn. */
  cutAfter(turn) {
    this.turns.length = this.turns.indexOf(turn) + 1;
  }

  /**
   * What was said before a turn, or altogether, for a model that takes these modalities. A turn without an answer is left
   * out: it was refused or is running.
   */
  messages(until, input) {
    const end = until === null ? this.turns.length : this.turns.indexOf(until);
    return this.turns.slice(0, end).flatMap(({ text, attachments, answer }) => {
      if (!answer || !answer.ended || !(answer.text || (answer.chats && answer.ended === "done"))) return [];
      return [userMessage(text, attachments.map((item) => readable(item, input))), { role: "assistant", content: answer.text }];
    });
  }

  /** Names of files in the conversation that a model of these modalities does not take. */
  unreadable(input) {
    return this.turns.flatMap(({ attachments }) => attachments.filter((item) => readable(item, input) !== item).map(({ name }) => name));
  }

  get title() {
    const first = this.turns[0];
    if (first === undefined) return "";
    const [file] = first.attachments;
    const words = first.text || file?.heard || file?.name || "Spoken";
    return words.length > MAX_TITLE ? `${words.slice(0, MAX_TITLE).trimEnd()}…` : words;
  }

  /** What is written in open editors: the numbers of their turns, and the texts. */
  get edits() {
    return this.turns.flatMap(({ edit }, number) => (edit === null ? [] : [[number, edit]]));
  }

  /** The entry for the list of conversations. */
  entry(draft) {
    const records = this.turns.flatMap((_, number) => this.records(number));
    const bytes = [...records, ...(draft ? [draft] : [])].reduce((sum, record) => sum + sizeOf(record), 0);
    const files = records.some((record) => filesOf(record).length > 0);
    return { id: this.id, title: this.title, updated: Date.now(), bytes, files, turns: this.turns.length, draft, edits: this.edits };
  }

  /** A turn as two messages for the store. */
  records(number) {
    const { text, attachments, answer } = this.turns[number];
    return [{ text, attachments: attachments.map(attachmentRecord) }, ...(answer ? [answer] : [])];
  }

  /** An address for bytes, for as long as this conversation is shown. */
  urlOf(blob) {
    const url = URL.createObjectURL(blob);
    this.urls.push(url);
    return url;
  }

  close() {
    for (const url of this.urls) URL.revokeObjectURL(url);
    for (const { attachments } of this.turns) for (const { url } of attachments) if (url) URL.revokeObjectURL(url);
  }
}

/** An attachment as a model of these modalities takes it: where it does not, the words that were heard in it, if any. */
const readable = (item, input) => (item.kind === "text" || !item.file || input.includes(item.kind) ? item : { ...item, file: null });

export const attachmentRecord = ({ kind, name, file, text, heard }) => ({ kind, name, file, text, heard });

/** An attachment from the store; one whose file is no longer kept has only its name. */
export async function restored({ kind, name, file, text, heard }) {
  if (kind === "text") return { kind, name, file, text };
  if (!file) return { kind, name, file: null };
  return { kind, name, file, heard, base64: await toBase64(file), url: URL.createObjectURL(file) };
}

function filesOf(record) {
  const files = [...(record.attachments ?? []).map(({ file }) => file), ...(record.pictures ?? []).map(({ blob }) => blob)];
  return [...files, record.speech, record.video?.blob].filter(Boolean);
}

const sizeOf = (record) => (record.text ?? "").length + filesOf(record).reduce((sum, file) => sum + file.size, 0);

/** A kept conversation as one file: OpenAI's messages, with every file of both sides in it. */
export async function exported(kept) {
  const conversation = await Conversation.from(kept);
  const messages = [];
  for (const { text, attachments, answer } of conversation.turns) {
    const heard = attachments.map((item) => item.heard).filter(Boolean);
    messages.push({ ...userMessage(text, attachments), ...(heard.length ? { heard: heard.join(" ") } : {}) });
    if (!answer) continue;
    const message = { role: "assistant", model: answer.model, content: answer.text };
    if (answer.reasoning) message.reasoning = answer.reasoning;
    if (answer.error) message.error = answer.error;
    const files = [...answer.pictures.map(({ blob }) => blob), answer.video?.blob, answer.speech].filter(Boolean);
    if (files.length) message.files = await Promise.all(files.map(async (file) => `data:${file.type};base64,${await toBase64(file)}`));
    messages.push(message);
  }
  conversation.close();
  return new Blob([JSON.stringify({ title: kept.title, updated: new Date(kept.updated).toISOString(), messages }, null, 1)], { type: "application/json" });
}
