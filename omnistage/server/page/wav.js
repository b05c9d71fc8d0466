// Audio as 16-bit samples and as WAV files.

import { base64Of } from "./api.js";

/** Float samples between -1 and 1 as signed 16-bit. */
export function toPcm16(samples) {
  const result = new Int16Array(samples.length);
  for (let i = 0; i < samples.length; i += 1) result[i] = Math.max(-1, Math.min(1, samples[i])) * 32767;
  return result;
}

/** Signed 16-bit little-endian bytes as float samples. */
export function toFloat(data) {
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  const result = new Float32Array(data.byteLength >> 1);
  for (let i = 0; i < result.length; i += 1) result[i] = view.getInt16(2 * i, true) / 32768;
  return result;
}

/** How loud samples are, between 0 and 1. */
export function levelOf(samples) {
  let sum = 0;
  for (const sample of samples) sum += sample * sample;
  return Math.min(1, Math.sqrt(sum / samples.length) * 4);
}

/** A WAV file of one channel; `pieces` are byte arrays of 16-bit little-endian samples. */
export const wavFile = (pieces, rate) => new Blob([wavHead(pieces, rate), ...pieces], { type: "audio/wav" });

/** The same as base64. */
export function wavBase64(pieces, rate) {
  const parts = [new Uint8Array(wavHead(pieces, rate).buffer), ...pieces];
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return base64Of(whole);
}

function wavHead(pieces, rate) {
  const size = pieces.reduce((sum, piece) => sum + piece.byteLength, 0);
  const head = new DataView(new ArrayBuffer(44));
  const text = (at, value) => [...value].forEach((letter, i) => head.setUint8(at + i, letter.charCodeAt(0)));
  text(0, "RIFF");
  head.setUint32(4, 36 + size, true);
  text(8, "WAVEfmt ");
  head.setUint32(16, 16, true);
  head.setUint16(20, 1, true); // PCM
  head.setUint16(22, 1, true); // one channel
  head.setUint32(24, rate, true);
  head.setUint32(28, rate * 2, true);
  head.setUint16(32, 2, true);
  head.setUint16(34, 16, true);
  text(36, "data");
  head.setUint32(40, size, true);
  return head;
}

/** Samples of one rate as those of a lower one, block by block: each is the mean of those that it stands for. */
export class Resampler {
  constructor(from, to) {
    this.ratio = from / to;
    this.rest = new Float32Array(0);
    this.offset = 0; // of the next sample in `rest`, a fraction
  }

  push(block) {
    const samples = new Float32Array(this.rest.length + block.length);
    samples.set(this.rest);
    samples.set(block, this.rest.length);
    const count = Math.max(0, Math.floor((samples.length - this.offset) / this.ratio));
    const result = new Float32Array(count);
    for (let i = 0; i < count; i += 1) result[i] = mean(samples, this.offset + i * this.ratio, this.offset + (i + 1) * this.ratio);
    const used = this.offset + count * this.ratio;
    this.rest = samples.slice(Math.floor(used));
    this.offset = used - Math.floor(used);
    return result;
  }
}

/** The mean between two positions, with the parts of samples at both ends. */
function mean(samples, from, until) {
  let sum = 0;
  for (let at = Math.floor(from); at < until && at < samples.length; at += 1) {
    sum += samples[at] * (Math.min(at + 1, until) - Math.max(at, from));
  }
  return sum / (until - from);
}
