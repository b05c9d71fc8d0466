// The conversation: questions, and answers that grow while they arrive.

import { preview } from "./attachments.js";
import { $, announce, copyText, count, el, icon, iconButton, seconds } from "./dom.js";
import { rendered } from "./render.js";

const NEAR_END = 80; // pixels from the bottom within which the view follows the answer
const REASONS = { length: "token limit reached", tool_calls: "tool call", content_filter: "filtered" };

function follow(change) {
  const view = $("scroll");
  const near = view.scrollHeight - view.scrollTop - view.clientHeight < NEAR_END;
  change();
  if (near) view.scrollTop = view.scrollHeight;
}

export function showQuestion(text, attachments) {
  const body = el("div", { class: "bubble" });
  for (const item of attachments) body.append(el("figure", { class: "media", data: { kind: item.kind } }, preview(item)));
  if (text) body.append(...rendered(text));
  const message = el("li", { class: "message user" }, el("h3", { class: "unseen" }, "You"), body);
  follow(() => $("messages").append(message));
  $("scroll").scrollTop = $("scroll").scrollHeight;
}

export class Answer {
  /** `showTimeline(answer)` shows this answer's trace in the panel; null where there is none. */
  constructor(model, showTimeline) {
    this.text = "";
    this.began = performance.now();
    this.firstText = null;
    this.usage = null;
    this.trace = null;
    this.pictures = new Map();
    this.showTimeline = showTimeline;
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
    follow(() => $("messages").append(this.element));
    $("scroll").scrollTop = $("scroll").scrollHeight;
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
    this.thoughts.hidden = false;
    this.reasoning.append(text);
  }

  drawText() {
    this.drawing = null;
    follow(() => this.words.replaceChildren(...rendered(this.text)));
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
    follow(() => (this.progress.hidden = false));
  }

  showPicture({ index, url, preview: early, seed }) {
    let figure = this.pictures.get(index);
    if (figure === undefined) {
      figure = el("figure", { class: "picture" }, el("img", { alt: "" }));
      this.pictures.set(index, figure);
      follow(() => this.gallery.append(figure));
      this.gallery.hidden = false;
    }
    const image = figure.querySelector("img");
    image.src = url;
    image.alt = early ? "The picture on its way" : `Picture ${index + 1}`;
    figure.classList.toggle("early", early);
    figure.dataset.previews = Number(figure.dataset.previews ?? 0) + (early ? 1 : 0);
    if (early) return;
    const name = `picture-${index + 1}.png`;
    const save = el("a", { class: "tool small save", href: url, download: name, title: "Save the picture" }, icon("save"));
    save.append(el("span", { class: "unseen" }, `Save picture ${index + 1}`));
    figure.append(save);
    if (seed !== null && seed !== undefined) figure.append(el("figcaption", { class: "muted number" }, `seed ${seed}`));
    image.addEventListener("load", () => follow(() => {}), { once: true });
  }

  showVideo({ url, name }) {
    const save = el("a", { class: "button", href: url, download: name }, "Save the video");
    this.gallery.append(el("figure", { class: "picture" }, el("video", { src: url, controls: true, loop: true }), save));
    this.gallery.hidden = false;
  }

  /** The speech: its state while it plays, then controls to replay and save it. */
  showSpeech(player, over) {
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
    if (quiet && this.replay === undefined) this.showReplay(player);
  }

  showReplay(player) {
    const url = URL.createObjectURL(player.wav());
    this.replay = el("audio", { src: url, controls: true, preload: "metadata", "aria-label": "The spoken answer" });
    const save = el("a", { class: "tool small", href: url, download: "answer.wav", title: "Save as WAV" }, icon("save"));
    save.append(el("span", { class: "unseen" }, "Save the speech as WAV"));
    follow(() => this.speech.append(el("div", { class: "replay" }, this.replay, save)));
  }

  /** The end: "done", "stopped" or an error. */
  finish(how, error = null) {
    if (this.drawing) cancelAnimationFrame(this.drawing);
    this.drawText();
    this.waiting.hidden = true;
    this.progress.hidden = true;
    this.element.setAttribute("aria-busy", "false");
    this.element.dataset.ended = error ? "error" : how;
    const took = (performance.now() - this.began) / 1000;
    follow(() => {
      if (error) this.words.append(el("p", { class: "failure", role: "alert" }, error.message));
      this.foot.append(...this.facts(how, took).map((fact) => el("span", {}, fact)), el("span", { class: "fill" }));
      if (this.text) this.foot.append(iconButton("copy", "Copy the text", (event) => copyText(this.text, event.currentTarget)));
      if (this.showTimeline && !error) this.foot.append(iconButton("bars", "Show this answer’s timeline", () => this.showTimeline(this)));
    });
    if (!error) announce(how === "stopped" ? "Stopped" : `Answer: ${this.spoken()}`);
  }

  /** The announcement for screen readers when the answer is complete. */
  spoken() {
    const pictures = this.pictures.size ? `${this.pictures.size} pictures. ` : "";
    return `${pictures}${this.text}`.slice(0, 1000) || "done";
  }

  facts(how, took) {
    const facts = [];
    if (how === "stopped") facts.push("stopped");
    else if (REASONS[this.reason]) facts.push(REASONS[this.reason]);
    if (this.firstText !== null) facts.push(`first text ${seconds(this.firstText / 1000)}`);
    if (this.usage?.completion_tokens) facts.push(`${count(this.usage.completion_tokens)} tokens`);
    facts.push(seconds(took));
    return facts;
  }
}
