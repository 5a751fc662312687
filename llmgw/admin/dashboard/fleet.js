// The fleet: a row for each node, made once and kept.

import { attribute, keyed, make, text, width } from "/assets/dom.js";
import { isSlow, slowness, stateOf } from "/assets/findings.js";
import { figure, percent, seconds } from "/assets/format.js";
import { drawSpark, spark } from "/assets/spark.js";

const MOST_PIPS = 16;
const MOST_MODELS = 3;
const BREAKER = { closed: "closed", slow_start: "closed, slow start", half_open: "half open", open: "open" };

export class FleetTable {
  // `drain(id, on)`: the lever.
  constructor(table, note, drain) {
    this.table = table;
    this.note = note;
    this.drain = drain;
  }

  show(state, past) {
    const nodes = state.backends;
    const shares = past.shares();
    const samples = past.samples.flatMap((sample) => Object.values(sample.backends).map((own) => own.ttft_s ?? 0));
    const top = Math.max(0.05, ...samples);
    const ready = nodes.filter((node) => node.available).length;
    text(this.note, nodes.length ? `${ready} of ${nodes.length} take requests` : "");
    keyed(
      this.table,
      [null, ...nodes],
      (node) => (node ? node.id : ""),
      (node) => (node ? new Row(node, this.drain).body : this.table.tHead),
      (body, node) => node && body.row.show(node, nodes, past, shares, top),
    );
  }
}

class Row {
  constructor(node, drain) {
    const cell = (label, ...children) => make("td", { "data-label": label }, ...children);
    const part = (tag, name) => (this[name] = make(tag, { class: name }));
    const details = `details-${node.id}`;
    this.opener = make("button", {
      type: "button",
      class: "quiet opener",
      "aria-expanded": "false",
      "aria-controls": details,
      "aria-label": `Details of ${node.id}`,
      onclick: () => this.toggle(),
    });
    this.spark = spark(`Time to first token of ${node.id}`);
    this.glyph = make("span", { class: "glyph", "aria-hidden": "true" });
    this.state = make("span", { class: "word" });
    this.share = make("span", { class: "fill" });
    this.lever = make("button", {
      type: "button",
      onclick: () => drain(this.id, !this.draining),
    });
    this.fields = make("dl", { class: "fields" });
    this.main = make(
      "tr",
      { id: `node-${node.id}`, tabindex: "-1" },
      make("th", { scope: "row" }, make("span", { class: "name" }, node.id), part("span", "place")),
      cell("State", make("span", { class: "pill" }, this.glyph, this.state), part("span", "breaker")),
      cell("Slots in use", part("span", "pips"), part("span", "slots")),
      cell("First token", make("span", { class: "ttft" }, this.spark, part("b", "first")), part("span", "times")),
      cell("Tokens/s", part("b", "rate"), part("span", "prefill")),
      cell("Score", part("span", "score")),
      cell("Share", make("span", { class: "track" }, this.share), part("span", "portion")),
      cell("Models", part("span", "models")),
      cell("", this.opener),
    );
    for (const index of [4, 5]) this.main.cells[index].classList.add("number");
    this.more = make("tr", { class: "more", id: details, hidden: true }, make("td", { colspan: "9" }, this.fields, make("p", {}, this.lever)));
    this.body = make("tbody", {}, this.main, this.more);
    this.body.row = this;
  }

  toggle() {
    this.more.hidden = !this.more.hidden;
    this.opener.setAttribute("aria-expanded", String(!this.more.hidden));
  }

