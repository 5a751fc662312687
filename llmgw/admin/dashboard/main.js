// What comes over the link is kept here and shown by the parts.

import { Decisions } from "/assets/decisions.js";
import { keyed, make, text } from "/assets/dom.js";
import { Explain } from "/assets/explain.js";
import { findings } from "/assets/findings.js";
import { FleetTable } from "/assets/fleet.js";
import { figure, seconds, since } from "/assets/format.js";
import { Link } from "/assets/link.js";
import { Past } from "/assets/past.js";
import { showLimits, showPeers, showRefused } from "/assets/side.js";
import { drawSpark, spark } from "/assets/spark.js";
import { themeButton } from "/assets/theme.js";

const get = (id) => document.getElementById(id);
const past = new Past();
let state = null;
let startedAt = null;

themeButton(get("theme"));
const fleet = new FleetTable(get("fleet"), get("fleet-note"), drain);
const explain = new Explain({ form: get("explain"), body: get("body"), model: get("model"), result: get("explained") });
const decisions = new Decisions(
  {
    body: get("decisions").tBodies[0],
    none: get("decisions-none"),
    shows: document.querySelectorAll("[data-show]"),
    seek: get("seek"),
    pause: get("pause"),
    dialog: get("detail"),
    fields: get("detail-fields"),
    likeIt: get("detail-explain"),
  },
  (model) => explain.like(model),
);

function draw() {
  if (!state) return;
  const room = state.backends.reduce((sum, node) => sum + (node.available ? node.cap : 0), 0);
  const refusals = (sample) => Object.values(sample.rejected).reduce((sum, count) => sum + count, 0);
  text(get("about"), `router ${state.router} · version ${state.version}${startedAt ? ` · up ${since(Date.now() / 1000 - startedAt)}` : ""}`);
  showFindings(findings(state, past));
  showFigures([
    ["Requests/s", figure(past.rate((sample) => sample.requests, 15)), past.series((sample) => sample.requests / sample.every_s), figure],
    ["In flight", figure(state.in_flight), past.series((sample) => sample.in_flight), figure, `of ${figure(room)} slots`],
    ["First token", seconds(past.ttft(null, 60)), past.series(meanTtft), seconds, "mean, 1 min"],
    ["Output tokens/s", figure(past.rate((sample) => sample.output_tokens, 15)), past.series((sample) => sample.output_tokens / sample.every_s), figure],
    ["Waiting", figure(state.waiting), past.series((sample) => sample.waiting), figure, "for a slot"],
    ["Refused", figure(past.sum(refusals)), past.series(refusals), figure, "in 10 min"],
  ]);
  fleet.show(state, past);
  explain.showModels([...new Set([...Object.keys(state.models ?? {}), ...Object.keys(state.aliases ?? {})])].sort());
  showRefused(get("refused"), state);
  showLimits(get("limits"), state);
  showPeers(get("peers-card"), get("peers"), state);
}

function meanTtft(sample) {
  const own = Object.values(sample.backends).filter((each) => each.ttft_s != null);
  const count = own.reduce((sum, each) => sum + each.requests, 0);
  return count ? own.reduce((sum, each) => sum + each.ttft_s * each.requests, 0) / count : null;
}

function showFindings(found) {
  keyed(
    get("findings"),
    found,
    ({ tone, node, words }) => `${tone} ${node ?? words}`,
    ({ tone, node, words }) =>
      make("li", { "data-tone": tone }, make("span", { class: "glyph", "aria-hidden": "true" }), node ? make("a", { href: `#node-${node}` }, words) : make("span", {}, words)),
    (item, { words }) => text(item.lastElementChild, words),
  );
}

function showFigures(rows) {
  keyed(
    get("figures"),
    rows,
    ([name]) => name,
    ([name]) => make("div", {}, make("dt", {}, name), make("dd", {}, make("b"), make("small")), make("dd", { class: "line" }, spark(`${name} lately`))),
    (box, [, value, series, say, small]) => {
      text(box.children[1].firstElementChild, value);
      text(box.children[1].lastElementChild, small ?? "");
      drawSpark(box.querySelector("svg"), series, Math.max(1e-9, ...series.map((each) => each ?? 0)), say);
    },
  );
}

let drawing = null;
function soon() {
  drawing ??= requestAnimationFrame(() => {
    drawing = null;
    draw();
  });
}

new Link({
  opened() {
    decisions.clear();
    past.clear();
  },
  state(next) {
    state = next;
    startedAt = next.at == null ? null : next.at - next.uptime_s;
    decisions.know(next.key_names ?? {});
    soon();
  },
  decisions: (news) => decisions.add(news),
  history({ items }) {
    past.add(items);
    soon();
  },
  status(name, silentMs) {
    document.body.dataset.link = name;
    const silent = since(silentMs / 1000);
    text(get("link-text"), name === "stale" ? `stale: nothing heard for ${silent}` : name);
    document.title = name === "stale" ? "(stale) llmgw" : "llmgw";
  },
});

// --- levers ---

async function move(path, done, method = "POST") {
  try {
    const answer = await fetch(path, { method });
    const said = await answer.json();
    toast(answer.ok ? done(said) : `${answer.status}: ${said.error?.message ?? "refused"}`);
    return answer.ok;
  } catch {
    toast("The gateway does not answer.");
    return false;
  }
}

function drain(id, on) {
  if (on && !confirm(`Send no new requests to ${id}? Those at work run on.`)) return;
  move(`/api/backends/${encodeURIComponent(id)}/${on ? "drain" : "undrain"}`, () => (on ? `${id} drains.` : `${id} takes requests again.`));
}

get("reload").addEventListener("click", () => {
  if (!confirm("Read the configuration file again? It is checked as a whole first.")) return;
  move("/api/reload", (said) => (said.needs_restart?.length ? `Reloaded; a restart is needed for ${said.needs_restart.join(", ")}.` : "Reloaded."));
});

get("leave").addEventListener("click", async () => {
  if (await move("/api/session", () => "Signed out.", "DELETE")) location.reload();
});

fetch("/api/session").then(async (answer) => {
  get("leave").hidden = !(answer.ok && (await answer.json()).token);
});

let toastTimer;
function toast(words) {
  const box = get("toast");
  text(box, words);
  box.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => (box.hidden = true), 8000);
}

// --- keys ---

const KEYS = {
  f: () => get("fleet-title").focus(),
  d: () => document.querySelector("#decisions").closest(".scroll").focus(),
  e: () => get("body").focus(),
  p: () => decisions.pause(),
  "/": () => get("seek").focus(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog")) return;
  const action = KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

setInterval(draw, 5000); // the uptime
