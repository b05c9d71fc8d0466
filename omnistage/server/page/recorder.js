// The microphone: samples through an audio worklet, resampled to a WAV file of 16 kHz, the rate of audio models.

import { address } from "./api.js";
import { levelOf, toPcm16, wavFile } from "./wav.js";

const RATE = 16_000;
const MAX_SECONDS = 600; // seconds

/** Why a microphone could not be opened, as a message for the user. */
export function microphoneProblem(error) {
  switch (error?.name) {
    case "NotAllowedError":
      return "The microphone is blocked. Allow it for this page in the browser's address bar.";
    case "NotFoundError":
      return "No microphone was found. Connect one, or attach an audio file.";
    case "NotReadableError":
      return "The microphone is in use by another program.";
    default:
      return error?.message || "The microphone does not work here.";
  }
}

/** The microphone's samples, block by block. */
export class Capture {
  /** `onBlock(block)` gets float samples of the rate `rate`; `onLost()` is called when the device goes away. */
  constructor(onBlock, onLost = () => {}) {
    this.onBlock = onBlock;
    this.onLost = onLost;
  }

  async start() {
    if (!window.isSecureContext || !navigator.mediaDevices) {
      throw new Error("Browsers open the microphone only over https or on localhost. Attach an audio file instead.");
    }
    this.stream = await navigator.mediaDevices.getUserMedia({
      audio: { channelCount: 1, echoCancellation: true, noiseSuppression: true },
    });
    try {
      for (const track of this.stream.getTracks()) track.addEventListener("ended", () => this.onLost());
      this.context = new AudioContext();
      this.rate = this.context.sampleRate;
      await this.context.audioWorklet.addModule(address("page/recorder-worklet.js"));
      this.node = new AudioWorkletNode(this.context, "capture", { numberOfOutputs: 0 });
      this.node.port.onmessage = ({ data }) => (data === null ? this.finish?.() : this.onBlock(data));
      this.context.createMediaStreamSource(this.stream).connect(this.node);
    } catch (error) {
      this.close();
      throw error;
    }
  }

  /** Release the microphone once its last samples have come. */
  async stop() {
    const last = new Promise((resolve) => (this.finish = resolve));
    this.node.port.postMessage("stop");
    await last;
    this.close();
  }

  /** Release the microphone; a pending `stop` returns. */
  close() {
    for (const track of this.stream?.getTracks() ?? []) track.stop();
    this.context?.close();
    this.context = null;
    this.finish?.();
  }
}

export class Recorder {
  /** `onLevel(level, seconds)` is called for every block, with a level between 0 and 1. */
  constructor(onLevel, onFull) {
    this.onLevel = onLevel;
    this.onFull = onFull;
    this.blocks = [];
    this.length = 0;
    this.capture = new Capture((block) => this.take(block));
  }

  start() {
    return this.capture.start();
  }

  take(block) {
    this.blocks.push(block);
    this.length += block.length;
    const elapsed = this.length / this.capture.rate;
    this.onLevel(levelOf(block), elapsed);
    if (elapsed >= MAX_SECONDS) this.onFull();
  }

  /** The recording as a WAV file, or null for an empty one. */
  async stop() {
    await this.capture.stop();
    if (this.length === 0) return null;
    return wavFile([toPcm16(await this.resampled())], RATE);
  }

  async resampled() {
    const { rate } = this.capture;
    const offline = new OfflineAudioContext(1, Math.ceil((this.length * RATE) / rate), RATE);
    const buffer = offline.createBuffer(1, this.length, rate);
    let at = 0;
    for (const block of this.blocks) {
      buffer.copyToChannel(block, 0, at);
      at += block.length;
    }
    const source = new AudioBufferSourceNode(offline, { buffer });
    source.connect(offline.destination);
    source.start();
    return (await offline.startRendering()).getChannelData(0);
  }

  close() {
    this.capture.close();
  }
}
