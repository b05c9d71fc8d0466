// The microphone's button: press to start, press again to attach the recording. A discarded recording is not attached.

import { $, announce } from "./dom.js";
import { Recorder, microphoneProblem } from "./recorder.js";

const QUIET = 0.02; // a level that is more than noise is above it

/** Sets the button up; `discard()` of the result drops the current recording. */
export function setUpMicrophone(attachments, notice) {
  let recorder = null;
  let busy = false;

  const show = (on) => {
    $("recording").hidden = !on;
    $("mic").setAttribute("aria-pressed", String(on));
    $("mic-name").textContent = on ? "Stop recording and attach it" : "Record with the microphone";
    announce(on ? "Recording" : "Recording ended");
  };

  const begin = async () => {
    const levels = [];
    const current = new Recorder(
      (level, elapsed) => {
        if (recorder !== current) return;
        levels.push(level);
        drawLevels($("level"), levels);
        $("recording").dataset.heard = String(levels.some((one) => one > QUIET));
        $("record-time").textContent = `${elapsed.toFixed(1)} s`;
      },
      () => recorder === current && toggle(),
    );
    recorder = current;
    try {
      await current.start();
      if (recorder === current) show(true);
      else current.close(); // discarded while the browser showed its prompt
    } catch (error) {
      if (recorder !== current) return;
      recorder = null;
      notice(microphoneProblem(error));
    }
  };

  const finish = async () => {
    const current = recorder;
    const wav = await current.stop();
    if (recorder !== current) return;
    recorder = null;
    show(false);
    if (wav === null) {
      notice("Nothing was recorded. Try again and speak for a moment.");
      return;
    }
    await attachments.add([new File([wav], "recording.wav", { type: "audio/wav" })]);
    $("prompt").focus();
  };

  const toggle = async () => {
    if (busy) return; // the browser still shows its prompt
    busy = true;
    notice();
    try {
      await (recorder === null ? begin() : finish());
    } finally {
      busy = false;
    }
  };
  $("mic").addEventListener("click", toggle);

  const discard = () => {
    if (recorder === null) return;
    recorder.close();
    recorder = null;
    show(false);
  };
  return { discard };
}

/** The latest levels as bars, the newest at the right end of a full canvas. */
export function drawLevels(canvas, levels) {
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.fillStyle = getComputedStyle(canvas).color;
  const shown = levels.slice(-canvas.width / 4);
  shown.forEach((level, i) => {
    const height = Math.max(2, level * canvas.height);
    pen.fillRect(i * 4, (canvas.height - height) / 2, 2, height);
  });
}
