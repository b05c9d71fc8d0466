// Runs beside the audio: hands the microphone's samples to the page, 128 at a time joined to blocks.

const BLOCK = 2048;

class Capture extends AudioWorkletProcessor {
  constructor() {
    super();
    this.block = new Float32Array(BLOCK);
    this.filled = 0;
    this.open = true;
    this.port.onmessage = () => {
      this.send();
      this.open = false;
      this.port.postMessage(null); // the last of it
    };
  }

  process([input]) {
    const samples = input[0];
    if (samples !== undefined) {
      if (this.filled + samples.length > BLOCK) this.send();
      this.block.set(samples, this.filled);
      this.filled += samples.length;
    }
    return this.open;
  }

  send() {
    if (this.filled > 0) this.port.postMessage(this.block.slice(0, this.filled));
    this.filled = 0;
  }
}

registerProcessor("capture", Capture);
