// Answers: they grow while they arrive, are kept as records, and are shown again from these.

import { fromBase64 } from "./api.js";
import { $, announce, copyText, count, el, icon, iconButton, seconds } from "./dom.js";
import { render } from "./render.js";
import { viewable } from "./viewer.js";

const NEAR_END = 80; // pixels from the bottom within which the view follows what grows
const REASONS = { length: "token limit reached", tool_calls: "tool call", content_filter: "filtered" };

/** Whether the end is in view: it stays there whatever grows, until the user scrolls up. */
let following = true;
let top = 0;

function showEnd() {
  if (!following) return;
  $("scroll").scrollTop = $("scroll").scrollHeight;
  top = $("scroll").scrollTop; // also where the content has shrunk, as by a preview that goes: nobody scrolled up
}

$("scroll").addEventListener("scroll", () => {
  const { scrollTop, scrollHeight, clientHeight } = $("scroll");
  if (scrollHeight - scrollTop - clientHeight < NEAR_END) following = true;
  else if (scrollTop < top) following = false; // only a user scrolls up
  top = scrollTop;
});
const sizes = new ResizeObserver(showEnd);
sizes.observe($("scroll"));
sizes.observe($("messages"));

/** Add a question or an answer to the conversation. */
export function append(element) {
  $("messages").append(element);
  following = true;
  showEnd();
}

export class Answer {
  /**
   * `urlOf(blob)` gives an address for bytes, `again()` asks once more,
   * `showTimeline(answer)` shows this answer's trace in the panel; null where there is none.
   */
  constructor(model, { urlOf, again, showTimeline }) {
    Object.assign(this, { urlOf, again, showTimeline });
    this.model = model.id;
    this.chats = model.chats;
    this.text = "";
    this.thought = "";
    this.began = performance.now();
    this.firstText = null;
    this.usage = null;
    this.trace = null;
    this.video = null;
    this.sound = null;
    this.player = null; // of the speech, while this page has received it
    this.ended = null; // "done", "stopped" or "error"
    this.error = null;
    this.facts = [];
    this.figures = new Map();
    this.pictures = new Map(); // those that are done: {blob, seed}
    this.words = el("div", { class: "words" });
    this.reasoning = el("div", { class: "reasoning muted" });
    this.thoughts = el("details", { class: "thoughts", hidden: true }, el("summary", {}, "Reasoning"), this.reasoning);
    this.waiting = el("p", { class: "waiting" }, el("span", { class: "unseen" }, "Working"), el("i"), el("i"), el("i"));
    this.progress = el("div", { class: "progress", hidden: true });
    this.gallery = el("div", { class: "gallery", hidden: true });
    this.speech = el("div", { class: "speech", hidden: true });
    this.foot = el("footer", { class: "foot-row" });
    const body = el("div", { class: "body" }, this.waiting, this.thoughts, this.words, this.progress, this.gallery, this.speech, this.foot);
    this.element = el("li", { class: "message answer", "aria-busy": "true" }, el("h3", {}, model.id), body);
  }

  /** As it is kept. */
  get record() {
    const { model, chats, text, thought: reasoning, ended, error, facts, video, sound: speech } = this;
    return { model, chats, text, reasoning, ended, error, facts, video, speech, pictures: [...this.pictures.values()] };
  }

  /** An answer that was kept; one without an end was left by a reload. */
  static from(record, hooks) {
    const answer = new Answer({ id: record.model, chats: record.chats }, { ...hooks, showTimeline: null });
    if (record.reasoning) answer.addReasoning(record.reasoning);
    answer.text = record.text;
    record.pictures.forEach(({ blob, seed }, index) => blob && answer.showDone(index, blob, seed));
    if (record.pictures.some(({ blob }) => !blob)) answer.gallery.after(el("p", { class: "note" }, "Its pictures are no longer kept."));
    if (record.video?.blob) answer.showVideo(record.video);
    if (record.speech) answer.showReplay(record.speech);
    answer.close(record.ended ?? "stopped", record.error, record.ended ? record.facts : ["interrupted", ...record.facts]);
    return answer;
  }

