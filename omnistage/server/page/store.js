// Conversations in the browser's own database: an index, and the messages with their pictures and sound.
// Nothing of it goes to the service. The oldest conversations lose their files first; text is always kept.

import { discard, discardAll, leftovers, withFiles, withoutFiles } from "./unsaved.js";

const NAME = "omnistage";
const MAX_BYTES = 256 * 2 ** 20; // of all conversations
const MAX_CONVERSATION = 128 * 2 ** 20;
const DRAFT_DAYS = 1; // after which a draft without a message is forgotten

let opening = null;
let full = false; // no more files fit
const tabs = new BroadcastChannel("omnistage.conversations");

/** `change({id, gone})` is called when another tab has written a conversation, or deleted it; without an id all of them. */
export function onOtherTab(change) {
  tabs.addEventListener("message", ({ data }) => change(data));
}

function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("messages"); // key: [conversation, position]
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("another tab keeps the database open"));
  });
  opening.catch(() => (opening = null));
  return opening;
}

/** One transaction over both stores; `work` gets them and may return a request, whose result is given back. */
async function inTransaction(mode, work) {
  const transaction = (await database()).transaction(["conversations", "messages"], mode);
  const request = work(transaction.objectStore("conversations"), transaction.objectStore("messages"));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onabort = () => reject(transaction.error ?? new Error("it was not stored"));
  });
}

const messagesOf = (id, from = 0) => IDBKeyRange.bound([id, from], [id, Infinity]);

/** All conversations with a message, the latest first. */
export async function listed() {
  const all = await inTransaction("readonly", (conversations) => conversations.getAll());
  return all.filter(({ title }) => title).sort((a, b) => b.updated - a.updated);
}

/** A conversation's entry in the index and its messages by position; null for one that is not there. */
export async function load(id) {
  let entry, keys;
  const found = await inTransaction("readonly", (conversations, store) => {
    entry = conversations.get(id);
    keys = store.getAllKeys(messagesOf(id));
    return store.getAll(messagesOf(id));
  });
  const messages = []; // an answer that another tab waited for is missing
  keys.result.forEach(([, position], index) => (messages[position] = found[index]));
  return entry.result === undefined ? null : { ...entry.result, messages };
}

/** Keep an entry, and messages by their positions; those from `end` on are dropped. Full storage keeps texts only. */
export async function save(entry, messages = new Map(), end = Infinity) {
  const bare = () => put({ ...entry, draft: entry.draft && withoutFiles(entry.draft) }, messages, end, false);
  const whole = () => put(entry, messages, end, entry.bytes <= MAX_CONVERSATION);
  const before = full;
  try {
    await (full ? bare() : whole());
  } catch (error) {
    if (error?.name !== "QuotaExceededError") throw error;
    full = true; // a further try with files would take room that the browser gives back late
    await bare().catch(() => {
      throw new Error("its storage is full; delete conversations to make room.");
    });
  }
  // A draft, and an answer that grows, are of no interest to other tabs.
  if ([...messages.values()].some(({ ended }) => ended !== null)) tabs.postMessage({ id: entry.id });
  if (full && !before) throw new Error("its storage is full. Only text is kept now; delete conversations to make room.");
}

function put(entry, messages, end, files) {
  return inTransaction("readwrite", (conversations, store) => {
    if (end !== Infinity) store.delete(messagesOf(entry.id, end));
    for (const [position, message] of messages) store.put(files ? message : withoutFiles(message), [entry.id, position]);
    conversations.put(entry);
  });
}

/** Store what pages that were left could not; where the conversation has gone on since, that is newer. */
export async function recover() {
  for (const left of leftovers()) {
    await inTransaction("readwrite", (conversations, store) => restore(left, conversations, store));
    discard(left.entry.id);
  }
}

/** Reads and writes in one transaction, so that no other tab comes between. */
function restore({ entry, messages, end }, conversations, store) {
  const before = conversations.get(entry.id);
  const keys = store.getAllKeys(messagesOf(entry.id));
  const stored = store.getAll(messagesOf(entry.id));
  stored.onsuccess = () => {
    if (before.result?.updated > entry.updated) return;
    const old = new Map(keys.result.map(([, position], index) => [position, stored.result[index]]));
    if (end !== Infinity) store.delete(messagesOf(entry.id, end));
    for (const [position, message] of messages) {
      const same = position < end ? old.get(position) : undefined;
      store.put(withFiles(message, same, before.result?.draft), [entry.id, position]);
    }
    const draft = entry.draft && withFiles(entry.draft, undefined, before.result?.draft);
    conversations.put({ ...entry, draft });
  };
}

export async function remove(id) {
  full = false;
  discard(id);
  await inTransaction("readwrite", (conversations, store) => {
    conversations.delete(id);
    store.delete(messagesOf(id));
  });
  tabs.postMessage({ id, gone: true });
}

export async function removeAll() {
  full = false;
  discardAll();
  await inTransaction("readwrite", (conversations, store) => {
    conversations.clear();
    store.clear();
  });
  tabs.postMessage({ gone: true });
}

/** Bring everything below the bound: files of the oldest conversations go first, never those of `current`. */
export async function trim(current) {
  const all = await inTransaction("readonly", (conversations) => conversations.getAll());
  const old = all.filter(({ id }) => id !== current).sort((a, b) => a.updated - b.updated);
  const forgotten = Date.now() - DRAFT_DAYS * 86_400_000;
  for (const { id, title, updated } of old) if (!title && updated < forgotten) await remove(id);
  let total = all.reduce((sum, { bytes }) => sum + bytes, 0);
  for (const entry of old) {
    if (total <= MAX_BYTES) return;
    if (!entry.files) continue;
    const { messages } = await load(entry.id);
    const bare = new Map();
    messages.forEach((message, position) => bare.set(position, withoutFiles(message)));
    total -= entry.bytes;
    await save({ ...entry, files: false, bytes: 0 }, bare);
  }
}
