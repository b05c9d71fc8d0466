// One request at a time: it runs, its answer grows, its stages are on the timeline. A signal ends all that belongs to it.

import { ApiError } from "./api.js";
import { $, count, seconds } from "./dom.js";
import { Player } from "./player.js";
import { run, watchTrace } from "./run.js";

const displayed = (error) => (error instanceof ApiError ? error : new Error("The connection was lost. Try again."));

export class Exchange {
  /**
   * `busy(on)` is called when a request begins or ends; `grown(conversation, turn, view, now)` whenever its answer is to be
   * kept, and gives a promise: with `now` it is fulfilled when that is stored.
   */
  constructor({ timeline, busy, grown }) {
    Object.assign(this, { timeline, busy, grown });
    this.running = null; // the AbortController of the request that runs
    this.watched = null; // whose stages the timeline shows
    this.player = null;
    // A page that is left loses its connection: that is no failure of the answer.
    window.addEventListener("pagehide", () => (this.left = true));
    window.addEventListener("pageshow", () => (this.left = false));
  }

  /** Run a request; its answer is `view`, and belongs to `turn` of `conversation`. */
  async answer(request, view, conversation, turn) {
    const control = this.begin();
    const tag = `page-${Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(36)).join("")}`;
    const watching = this.follow(tag, view, request);
    this.player?.stop();
    this.player = new Player((one) => this.showSpeech(one, view, this.running !== control));
    const speech = this.player;
    const keep = (now) => (this.left ? Promise.resolve() : this.grown(conversation, turn, view, now));
    let failure = null;
    keep();
    try {
      for await (const event of run(request, { signal: control.signal, tag })) {
        if (event.type === "audio") speech.push(event.data, event.rate);
        if (view.hold(event)) await keep(true); // a file is shown when it is stored
        view.take(event);
        keep();
      }
    } catch (error) {
      if (!control.signal.aborted) failure = error;
    }
    this.end(control);
    if (failure) watching.abort();
    view.settle(control.signal.aborted ? "stopped" : "done", failure && displayed(failure));
    await keep(true);
    if (speech.received > 0) this.showSpeech(speech, view, true);
    view.finish();
    return failure;
  }

  /** Show the request's stages as they run; the answer keeps the last state. */
  follow(tag, view, request) {
    const control = new AbortController();
    this.watched = control;
    if (request.kind === "video") {
      this.timeline.without("A video runs as a job; its progress is in the conversation.");
      return control;
    }
    this.timeline.begin();
    const onTrace = (trace) => {
      if (this.watched !== control) return; // the next request has the timeline now
      this.timeline.update(trace);
      view.trace = this.timeline.snapshot;
    };
    const over = () => this.watched === control && this.timeline.end();
    watchTrace(tag, control.signal, onTrace).then(over, over);
    return control;
  }

  /** The timeline no longer shows a request, for this reason. */
  unwatch(why) {
    this.watched?.abort();
    this.watched = null;
    this.timeline.without(why);
  }

  begin() {
    this.running = new AbortController();
    this.busy(true);
    return this.running;
  }

  end(control) {
    if (this.running !== control) return;
    this.running = null;
    this.busy(false);
  }

  stop() {
    this.player?.stop();
    this.running?.abort();
  }

  showSpeech(one, view, over) {
    $("speech-card").hidden = false;
    const meter = $("speech-meter").dataset;
    Object.assign(meter, { received: one.received, scheduled: one.scheduled, underruns: one.underruns, rate: one.rate });
    $("speech-scheduled").textContent = `${count(one.scheduled)} samples`;
    $("speech-seconds").textContent = seconds(one.seconds);
    $("speech-gaps").textContent = String(one.underruns);
    $("speech-state").textContent = one.playing ? "playing" : "";
    view.showSpeech(one, over);
  }
}
