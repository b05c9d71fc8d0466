// Gapless speech: chunks are scheduled end to end on the audio clock, in whole frames, slightly ahead.

import { levelOf, toFloat, wavBase64, wavFile } from "./wav.js";

const LEAD = 0.15; // seconds of audio buffered at first, so that a late chunk leaves no gap
const MAX_LEAD = 0.6;
const USUAL_RATE = 24_000;

let context = null;
let meter = null; // measures what is played

/** Called from a user gesture: browsers allow audio only from there. */
export function unlockAudio(rate = USUAL_RATE) {
  if (context === null || context.state === "closed") {
    // At the model's rate chunks join sample by sample; at another each would be resampled separately.
    context = new AudioContext({ sampleRate: rate, latencyHint: "interactive" });
    meter = new AnalyserNode(context, { fftSize: 1024 });
    meter.connect(context.destination);
  }
  if (context.state === "suspended") context.resume().catch(() => {});
}

export class Player {
  /** `changed(player)` is called after every piece and when the sound is over. */
  constructor(changed) {
    this.changed = changed;
    this.rate = 0;
    this.received = 0; // samples received
    this.scheduled = 0; // samples scheduled
    this.underruns = 0; // chunks that arrived too late
    this.playing = false;
    this.pieces = [];
    this.sources = new Set();
    this.frame = 0; // the audio clock's frame at which the next piece begins
    this.lead = LEAD;
  }

  /** Take the next piece: bytes of 16-bit samples. */
  push(data, rate) {
    this.rate = rate;
    this.pieces.push(data);
    const samples = toFloat(data);
    this.received += samples.length;
    if (samples.length > 0 && !this.stopped) this.schedule(samples);
    this.changed(this);
  }

  schedule(samples) {
    if (context === null || (context.sampleRate !== this.rate && this.scheduled === 0)) {
      context?.close();
      context = null;
      unlockAudio(this.rate);
    }
    const clock = context.sampleRate;
    const now = Math.ceil(context.currentTime * clock);
    if (this.frame <= now) {
      if (this.scheduled > 0) {
        this.underruns += 1;
        this.lead = Math.min(this.lead * 2, MAX_LEAD);
      }
      this.frame = now + Math.round(this.lead * clock);
    }
    const buffer = context.createBuffer(1, samples.length, this.rate);
    buffer.copyToChannel(samples, 0);
    const source = new AudioBufferSourceNode(context, { buffer });
    source.connect(meter);
    source.start(this.frame / clock);
    this.frame += Math.round((samples.length * clock) / this.rate);
    this.scheduled += samples.length;
    this.playing = true;
    this.sources.add(source);
    source.addEventListener("ended", () => this.ended(source));
  }

  ended(source) {
    this.sources.delete(source);
    if (this.sources.size === 0) {
      this.playing = false;
      this.changed(this);
    }
  }

  /** Silence at once; what comes later is kept for replay but not played. */
  stop() {
    this.stopped = true;
    for (const source of this.sources) source.stop();
  }

  /** Whether sound is still to come; a browser that plays nothing without a gesture keeps its clock standing. */
  get audible() {
    return this.playing && context?.state === "running";
  }

  get seconds() {
    return this.rate ? this.received / this.rate : 0;
  }

  /** How much of it has been heard, in seconds: the rest is scheduled and not yet played. */
  get heard() {
    if (context === null || this.scheduled === 0) return 0;
    return Math.max(0, this.scheduled / this.rate - Math.max(0, this.frame / context.sampleRate - context.currentTime));
  }

  /** The level of what is playing, between 0 and 1. */
  get level() {
    if (!this.playing || meter === null) return 0;
    const samples = new Float32Array(meter.fftSize);
    meter.getFloatTimeDomainData(samples);
    return levelOf(samples);
  }

  wav() {
    return wavFile(this.pieces, this.rate);
  }

  /** The same as base64, at once. */
  get base64() {
    return wavBase64(this.pieces, this.rate);
  }
}
