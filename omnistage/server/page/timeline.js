// The live timeline: one lane a stage, updated while the request runs. Times are seconds since the request arrived.

import { $, el, seconds, svg } from "./dom.js";

const LANE = 40;
const TOP = 4;
const BAR = 14;
const AXIS = 20;
const SPANS = [0.1, 0.2, 0.4, 0.8, 1.5, 3, 5, 8, 12, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200, 3600];
const STEPS = [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600];

export class Timeline {
  constructor() {
    this.trace = null;
    this.ticks = new Map(); // a stage's chunks: when each arrived
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    new ResizeObserver(() => this.draw()).observe($("timeline"));
  }

  /** A request starts: its lanes are not known yet. */
  begin() {
    this.trace = null;
    this.ticks = new Map();
    $("timeline").replaceChildren();
    $("timeline-total").textContent = "";
    $("timeline-note").textContent = "Waiting for the request to begin.";
    $("timeline-table").hidden = true;
  }

  /** Take a snapshot of a running request. */
  update(trace) {
    this.trace = trace;
    this.received = performance.now();
    for (const stage of Object.values(trace.stages)) {
      const seen = this.ticks.get(stage.stage) ?? [];
      if (stage.last_chunk !== null && stage.last_chunk !== seen.at(-1)) seen.push(stage.last_chunk);
      this.ticks.set(stage.stage, seen);
    }
    this.draw();
    this.table();
    if (trace.finished === null && !this.running) this.animate();
  }

  /** Show the timeline of an earlier request. */
  show({ trace, ticks }) {
    this.ticks = ticks;
    this.update(trace);
  }

  get snapshot() {
    return this.trace && { trace: this.trace, ticks: this.ticks };
  }

  /** Called when nothing more will come, as after a refusal. */
  end(why = "") {
    if (this.trace === null) $("timeline-note").textContent = why || "This request did not run.";
    else if (this.trace.finished === null) this.update({ ...this.trace, finished: this.now() });
  }

  /** What runs has no timeline, for this reason. */
  without(why) {
    this.begin();
    this.end(why);
  }

  animate() {
    this.running = this.trace !== null && this.trace.finished === null;
    if (!this.running) return;
    if (!this.calm.matches) this.draw();
    requestAnimationFrame(() => this.animate());
  }

  /** The request's clock, which goes on between two snapshots. */
  now() {
    if (this.trace.finished !== null) return this.trace.finished;
    return this.trace.now + (this.calm.matches ? 0 : (performance.now() - this.received) / 1000);
  }

  draw() {
    if (this.trace === null) return;
    const place = $("timeline");
    const width = Math.max(place.clientWidth, 200);
    const stages = Object.values(this.trace.stages);
    const now = this.now();
    const done = this.trace.finished !== null;
    const span = done ? Math.max(now, 0.001) : (SPANS.find((size) => size >= now * 1.05) ?? now * 1.2);
    const x = (time) => (Math.min(time, span) / span) * (width - 2) + 1;
    const height = TOP + stages.length * LANE + AXIS;
    const lanes = stages.map((stage, index) => this.lane(stage, index, x, now, width));
    const lines = [...axis(span, x, height), ...lanes];
    if (!done) lines.push(svg("line", { class: "cursor", x1: x(now), x2: x(now), y1: 0, y2: height - AXIS }));
    const attributes = { role: "img", "aria-label": this.summary(), width, height, viewBox: `0 0 ${width} ${height}` };
    place.replaceChildren(svg("svg", attributes, ...lines));
    $("timeline-total").textContent = seconds(now);
    $("timeline-note").textContent = done ? this.overlap() : "Running";
  }

