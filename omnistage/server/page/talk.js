// The live conversation on the page: its bar with levels, and its turns in the conversation.

import { $, announce } from "./dom.js";
import { LiveSession } from "./live.js";
import { drawLevels } from "./microphone.js";
import { microphoneProblem } from "./recorder.js";

const STATES = {
  connecting: "Connecting…",
  listening: "Listening: speak when you like",
  hearing: "Hearing you…",
  thinking: "Thinking…",
  speaking: "Speaking: interrupt by speaking",
};
const AUDIBLE = 0.02; // a level that is more than noise is above it
const FRAME = 50; // milliseconds between two bars of a level

export class Talk {
  /** `turn(wav)`, `answer()`, `spoken(…)` and `answered(view)` are as in `LiveSession`; `changed(on)` when it begins or ends. */
  constructor({ notice, changed, ...hooks }) {
    Object.assign(this, { notice, changed, hooks });
    this.session = null;
    $("live-end").addEventListener("click", () => this.end());
    $("live-mute").addEventListener("click", () => this.mute(!this.session?.muted));
  }

  get active() {
    return this.session !== null;
  }

  async start(model, settings, items) {
    this.notice();
    const session = new LiveSession({
      ...this.hooks,
      state: (name) => this.show(name),
      problem: (text) => this.notice(text),
      ended: () => this.ended(),
    });
    this.session = session;
    this.changed(true);
    $("live").hidden = false;
    $("live").dataset.heard = "false";
    this.mute(false);
    this.meter(session);
    $("live-end").focus();
    try {
      await session.start(model, settings, items);
    } catch (error) {
      session.fail(microphoneProblem(error));
    }
  }

  end() {
    this.session?.end();
  }

  ended() {
    this.session = null;
    clearInterval(this.timer);
    $("live").hidden = true;
    this.changed(false);
    announce("The live conversation has ended");
  }

  show(name) {
    $("live").dataset.state = name;
    $("live-state").textContent = STATES[name];
  }

  mute(on) {
    if (this.session) this.session.muted = on;
    $("live-mute").setAttribute("aria-pressed", String(on));
    $("live-mute").textContent = on ? "Unmute" : "Mute";
  }

  /** Draw both levels while it lasts. */
  meter(session) {
    const [mine, model] = [[], []];
    this.timer = setInterval(() => {
      mine.push(session.level);
      model.push(session.player?.level ?? 0);
      if (session.level > AUDIBLE) $("live").dataset.heard = "true";
      drawLevels($("live-mine"), mine);
      drawLevels($("live-model"), model);
    }, FRAME);
  }
}

/** The session's settings for a model. */
export function settingsOf({ model, voice, params }) {
  const { system, temperature, seed, max_tokens: tokens } = params;
  const format = { type: "audio/pcm", rate: 24_000 };
  const input = { format, turn_detection: { type: "server_vad" } };
  const output = { format, ...(voice ? { voice } : {}) };
  const session = { type: "realtime", output_modalities: [model.speaks ? "audio" : "text"], audio: model.speaks ? { input, output } : { input } };
  if (system) session.instructions = system;
  if (temperature !== undefined) session.temperature = temperature;
  if (seed !== undefined) session.seed = seed;
  if (tokens !== undefined) session.max_output_tokens = tokens;
  return session;
}

/** What was said before, as items: text, and what was heard. */
export function itemsOf(turns) {
  const item = (role, type, text) => ({ type: "message", role, content: [{ type, text }] });
  return turns.flatMap(({ text, attachments, answer }) => {
    const said = [text, ...attachments.map(({ heard }) => heard)].filter(Boolean).join("\n");
    return said && answer?.text ? [item("user", "input_text", said), item("assistant", "output_text", answer.text)] : [];
  });
}
