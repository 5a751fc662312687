// What an operator should see first: sentences, worst first. Nothing here touches the page.

import { figure, percent, plural, seconds } from "/assets/format.js";

export const SLOW_TIMES = 3; // as long as the middle of the fleet
const SLOW_LEAST_S = 0.2;
const RECENT_S = 60;
// Refusals that say something about the fleet; the rest say something about the caller.
const OURS = new Set(["overloaded", "no_backend", "model_loading", "upstream_error", "upstream_timeout", "internal_error"]);

// One word and a tone for a backend's state.
export function stateOf(backend) {
  if (backend.removed) return { word: "leaving", tone: "idle" };
  if (backend.draining) return { word: "draining", tone: "idle" };
  if (backend.standing === "down") return { word: "down", tone: "bad" };
  if (backend.loading) return { word: "loading", tone: "warn" };
  if (backend.standing === "busy") return { word: "asked for a pause", tone: "warn" };
  if (backend.standing === "ejected" || backend.breaker === "open") return { word: "taken out", tone: "bad" };
  if (backend.breaker === "half_open") return { word: "on trial", tone: "warn" };
  if (backend.warmth < 0.999) return { word: `warming up ${percent(backend.warmth)}`, tone: "warn" };
  if (!backend.available) return { word: backend.standing || "not available", tone: "bad" };
  if (backend.cap != null && backend.in_flight >= backend.cap) return { word: "full", tone: "good" };
  return { word: "ready", tone: "good" };
}

function listed(counts) {
  return counts.map(([code, count]) => `${figure(count)} ${code.replaceAll("_", " ")}`).join(", ");
}

export function median(values) {
  const sorted = values.filter((value) => value != null).sort((one, other) => one - other);
  if (!sorted.length) return null;
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

// How many times as long as the other nodes of its models this one takes; null if that cannot be told.
export function slowness(backend, backends) {
  if (backend.ttft_s == null) return null;
  const models = new Set(backend.models ?? []);
  const others = backends.filter(
    (other) =>
      other.id !== backend.id &&
      (backend.models == null || other.models == null || other.models.some((model) => models.has(model))),
  );
  const usual = median(others.map((other) => other.ttft_s));
  return usual ? backend.ttft_s / usual : null;
}

export function isSlow(backend, backends) {
  const times = slowness(backend, backends);
  return times != null && times >= SLOW_TIMES && backend.ttft_s >= SLOW_LEAST_S;
}

// What is wrong with the gateway itself; a version that does not tell of something is not blamed for it.
function* gatewayFaults(state) {
  const { overload, store, discovery, workers } = state;
  if (overload && overload.level !== "calm") {
    yield `The gateway sheds load to stay alive (${overload.level}): its event loop is late, or its memory near the limit.`;
  }
  if (store && !store.up) {
    yield `The shared store is out of reach${store.why ? `: ${store.why.replace(/[.\s]+$/, "")}` : ""}. Each gateway counts limits by itself.`;
  }
  for (const source of discovery ?? []) {
    if (!source.connected) {
      yield `The discovery ${source.name} has lost touch${source.error ? `: ${source.error.replace(/[.\s]+$/, "")}` : ""}. The backends it told of are kept.`;
    }
  }
  for (const worker of workers ?? []) {
    if (worker.state === "given up") yield `Worker ${worker.number} is given up after too many ends; the log says how. A reload starts it again.`;
  }
}

export function findings(state, past) {
  const found = [];
  const add = (tone, words, node = null) => found.push({ tone, words, node });
  const nodes = state.backends;
  const ready = nodes.filter((node) => node.available);
  if (state.draining) add("bad", "This gateway is draining: it takes no new connections soon, and then ends.");
  if (!nodes.length) add("warn", "There are no nodes: add [[backends]] to the configuration and reload.");
  else if (!ready.length) add("bad", "No node takes requests.");
  for (const node of nodes) {
    const { word, tone } = stateOf(node);
    if (tone === "bad") {
      const streak = node.failure_streak ? `, ${plural(node.failure_streak, "failure")} in a row` : "";
      add("bad", `${node.id} is ${word}${streak}${node.detail ? `: ${node.detail.replace(/[.\s]+$/, "")}` : ""}.`, node.id);
    } else if (isSlow(node, nodes)) {
      const times = Math.round(slowness(node, nodes));
      add("warn", `${node.id} is slow: ${seconds(node.ttft_s)} to the first token, ${times} times as long as the others.`, node.id);
    } else if (word === "loading") add("warn", `${node.id} is loading its model.`, node.id);
    const doubt = /^ok, but (.+)$/.exec(node.detail ?? "");
    if (doubt && tone !== "bad") add("warn", `${node.id} answers, but ${doubt[1]}.`, node.id);
    if (node.deferred > 0) {
      add("warn", `${node.id} has ${plural(node.deferred, "request")} queued inside it: somebody else uses it, or its cap is above its slots.`, node.id);
    }
  }
  for (const words of gatewayFaults(state)) add("warn", words);
  const taking = ready.filter((node) => node.cap != null);
  if (taking.length && taking.every((node) => node.in_flight >= node.cap)) {
    add("warn", "Every slot is taken.");
  }
  for (const [model, load] of Object.entries(state.loading?.under_way ?? {})) {
    const held = state.holding?.[model];
    const where = load.backend ? ` on ${load.backend}` : "";
    const left = load.for_s != null && load.expected_s != null ? Math.max(0, load.expected_s - load.for_s) : null;
    const soon = left == null ? "" : `, about ${seconds(left)} left`;
    add("warn", `${model} is being loaded${where}${soon}${held ? `; ${plural(held, "request is", "requests are")} held for it` : ""}.`);
  }
  if (state.waiting) add("warn", `${plural(state.waiting, "request waits", "requests wait")} for a slot.`);
  const refused = past.counts((sample) => sample.rejected, RECENT_S);
  const ours = refused.filter(([code]) => OURS.has(code));
  if (ours.length) add("warn", `Refused in the last minute: ${listed(ours)}.`);
  const theirs = refused.filter(([code]) => !OURS.has(code));
  if (theirs.length) add("idle", `Callers' own errors in the last minute: ${listed(theirs)}.`);
  const errors = past.sum((sample) => sample.errors, RECENT_S);
  if (errors) add("bad", `${plural(errors, "answer")} with a 5xx in the last minute.`);
  if (!found.some(({ tone }) => tone !== "idle")) {
    add("good", `Nothing stands out. ${nodes.length === 1 ? "The one node takes" : `All ${nodes.length} nodes take`} requests.`);
  }
  const order = { bad: 0, warn: 1, good: 2, idle: 3 };
  return found.sort((one, other) => order[one.tone] - order[other.tone]);
}
