// The current request as code to copy: Python with OpenAI's client, and curl.

import { address } from "./api.js";
import { FileData } from "./attachments.js";
import { $, copyText } from "./dom.js";
import { key } from "./key.js";
import { PYTHON, SHELL, literal, quoted } from "./literal.js";

/** Fields that OpenAI's client knows; others go through `extra_body`. */
const KNOWN = {
  chat: ["model", "messages", "modalities", "audio", "stream", "stream_options", "temperature", "top_p", "max_tokens", "seed"],
  image: ["model", "prompt", "n", "size", "stream", "partial_images"],
  edit: ["model", "prompt", "n", "size", "stream", "partial_images"],
  video: ["model", "prompt", "size", "seconds"],
};
const CALL = { chat: "chat.completions.create", image: "images.generate", edit: "images.edit", video: "videos.create_and_poll" };
const KEY = "OMNISTAGE_API_KEY";

function hasFile(value, asUrl) {
  if (value instanceof FileData) return value.asUrl === asUrl;
  return typeof value === "object" && value !== null && Object.values(value).some((item) => hasFile(item, asUrl));
}

export function pythonOf(request) {
  const { kind, body, files = [] } = request;
  const withKey = key() !== null;
  const reads = hasFile(body, true) || hasFile(body, false);
  const decodes = kind === "image" || kind === "edit" || Boolean(body.audio);
  const lines = [];
  if (reads || decodes) lines.push("import base64");
  if (withKey) lines.push("import os");
  lines.push("from openai import OpenAI", "");
  const apiKey = withKey ? `os.environ["${KEY}"]` : '"none"';
  lines.push(`client = OpenAI(base_url=${JSON.stringify(address("v1"))}, api_key=${apiKey})`, "");
  if (reads) lines.push(...helpers(body));
  lines.push(`${kind === "video" ? "video" : "stream"} = client.${CALL[kind]}(`);
  const [known, extra] = split(body, KNOWN[kind]);
  for (const [name, value] of Object.entries(known)) lines.push(`    ${name}=${literal(value, PYTHON, 1)},`);
  if (files.length) lines.push(`    image=[${files.map(({ name }) => `open(${JSON.stringify(name)}, "rb")`).join(", ")}],`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra, PYTHON, 1)},`);
  lines.push(")", ...reading(request));
  return `${lines.join("\n")}\n`;
}

function split(body, names) {
  const part = (inside) => Object.fromEntries(Object.entries(body).filter(([name]) => names.includes(name) === inside));
  return [part(true), part(false)];
}

function helpers(body) {
  const lines = ["# The attached files, by their names: put them beside this script.", "def encoded(path):"];
  lines.push('    with open(path, "rb") as file:', "        return base64.b64encode(file.read()).decode()", "", "");
  if (hasFile(body, true)) lines.push("def data_url(path, kind):", '    return f"data:{kind};base64,{encoded(path)}"', "", "");
  return lines;
}

function reading({ kind, body }) {
  if (kind === "video") return ['client.videos.download_content(video.id).write_to_file("video.mp4")'];
  if (kind === "chat") {
    const lines = ["for chunk in stream:", "    delta = chunk.choices[0].delta if chunk.choices else None"];
    if (!body.audio) return [...lines, "    if delta and delta.content:", '        print(delta.content, end="", flush=True)'];
    lines.unshift('sound = open("answer.pcm", "wb")  # signed 16-bit samples, one channel');
    lines.push('    audio = getattr(delta, "audio", None) or {}', '    print(audio.get("transcript") or "", end="", flush=True)');
    return [...lines, '    sound.write(base64.b64decode(audio.get("data") or ""))', "sound.close()"];
  }
  const lines = ["for event in stream:", '    if event.type.endswith(".completed"):'];
  return [...lines, '        with open("picture.png", "wb") as file:', "            file.write(base64.b64decode(event.b64_json))"];
}

export function curlOf(request) {
  const { kind, path, body, files = [] } = request;
  const lines = [`curl -N ${quoted(address(path))}`];
  if (key() !== null) lines.push(`-H "Authorization: Bearer $${KEY}"`);
  if (kind === "edit") {
    for (const [name, value] of Object.entries(body)) lines.push(`--form-string ${quoted(`${name}=${value}`)}`);
    for (const { name, mime } of files) lines.push(`-F ${quoted(`image[]=@"${name.replace(/["\\]/g, "\\$&")}";type=${mime}`)}`);
    return `${lines.join(" \\\n  ")}\n`;
  }
  lines.push("-H 'Content-Type: application/json'", "--data-binary @- <<JSON");
  const note = hasFile(body, true) || hasFile(body, false) ? "# The attached files are read from this folder.\n" : "";
  // A line of JSON is never just the word that ends the document: text is in quotes and without line breaks.
  return `${note}${lines.join(" \\\n  ")}\n${literal(body, SHELL)}\nJSON\n`;
}

export function setUpSnippets(currentRequest) {
  $("show-code").addEventListener("click", () => {
    const request = currentRequest();
    if (request === null) return;
    $("python").textContent = pythonOf(request);
    $("curl").textContent = curlOf(request);
    $("code-dialog").showModal();
  });
  $("code-close").addEventListener("click", () => $("code-dialog").close());
  $("copy-python").addEventListener("click", (event) => copyText($("python").textContent, event.currentTarget));
  $("copy-curl").addEventListener("click", (event) => copyText($("curl").textContent, event.currentTarget));
}