  /** The speech of an answer that still grows, as base64; its record gets it when it is whole. */
  get soundSoFar() {
    return this.sound === null && this.player?.received ? this.player.base64 : null;
  }

  /** Take a file into the record, without showing it; false for other events and for previews. */
  hold({ type, index, url, preview: early, seed, blob, name }) {
    if (type === "image" && !early) {
      const [head, data] = url.split(",");
      this.pictures.set(index, { blob: new Blob([fromBase64(data)], { type: head.slice(5).split(";")[0] }), seed });
    } else if (type === "video") {
      this.video = { blob, name };
    } else {
      return false;
    }
    return true;
  }

  take(event) {
    if (event.type === "text") this.addText(event.text);
    else if (event.type === "reasoning") this.addReasoning(event.text);
    else if (event.type === "progress") this.showProgress(event);
    else if (event.type === "image") this.showPicture(event);
    else if (event.type === "video") this.showVideo(event);
    else if (event.type === "usage") this.usage = event.usage;
    else if (event.type === "finish") this.reason = event.reason;
    if (event.type !== "progress" && event.type !== "reasoning") this.waiting.hidden = true;
  }

  addText(text) {
    this.firstText ??= performance.now() - this.began;
    this.text += text;
    // At most once a frame, however fast tokens arrive.
    this.drawing ??= requestAnimationFrame(() => this.drawText());
  }

  addReasoning(text) {
    this.thought += text;
    this.thoughts.hidden = false;
    this.reasoning.append(text);
  }

  drawText() {
    this.drawing = null;
    render(this.words, this.text);
  }

  showProgress({ done, all, unit }) {
    this.waiting.hidden = true;
    if (this.progress.childElementCount === 0) {
      this.bar = el("progress", { "aria-label": "Progress" });
      this.label = el("span", { class: "number muted" });
      this.progress.append(this.bar, this.label);
    }
    Object.assign(this.bar, { max: all, value: done });
    this.label.textContent = unit === "%" ? `${done} %` : `${unit} ${done} of ${all}`;
    this.progress.dataset.most = Math.max(Number(this.progress.dataset.most ?? 0), done);
    this.progress.hidden = false;
  }

  showPicture({ index, url, preview: early }) {
    if (!early) {
      const { blob, seed } = this.pictures.get(index);
      this.showDone(index, blob, seed);
      return;
    }
    const figure = this.figure(index);
    Object.assign(figure.querySelector("img"), { src: url, alt: "The picture on its way" });
    figure.classList.add("early");
    figure.dataset.previews = Number(figure.dataset.previews ?? 0) + 1;
  }

  figure(index) {
    let figure = this.figures.get(index);
    if (figure === undefined) {
      figure = el("figure", { class: "picture" }, el("img", { alt: "" }));
      this.figures.set(index, figure);
      this.gallery.append(figure);
      this.gallery.hidden = false;
    }
    return figure;
  }

  showDone(index, blob, seed) {
    this.pictures.set(index, { blob, seed });
    const figure = this.figure(index);
    figure.classList.remove("early");
    const name = `picture-${index + 1}.${blob.type.split("/")[1]}`;
    const url = this.urlOf(blob);
    const image = el("img", { src: url, alt: `Picture ${index + 1}` });
    const save = el("a", { class: "tool small save", href: url, download: name, title: "Save the picture" }, icon("save"));
    save.append(el("span", { class: "unseen" }, `Save picture ${index + 1}`));
    figure.replaceChildren(viewable(image, name), save);
    if (seed !== null && seed !== undefined) figure.append(el("figcaption", { class: "muted number" }, `seed ${seed}`));
  }

  showVideo({ blob, name }) {
    this.video = { blob, name };
    const url = this.urlOf(blob);
    const save = el("a", { class: "button", href: url, download: name }, "Save the video");
    this.gallery.append(el("figure", { class: "picture" }, el("video", { src: url, controls: true, loop: true }), save));
    this.gallery.hidden = false;
  }