  lane(stage, index, x, now, width) {
    const y = TOP + index * LANE;
    const at = y + 17;
    const end = ended(stage, this.trace) ?? now;
    const lane = svg("g", { class: `lane lane-${index % 6}`, "data-stage": stage.stage });
    const name = svg("text", { class: "name", x: 1, y: y + 11 }, stage.stage);
    const state = svg("text", { class: "state", x: width - 1, y: y + 11, "text-anchor": "end" }, stateOf(stage, this.trace, now));
    lane.append(name, state, svg("rect", { class: "track", x: 0, y: at, width, height: BAR, rx: 4 }));
    const bar = (kind, from, to) => {
      const title = svg("title", {}, `${stage.stage} ${kind} ${seconds(from)} to ${seconds(to)}`);
      const shape = { class: kind, x: x(from), y: at, width: Math.max(x(to) - x(from), 2), height: BAR, rx: 4 };
      lane.append(svg("rect", shape, title));
    };
    if (stage.submitted !== null) bar("queued", stage.submitted, stage.started ?? end);
    if (stage.started !== null) bar("run", stage.started, end);
    const seen = this.ticks.get(stage.stage) ?? [];
    if (seen.length > 1) {
      const path = seen.slice(0, -1).map((time) => `M${x(time).toFixed(1)} ${at + 3}v${BAR - 6}`).join("");
      lane.append(svg("path", { class: "ticks", d: path }));
    }
    if (stage.first_chunk !== null) lane.append(mark("first", Math.min(Math.max(x(stage.first_chunk), 6), width - 6), at));
    if (stage.finish !== null && stage.last_chunk !== null) lane.append(mark("last", x(stage.last_chunk), at));
    return lane;
  }

  /** The lanes as text, for screen readers. */
  summary() {
    const lanes = Object.values(this.trace.stages).map((stage) => {
      if (stage.started === null) return `${stage.stage} ${stage.submitted === null ? "has not begun" : "is queued"}`;
      const end = ended(stage, this.trace);
      return `${stage.stage} from ${seconds(stage.started)} ${end === null ? "until now" : `to ${seconds(end)}`}`;
    });
    return `Stages of the request: ${lanes.join("; ")}.`;
  }

  /** A stage that started before the one before it ended. */
  overlap() {
    const stages = Object.values(this.trace.stages).filter(({ started }) => started !== null);
    for (let i = stages.length - 1; i > 0; i -= 1) {
      const saved = ended(stages[i - 1], this.trace) - stages[i].started;
      if (saved > 0) return `${stages[i].stage} began ${seconds(saved)} before ${stages[i - 1].stage} had ended.`;
    }
    return stages.length === 0 ? "Ended before a stage ran." : "Done.";
  }

  table() {
    const time = (value) => (value === null ? "–" : seconds(value));
    const titles = ["Stage", "Queued", "Started", "First", "Last", "Chunks", "Tokens", "End"];
    const rows = Object.values(this.trace.stages).map((stage) => {
      const times = [stage.submitted, stage.started, stage.first_chunk, stage.last_chunk].map(time);
      const values = [...times, stage.chunks, stage.tokens, stage.finish ?? "–"].map((value) => el("td", {}, String(value)));
      return el("tr", {}, el("th", { scope: "row" }, stage.stage), ...values);
    });
    const head = el("thead", {}, el("tr", {}, ...titles.map((title) => el("th", { scope: "col" }, title))));
    const caption = el("caption", { class: "unseen" }, "Times of the request’s stages since it arrived");
    const table = el("table", {}, caption, head, el("tbody", {}, ...rows));
    $("timeline-table").querySelector("div").replaceChildren(table);
    $("timeline-table").hidden = false;
  }
}

/** When a stage ended; null while it runs. One that was cut short ended with its request. */
function ended(stage, trace) {
  if (stage.finish !== null && stage.last_chunk !== null) return stage.last_chunk;
  return trace.finished;
}

function stateOf(stage, trace, now) {
  if (stage.submitted === null) return trace.finished === null ? "" : "not run";
  if (stage.started === null) return trace.finished === null ? "queued" : "cut short";
  return seconds((ended(stage, trace) ?? now) - stage.started);
}

function mark(kind, at, y) {
  if (kind === "last") return svg("rect", { class: "last", x: at - 3, y: y - 2, width: 3, height: BAR + 4, rx: 1.5 });
  return svg("circle", { class: "first", cx: at, cy: y + BAR / 2, r: 4 });
}

function axis(span, x, height) {
  const step = STEPS.find((size) => span / size <= 5) ?? span / 4;
  const marks = [];
  for (let time = 0; time <= span * 1.0001; time += step) {
    const at = x(time);
    marks.push(svg("line", { class: "grid", x1: at, x2: at, y1: 0, y2: height - AXIS + 4 }));
    const anchor = time === 0 ? "start" : at > x(span) - 24 ? "end" : "middle";
    const label = time === 0 ? "0" : seconds(time).replace(/\.0+ /, " ").replace(/(\.\d)0 /, "$1 ");
    marks.push(svg("text", { class: "time", x: at, y: height - 4, "text-anchor": anchor }, label));
  }
  return marks;
}
