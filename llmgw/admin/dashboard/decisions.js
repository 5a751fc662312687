// Recent requests: where each went and why, or why it went nowhere.

import { keyed, make, text } from "/assets/dom.js";
import { clockTime, figure, seconds } from "/assets/format.js";

const KEPT = 256;
const SHOWN = 60;

const FIELDS = [
  ["id", "Request id"], ["at", "Arrived", (at) => new Date(at * 1000).toLocaleString()], ["key", "Key"],
  ["peer", "Client"], ["agent", "User agent"], ["method", "Method"], ["route", "Route"], ["model", "Model asked for"],
  ["target", "Model served"], ["streaming", "Streaming", () => "yes"], ["backend", "Node"], ["why", "Why there"],
  ["attempts", "Nodes asked"], ["waited_s", "Waited for a slot", seconds], ["overhead_s", "In the gateway's hands", seconds],
  ["ttft_s", "First token after", seconds], ["duration_s", "Whole", seconds], ["prompt_tokens", "Prompt tokens", figure],
  ["cached_tokens", "of these cached", figure], ["output_tokens", "Output tokens", figure], ["bytes", "Bytes sent", figure],
  ["status", "Status"], ["outcome", "Outcome"],
];

export class Decisions {
  // `names`: key ids to names. `explainLike(model)`: fill the explain box.
  constructor(page, explainLike) {
    this.page = page;
    this.lines = [];
    this.seen = 0;
    this.show = "all";
    this.seek = "";
    this.paused = false;
    this.names = {};
    this.explainLike = explainLike;
    for (const button of page.shows) button.addEventListener("click", () => this.choose(button));
    page.seek.addEventListener("input", () => {
      this.seek = page.seek.value.trim().toLowerCase();
      this.draw();
    });
    page.pause.addEventListener("click", () => this.pause());
    page.likeIt.addEventListener("click", () => {
      page.dialog.close();
      explainLike(this.opened.model);
    });
  }

  // Names of keys, by id. They may come after the requests that they belong to.
  know(names) {
    const before = this.names;
    this.names = names;
    if (Object.keys(names).some((id) => names[id] !== before[id])) this.draw();
  }

  clear() {
    this.lines = [];
    this.seen = 0;
  }

  add({ total, items }) {
    this.lines = [...items.map((line, index) => ({ ...line, number: total - items.length + index })).reverse(), ...this.lines].slice(0, KEPT);
    this.draw();
  }

  choose(button) {
    this.show = button.dataset.show;
    for (const each of this.page.shows) each.setAttribute("aria-pressed", String(each === button));
    this.draw();
  }

  pause() {
    this.paused = !this.paused;
    this.page.pause.setAttribute("aria-pressed", String(this.paused));
    text(this.page.pause, this.paused ? "Go on" : "Pause");
    this.draw();
  }

  matches(line) {
    if (this.show === "trouble" && line.outcome === "done") return false;
    if (this.show === "held" && !line.waited_s && line.outcome !== "model_loading") return false;
    if (!this.seek) return true;
    const words = [line.backend, line.model, line.target, line.key, this.names[line.key], line.id, line.why, line.outcome, line.peer];
    return words.some((word) => word && String(word).toLowerCase().includes(this.seek));
  }

  draw() {
    if (this.paused) return;
    const found = this.lines.filter((line) => this.matches(line)).slice(0, SHOWN);
    this.page.none.hidden = found.length > 0;
    text(this.page.none, this.lines.length ? "None of the recent requests is such a one." : "No requests yet.");
    keyed(this.page.body, found, (line) => `${line.number} ${this.names[line.key] ?? ""}`, (line) => this.row(line));
  }

  row(line) {
    const cell = (label, name, ...children) => make("td", { "data-label": label, class: name }, ...children);
    const open = make("button", { type: "button", class: "link", "aria-label": `Details of the request of ${clockTime(line.at)}`, onclick: () => this.open(line) }, clockTime(line.at));
    const names = [line.model ?? line.route, line.target ? make("small", {}, ` → ${line.target}`) : null].filter(Boolean);
    const reasons = [line.why ?? ""];
    if (line.attempts > 1) reasons.push(`${line.attempts} nodes asked`);
    if (line.waited_s) reasons.push(`waited ${seconds(line.waited_s)}`);
    const done = line.outcome === "done";
    return make(
      "tr",
      { "data-tone": done ? "good" : line.outcome === "client_gone" ? "idle" : line.status >= 500 || line.outcome === "cut" ? "bad" : "warn" },
      cell("Time", "", open),
      cell("Caller", "caller", line.key == null ? "–" : (this.names[line.key] ?? line.key)),
      cell("Model", "", ...names),
      cell("Node", "node", line.backend ?? "–"),
      cell("Why", "why", reasons.filter(Boolean).join(", ")),
      cell("First token", "number", seconds(line.ttft_s)),
      cell("Whole", "number", seconds(line.duration_s)),
      cell("Outcome", "outcome", make("span", { class: "glyph", "aria-hidden": "true" }), done ? "done" : `${line.status} ${line.outcome.replaceAll("_", " ")}`),
    );
  }

  open(line) {
    this.opened = line;
    const fields = FIELDS.filter(([name]) => line[name] != null && line[name] !== "" && line[name] !== false);
    this.page.fields.replaceChildren(
      ...fields.map(([name, label, say]) => {
        const value = name === "key" ? [this.names[line.key], line.key].filter(Boolean).join(" · ") : say ? say(line[name]) : line[name];
        return make("div", {}, make("dt", {}, label), make("dd", {}, String(value)));
      }),
    );
    this.page.likeIt.hidden = !line.model;
    this.page.dialog.showModal();
  }
}
