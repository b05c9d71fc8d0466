// Queue, batches and memory of the service, polled: more often while a request runs.

import { ApiError, getJson } from "./api.js";
import { $, bytes, count, el } from "./dom.js";

const BUSY = 500;
const IDLE = 4000;

export class Gauges {
  /** `onState(reachable)` tells whether the service answered; `onLimits` what it allows. */
  constructor(onState, onLimits) {
    this.onState = onState;
    this.onLimits = onLimits;
    this.model = null;
    this.busy = false;
    this.meters = new Map();
    document.addEventListener("visibilitychange", () => this.wake());
  }

  watch(model) {
    this.model = model;
    this.meters.clear();
    $("gauges").replaceChildren();
    this.wake();
  }

  /** Poll now, and at the right interval from then on. */
  wake(busy = this.busy) {
    this.busy = busy;
    clearTimeout(this.timer);
    if (this.model !== null && !document.hidden) this.look();
  }

  async look() {
    try {
      const stats = await getJson("v1/stats");
      this.onLimits(stats.limits);
      this.draw(stats);
      this.onState(true);
    } catch (error) {
      if (error instanceof ApiError) return; // shown elsewhere; polling resumes when woken
      this.onState(false);
    }
    clearTimeout(this.timer);
    if (!document.hidden) this.timer = setTimeout(() => this.look(), this.busy ? BUSY : IDLE);
  }

  draw({ models, memory }) {
    const model = models[this.model.id];
    if (model === undefined) return;
    $("gauges-total").textContent = model.admitted === 1 ? "1 request" : `${count(model.admitted)} requests`;
    this.meter("queue", "In flight", model.inflight, model.max_inflight, `${model.inflight} of ${model.max_inflight}`);
    for (const [name, stage] of Object.entries(model.stages)) this.stage(name, stage);
    for (const replica of model.replicas) this.replica(replica, model.replicas);
    if (memory.process !== null) {
      this.meter("memory", "Memory", memory.process, memory.host, `${bytes(memory.process)} of ${bytes(memory.host)}`);
    }
    if (memory.device !== null) {
      this.meter("device", "GPU memory", memory.device, memory.device_total, `${bytes(memory.device)} of ${bytes(memory.device_total)}`);
    }
  }

  stage(name, { running, waiting, starved, extra }) {
    const now = [`${running} running`];
    if (waiting) now.push(`${waiting} waiting`);
    if (starved) now.push(`${starved} waiting for input`);
    if (extra.blocks) {
      const used = extra.blocks - extra.blocks_free;
      this.meter(`stage-${name}`, name, used, extra.blocks, `${now.join(", ")} · ${Math.round((used / extra.blocks) * 100)} % of its cache`);
    } else {
      this.meter(`stage-${name}`, name, running, Math.max(running + waiting, 1), now.join(", "));
    }
  }

  /** A process of a group of stages: its share of the group's requests. */
  replica({ group, number, state, running, requests, failures, restarts }, all) {
    const total = all.reduce((sum, other) => sum + (other.group === group ? other.running : 0), 0);
    const words = [{ up: `${running} running`, rebuilding: "restarting" }[state] ?? "down", `${count(requests)} in all`];
    if (failures) words.push(`${count(failures)} failures`, `${count(restarts)} restarts`);
    this.meter(`replica-${group}-${number}`, `${group} · process ${number}`, running, Math.max(total, 1), words.join(", "));
  }

  /** A bar with a name and its value in words; drawn once, then only moved. */
  meter(id, label, value, max, words) {
    let gauge = this.meters.get(id);
    if (gauge === undefined) {
      const fill = el("i");
      const text = el("span", { class: "number muted" });
      const bar = el("div", { class: "meter", role: "meter", "aria-label": label, "aria-valuemin": "0" }, fill);
      gauge = { fill, text, bar };
      this.meters.set(id, gauge);
      $("gauges").append(el("div", { class: "gauge", data: { gauge: id } }, el("span", { class: "gauge-name" }, label), text, bar));
    }
    const share = max > 0 ? Math.min(1, value / max) : 0;
    gauge.text.textContent = words;
    gauge.fill.style.width = `${value > 0 ? Math.max(share * 100, 1.5) : 0}%`;
    gauge.bar.classList.toggle("high", share > 0.85);
    gauge.bar.setAttribute("aria-valuenow", value);
    gauge.bar.setAttribute("aria-valuemax", max);
    gauge.bar.setAttribute("aria-valuetext", words);
  }
}
