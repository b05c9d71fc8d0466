// Conversations in the browser's own database: an index, and the messages with their pictures and sound.
// Nothing of it goes to the service. The oldest conversations lose their files first; text is always kept.

const NAME = "omnistage";
const MAX_BYTES = 256 * 2 ** 20; // of all conversations
const MAX_CONVERSATION = 128 * 2 ** 20;
const DRAFT_DAYS = 1; // after which a draft without a message is forgotten

let opening = null;

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

/** A conversation's entry in the index and its messages; null for one that is not there. */
export async function load(id) {
  let entry;
  const messages = await inTransaction("readonly", (conversations, store) => {
    entry = conversations.get(id);
    return store.getAll(messagesOf(id));
  });
  return entry.result === undefined ? null : { ...entry.result, messages };
}

/** Keep an entry, and messages by their positions; those from `end` on are dropped. */
export function save(entry, messages = new Map(), end = Infinity) {
  const fits = entry.bytes <= MAX_CONVERSATION;
  return inTransaction("readwrite", (conversations, store) => {
    if (end !== Infinity) store.delete(messagesOf(entry.id, end));
    for (const [position, message] of messages) store.put(fits ? message : withoutFiles(message), [entry.id, position]);
    conversations.put(entry);
  });
}

export function remove(id) {
  return inTransaction("readwrite", (conversations, store) => {
    conversations.delete(id);
    store.delete(messagesOf(id));
  });
}

export function removeAll() {
  return inTransaction("readwrite", (conversations, store) => {
    conversations.clear();
    store.clear();
  });
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
    const bare = new Map(messages.map((message, position) => [position, withoutFiles(message)]));
    total -= entry.bytes;
    await save({ ...entry, files: false, bytes: 0 }, bare);
  }
}

/** A message whose files are only names. */
function withoutFiles(message) {
  const bare = { ...message };
  if (message.attachments) bare.attachments = message.attachments.map((item) => (item.kind === "text" ? item : { ...item, file: null }));
  if (message.pictures) bare.pictures = message.pictures.map((picture) => ({ ...picture, blob: null }));
  if (message.speech) bare.speech = null;
  if (message.video) bare.video = null;
  return bare;
}
