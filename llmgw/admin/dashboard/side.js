// Refusals, callers with their limits, and the processes that share the work.

import { keyed, make, text, width } from "/assets/dom.js";
import { figure, plural, since } from "/assets/format.js";

const MEANING = {
  overloaded: "every node of the model was at its cap",
  no_backend: "the model is known, and no node of it could be reached",
  model_loading: "the model was being loaded",
  rate_limit_exceeded: "a limit of the key or of all was reached",
  model_not_found: "no node has such a model",
  model_not_allowed: "the key may not use the model",
  invalid_api_key: "no key, or not a good one",
  context_length_exceeded: "longer than the largest window",
  upstream_error: "a node broke before the first byte, and no other could be asked",
  upstream_timeout: "a node did not answer in time",
  invalid_request: "the body could not be understood",
  not_found: "no such path",
};

export function showRefused(box, state) {
  const reasons = Object.entries(state.rejected ?? {}).sort((one, other) => other[1] - one[1]);
  const extra = [
    ["second tries elsewhere", state.retries],
    ["clients that left early", state.client_aborts],
  ].filter(([, count]) => count);
  if (!reasons.length && !extra.length) return nothing(box, "Nothing was refused.");
  list(box, "counts", [...reasons.map(([code, count]) => [code.replaceAll("_", " "), count, MEANING[code] ?? ""]), ...extra.map(([name, count]) => [name, count, ""])]);
}

export function showLimits(box, state) {
  const names = state.key_names ?? {};
  const busy = state.in_flight_by_key ?? {};
  const called = (key) => (key == null ? "all together" : names[key] ? `${names[key]} · ${key}` : key);
  const used = state.limits_used ?? [];
  const keys = new Set([...used.map((each) => each.key), ...Object.keys(busy)]);
  if (!keys.size) return nothing(box, state.limits?.length ? "Nobody has called of late." : "No limits are set, and nobody is at work.");
  const rows = [...keys].map((key) => ({ key, name: called(key), busy: busy[key] ?? null, limits: used.filter((each) => each.key === key) }));
  single(box, "ul", "callers", (holder) =>
    keyed(
      holder,
      rows.sort((one, other) => (other.busy ?? 0) - (one.busy ?? 0) || one.name.localeCompare(other.name)),
      (row) => row.name,
      () => make("li", {}, make("b"), make("span", { class: "note" }), make("div")),
      (item, row) => {
        const [name, at, limits] = item.children;
        text(name, row.name);
        text(at, row.busy ? `${row.busy} in flight` : "");
        const bars = row.limits.flatMap((limit) => [
          ...["requests", "tokens"].filter((unit) => limit[unit]).map((unit) => ({ label: `${limit.policy}: ${figure(Math.max(0, limit[unit].left))} of ${figure(limit[unit].limit)} ${unit} left`, share: limit[unit].left / limit[unit].limit })),
          ...(limit.concurrent ? [{ label: `${limit.policy}: ${limit.running} of ${limit.concurrent} at once`, share: 1 - limit.running / limit.concurrent }] : []),
        ]);
        keyed(
          limits,
          bars.map((bar, index) => ({ ...bar, index })),
          (bar) => bar.index,
          () => make("div", { class: "limit" }, make("span", { class: "track" }, make("span", { class: "fill" })), make("span")),
          (element, bar) => {
            width(element.firstElementChild.firstElementChild, bar.share);
            element.dataset.tone = bar.share <= 0.1 ? "bad" : bar.share <= 0.3 ? "warn" : "good";
            text(element.lastElementChild, bar.label);
          },
        );
      },
    ),
  );
}

// Only there when the state tells of more than this one process.
export function showPeers(card, box, state) {
  const rows = (state.workers ?? []).map((worker) => {
    const facts = [`pid ${worker.pid ?? "none"}`, worker.why, `${plural(worker.in_flight, "request")} in flight`];
    if (worker.uptime_s != null) facts.push(`up ${since(worker.uptime_s)}`);
    if (worker.restarts) facts.push(plural(worker.restarts, "restart"));
    return [`worker ${worker.number}: ${worker.state}`, "", facts.filter(Boolean).join(", ")];
  });
  const { peers, store } = state;
  if (peers) {
    const shares = Object.entries(peers.shares ?? {}).map(([node, share]) => `${node} ${share}`).sort();
    const heard = peers.heard_s_ago == null ? "not heard yet" : `heard ${since(peers.heard_s_ago)} ago`;
    rows.push(["others that keep to the caps too", peers.others, [heard, shares.length ? `our part: ${shares.join(", ")}` : ""].filter(Boolean).join("; ")]);
  }
  if (store) rows.push([`store: ${store.up ? "in reach" : "out of reach"}`, "", [store.place, store.why].filter(Boolean).join(", ")]);
  card.hidden = !rows.length;
  list(box, "counts", rows);
}

function list(box, name, rows) {
  single(box, "dl", name, (holder) =>
    keyed(
      holder,
      rows,
      ([label]) => label,
      ([label]) => make("div", {}, make("dt", {}, label), make("dd"), make("dd", { class: "note" })),
      (pair, [, count, words]) => {
        text(pair.children[1], count === "" ? "" : figure(count));
        text(pair.children[2], words);
      },
    ),
  );
}

function single(box, tag, name, update) {
  let holder = box.firstElementChild;
  if (!holder?.classList.contains(name)) {
    holder = make(tag, { class: name });
    box.replaceChildren(holder);
  }
  update(holder);
}

function nothing(box, words) {
  single(box, "p", "none", (holder) => text(holder, words));
}