  show(node, nodes, past, shares, top) {
    this.id = node.id;
    this.draining = node.draining;
    const { word, tone } = stateOf(node);
    const slow = isSlow(node, nodes);
    attribute(this.body, "data-tone", tone);
    attribute(this.body, "data-slow", slow);
    text(this.state, word);
    text(this.breaker, `breaker ${BREAKER[node.breaker] ?? node.breaker}`);
    text(this.place, [address(node.url), node.kind].filter(Boolean).join(" · "));
    this.showSlots(node);
    drawSpark(this.spark, past.series((sample) => sample.backends[node.id]?.ttft_s), top);
    text(this.first, seconds(node.ttft_s));
    const times = slowness(node, nodes);
    text(this.times, times == null ? "" : slow ? `slow: ${ratio(times)} the others` : `${ratio(times)} the others`);
    text(this.rate, figure(node.token_rate));
    text(this.prefill, node.prefill_rate == null ? "" : `reads ${figure(node.prefill_rate)}/s`);
    text(this.score, node.score == null ? "–" : figure(node.score, 2));
    const share = shares ? (shares.get(node.id) ?? 0) : null;
    width(this.share, share);
    text(this.portion, share == null ? "no traffic" : percent(share));
    const models = node.models ?? [];
    const rest = models.length - MOST_MODELS;
    text(this.models, node.models == null ? "not told" : models.slice(0, MOST_MODELS).join(", ") + (rest > 0 ? ` and ${rest} more` : ""));
    attribute(this.models, "title", models.join("\n"));
    this.showMore(node);
  }

  showSlots(node) {
    const { cap, in_flight: used } = node;
    const few = cap != null && cap <= MOST_PIPS;
    const wanted = few ? Math.max(cap, used) : 1;
    if (this.pips.childElementCount !== wanted || this.few !== few) {
      this.few = few;
      this.pips.replaceChildren(
        ...(few
          ? Array.from({ length: wanted }, () => make("i", { class: "pip" }))
          : [make("i", { class: "track" }, make("i", { class: "fill" }))]),
      );
    }
    if (few) [...this.pips.children].forEach((pip, index) => pip.classList.toggle("on", index < used));
    else width(this.pips.firstElementChild.firstElementChild, cap ? used / cap : 0);
    const extra = [];
    if (node.deferred) extra.push(`${node.deferred} queued inside`);
    text(this.slots, [`${used} of ${cap ?? "?"}`, ...extra].join(", "));
  }

  showMore(node) {
    text(this.lever, node.draining ? `Send requests to ${node.id} again` : `Drain ${node.id}: no new requests`);
    const fields = [
      ["In words", node.detail],
      ["Weight", figure(node.weight)],
      ["Warmth", percent(node.warmth)],
      ["Context of a slot", node.context_length && `${figure(node.context_length)} tokens`],
      ["Slots by its own word", node.slots],
      ["Slots at work by its own word", node.busy_slots],
      ["KV cache in use", node.kv_use == null ? null : percent(node.kv_use)],
      ["GPU in use", node.gpu_use == null ? null : percent(node.gpu_use)],
      ["Failures in a row", node.failure_streak],
      ["Answered since the start", `${figure(node.requests ?? 0)}, ${figure(node.errors ?? 0)} with a 5xx`],
      ["Connections", node.connects == null ? null : `${node.idle_connections} idle, ${node.connects} made`],
      ["Breakers", Object.entries(node.breakers ?? {}).map(([model, word]) => `${model || "all"}: ${word.replace("_", " ")}`).join(", ")],
      ["Labels", Object.entries(node.labels ?? {}).map(([name, value]) => `${name}=${value}`).join(", ")],
      ["Models", (node.models ?? []).join(", ")],
    ].filter(([, value]) => value != null && value !== "");
    keyed(
      this.fields,
      fields,
      ([name]) => name,
      ([name]) => make("div", {}, make("dt", {}, name), make("dd")),
      (pair, [, value]) => text(pair.lastElementChild, value),
    );
  }
}

function ratio(times) {
  return `${times >= 10 ? Math.round(times) : times.toFixed(1)}×`;
}

function address(url) {
  try {
    const { protocol, host, pathname } = new URL(url);
    return (protocol === "https:" ? "https://" : "") + host + (pathname === "/" ? "" : pathname);
  } catch {
    return url;
  }
}