  /** The speech: its state while it plays, then controls to replay and save it. */
  showSpeech(player, over) {
    this.player = player;
    this.speech.hidden = false;
    if (this.speech.childElementCount === 0) {
      const quiet = el("button", { type: "button", class: "button" }, "Stop playback");
      quiet.addEventListener("click", () => player.stop());
      this.speechLength = el("span", { class: "number" });
      this.speechNow = el("div", { class: "speaking" }, el("span", { class: "wave", "aria-hidden": "true" }, el("i"), el("i"), el("i"), el("i")), this.speechLength, quiet);
      this.speech.append(this.speechNow);
    }
    this.speechLength.textContent = `${player.playing ? "Speaking" : "Speech"} · ${seconds(player.seconds)}`;
    this.speechNow.classList.toggle("still", !player.playing);
    const quiet = over && !player.audible;
    this.speechNow.hidden = quiet;
    if (over) this.sound ??= player.wav();
    if (quiet && this.replay === undefined) this.showReplay(this.sound);
  }

  showReplay(wav) {
    this.sound = wav;
    this.speech.hidden = false;
    const url = this.urlOf(wav);
    this.replay = el("audio", { src: url, controls: true, preload: "metadata", "aria-label": "The spoken answer" });
    const save = el("a", { class: "tool small", href: url, download: "answer.wav", title: "Save as WAV" }, icon("save"));
    save.append(el("span", { class: "unseen" }, "Save the speech as WAV"));
    this.speech.append(el("div", { class: "replay" }, this.replay, save));
  }

  /** The record ends: "done", "stopped" or an error. It is shown by `finish`. */
  settle(how, error = null) {
    const took = (performance.now() - this.began) / 1000;
    if (this.player?.received) this.sound ??= this.player.wav();
    const facts = error && !this.text ? [] : this.factsOf(how, took);
    Object.assign(this, { ended: error ? "error" : how, error: error?.message ?? null, facts });
  }

  finish() {
    if (this.player?.received) this.showSpeech(this.player, true);
    this.close(this.ended, this.error, this.facts);
    if (this.error === null) announce(this.ended === "stopped" ? "Stopped" : `Answer: ${this.spoken()}`);
  }

  close(how, error, facts) {
    Object.assign(this, { ended: how, error, facts });
    if (this.drawing) cancelAnimationFrame(this.drawing);
    this.drawText();
    this.waiting.hidden = true;
    this.progress.hidden = true;
    this.element.setAttribute("aria-busy", "false");
    if (error) this.showFailure(error);
    const tools = el("span", { class: "foot-tools" });
    if (!error) tools.append(iconButton("again", "Regenerate", () => this.again(), "again"));
    if (this.text) tools.append(iconButton("copy", "Copy the text", (event) => copyText(this.text, event.currentTarget)));
    if (this.showTimeline && !error) tools.append(iconButton("bars", "Show this answer’s timeline", () => this.showTimeline(this)));
    this.foot.append(...facts.map((fact) => el("span", {}, fact)), tools);
    this.element.dataset.ended = how;
  }

  /** Where the answer would be: what went wrong, and a button to try again. */
  showFailure(message) {
    const retry = el("button", { type: "button", class: "button again" }, "Try again");
    retry.addEventListener("click", () => this.again());
    this.words.after(el("div", { class: "failure" }, el("p", { role: "alert" }, message), retry));
  }

  /** The announcement for screen readers when the answer is complete. */
  spoken() {
    const pictures = this.pictures.size ? `${this.pictures.size === 1 ? "1 picture" : `${this.pictures.size} pictures`}. ` : "";
    return `${pictures}${this.text}`.slice(0, 1000) || "done";
  }

  factsOf(how, took) {
    const facts = [];
    if (how === "stopped") facts.push("stopped");
    else if (REASONS[this.reason]) facts.push(REASONS[this.reason]);
    if (this.firstText !== null) facts.push(`first text ${seconds(this.firstText / 1000)}`);
    if (this.usage?.completion_tokens) facts.push(`${count(this.usage.completion_tokens)} tokens`);
    facts.push(seconds(took));
    return facts;
  }
}
