// The service's state: waiting until it is ready, and its models.

import { ApiError, readiness } from "./api.js";
import { $ } from "./dom.js";
import { loadModels } from "./models.js";

const RETRY = 1000; // milliseconds between two looks at a service that is not ready
const WORDS = { loading: "Models are loading", draining: "Shutting down", offline: "No connection" };

export class Connection {
  /** `found(models)` is called when the service is ready. */
  constructor(found) {
    this.found = found;
    this.connecting = false;
  }

  show(name, text) {
    if ($("status").dataset.state === name && $("status-text").textContent === text) return;
    $("status").dataset.state = name;
    $("status-text").textContent = text;
  }

  /** Whether the service answers; where it does not, wait until it does. */
  seen(reachable) {
    if (reachable) this.show("ready", "Ready");
    else this.connect();
  }

  async connect() {
    if (this.connecting) return;
    this.connecting = true;
    try {
      for (let now = await readiness(); now !== "ready"; now = await readiness()) {
        this.show(now === "offline" ? "bad" : "wait", WORDS[now] ?? now);
        await new Promise((resolve) => setTimeout(resolve, RETRY));
      }
      const models = await loadModels();
      this.show("ready", "Ready");
      this.found(models);
    } catch (error) {
      this.show("bad", error instanceof ApiError && error.status === 401 ? "API key required" : "No connection");
      if (!(error instanceof ApiError)) setTimeout(() => this.connect(), RETRY);
    } finally {
      this.connecting = false;
    }
  }
}
