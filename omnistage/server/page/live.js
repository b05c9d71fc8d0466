// A spoken conversation over `v1/realtime`: the microphone streams, the service finds the turns, speech interrupts.

import { base64Of, fromBase64 } from "./api.js";
import { key } from "./key.js";
import { Player, unlockAudio } from "./player.js";
import { Capture } from "./recorder.js";
import { Resampler, levelOf, toPcm16, wavFile } from "./wav.js";

const RATE = 24_000; // samples a second, both ways
const KEPT_SECONDS = 200; // of the microphone: more than a turn may have

/** The samples that were sent, for as long as a turn may need them. */
class Sent {
  constructor() {
    this.blocks = [];
    this.start = 0; // the first block's position
    this.end = 0;
  }

  push(block) {
    this.blocks.push(block);
    this.end += block.length;
    while (this.end - this.start > KEPT_SECONDS * RATE) this.start += this.blocks.shift().length;
  }

  /** A WAV file of what was sent between two times in milliseconds. */
  wav(from, until) {
    const all = new Int16Array(this.end - this.start);
    let at = 0;
    for (const block of this.blocks) {
      all.set(block, at);
      at += block.length;
    }
    const position = (ms) => Math.max(0, Math.round((ms * RATE) / 1000) - this.start);
    return wavFile([all.slice(position(from), position(until))], RATE);
  }
}

export class LiveSession {
  /**
   * `hooks`: `state(name)`: connecting, listening, hearing, thinking or speaking; `turn(wav)` when the user has spoken;
   * `answer()` gives the view of the answer to the latest turn; `grown(view)`; `spoken(player, view, over)`;
   * `answered(view, how, failure)` ends it; `problem(text)`; `ended()`.
   */
  constructor(hooks) {
    this.hooks = hooks;
    this.sent = new Sent();
    this.muted = false;
    this.level = 0; // of the microphone
    this.player = null; // what is heard
    this.voice = null; // the speech of the latest answer, also where it was interrupted
    this.view = null;
    this.item = null; // of the answer that is spoken
    this.over = false;
  }

  /** Open the microphone, then the connection. `settings` are the session's, `items` what was said before. */
  async start(model, settings, items) {
    this.hooks.state("connecting");
    unlockAudio(RATE);
    this.capture = new Capture(
      (block) => this.stream(block),
      () => this.fail("The microphone is gone."),
    );
    await this.capture.start();
    if (this.over) return this.capture.close();
    this.resampler = new Resampler(this.capture.rate, RATE);
    const url = new URL(`v1/realtime?model=${encodeURIComponent(model)}`, document.baseURI);
    url.protocol = url.protocol.replace("http", "ws");
    const protocols = key() ? ["realtime", `openai-insecure-api-key.${key()}`] : ["realtime"];
    this.socket = new WebSocket(url, protocols);
    this.socket.addEventListener("message", ({ data }) => this.take(JSON.parse(data)));
    this.socket.addEventListener("close", ({ reason }) =>
      this.fail(reason || (this.open ? "The live connection was lost." : "The service refused a live conversation, or cannot be reached.")),
    );
    this.begin = () => {
      this.send({ type: "session.update", event_id: "settings", session: settings });
      for (const item of items) this.send({ type: "conversation.item.create", item });
    };
    return undefined;
  }

  send(event) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(event));
  }

  /** A block of the microphone; silence while muted, for the session's clock is made of its samples. */
  stream(block) {
    this.level = this.muted ? 0 : levelOf(block);
    if (!this.open) return;
    const samples = toPcm16(this.resampler.push(this.muted ? new Float32Array(block.length) : block));
    this.sent.push(samples);
    this.send({ type: "input_audio_buffer.append", audio: base64Of(new Uint8Array(samples.buffer)) });
  }

  take(event) {
    const { type } = event;
    if (type === "session.created") this.begin();
    else if (type === "session.updated") this.listen();
    else if (type === "input_audio_buffer.speech_started") this.interrupted(event.audio_start_ms);
    else if (type === "input_audio_buffer.speech_stopped") this.spoken(event.audio_end_ms);
    else if (type === "response.created") this.view = this.hooks.answer();
    else if (type === "response.output_audio_transcript.delta" || type === "response.output_text.delta") this.text(event.delta);
    else if (type === "response.output_audio.delta") this.sound(event);
    else if (type === "response.done") this.done(event.response);
    else if (type === "error") this.refused(event.error);
  }

  listen() {
    this.open = true;
    this.hooks.state("listening");
  }

  /** The user speaks: what is still playing ends, and the service is told how much of it was heard. */
  interrupted(start) {
    this.turnStart = start;
    this.hooks.state("hearing");
    if (this.player === null || !this.player.playing) return;
    const heard = Math.floor(Math.min(this.player.heard, this.player.seconds) * 1000);
    this.player.stop();
    this.player = null;
    if (this.item) this.send({ type: "conversation.item.truncate", item_id: this.item, content_index: 0, audio_end_ms: heard });
  }

  spoken(end) {
    this.hooks.state("thinking");
    this.hooks.turn(this.sent.wav(this.turnStart, end));
  }

  text(delta) {
    if (this.view === null) return;
    this.view.take({ type: "text", text: delta });
    this.hooks.grown(this.view);
  }

  sound({ delta, item_id: item }) {
    if (this.view === null) return;
    if (this.item !== item) {
      const { view } = this;
      this.item = item;
      this.player = this.voice = new Player((one) => this.sounds(one, view));
      this.hooks.state("speaking");
    }
    this.voice?.push(fromBase64(delta), RATE);
  }

  sounds(player, view) {
    this.hooks.spoken(player, view, view !== this.view);
    if (player === this.player && view !== this.view && !player.playing && !this.over) this.hooks.state("listening");
  }

  done({ status, status_details: details, usage }) {
    const { view, voice } = this;
    if (view === null) return;
    this.view = null;
    this.voice = null;
    if (usage) view.take({ type: "usage", usage: { completion_tokens: usage.output_tokens } });
    if (details?.reason === "max_output_tokens") view.take({ type: "finish", reason: "length" });
    if (voice !== null) this.hooks.spoken(voice, view, true);
    const failure = status === "failed" ? new Error(details?.error?.message ?? "The answer failed.") : null;
    this.hooks.answered(view, status === "cancelled" ? "stopped" : "done", failure);
    if (status !== "cancelled" && !voice?.playing) this.hooks.state("listening");
  }

  refused(error) {
    // What was said has just ended or is gone: the service's context is right without the cut.
    if (error.param === "item_id" || error.param === "audio_end_ms") return;
    if (this.open) this.hooks.problem(error.message);
    else this.fail(error.message);
  }

  fail(text) {
    if (this.over) return;
    this.hooks.problem(text);
    this.end();
  }

  /** Hang up. */
  end() {
    if (this.over) return;
    this.over = true;
    this.capture?.close();
    this.socket?.close();
    this.player?.stop();
    if (this.view !== null) {
      const { view } = this;
      this.view = null;
      if (this.voice !== null) this.hooks.spoken(this.voice, view, true);
      this.hooks.answered(view, "stopped", null);
    }
    this.hooks.ended();
  }
}
