// A line of the last samples. Gaps stay gaps; a lone value is a dot.

import { make } from "/assets/dom.js";
import { seconds } from "/assets/format.js";

const WIDTH = 120;
const HEIGHT = 28;
const EDGE = 2.5;
const LEAST = 24; // samples that fill the width; two minutes

export function spark(label) {
  return make("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    class: "spark",
    role: "img",
    "aria-label": label,
    preserveAspectRatio: "none",
  });
}

// `shown`: oldest first, null where there was nothing; `top`: the value at the upper edge,
// shared by lines that are to be compared.
export function drawSpark(svg, shown, top, say = seconds) {
  const slots = Math.max(LEAST, shown.length);
  const known = shown.filter((value) => value != null);
  const signature = `${shown.join()}/${top}`;
  if (svg.drawn === signature) return;
  svg.drawn = signature;
  const x = (index) => WIDTH - EDGE - ((shown.length - 1 - index) * (WIDTH - 2 * EDGE)) / Math.max(1, slots - 1);
  const y = (value) => HEIGHT - EDGE - ((HEIGHT - 2 * EDGE) * Math.min(value, top)) / (top || 1);
  const pieces = [];
  let run = [];
  const close = () => {
    if (run.length === 1) pieces.push(make("circle", { cx: run[0][0], cy: run[0][1], r: 1.2 }));
    if (run.length > 1) pieces.push(make("polyline", { points: run.map((point) => point.join()).join(" ") }));
    run = [];
  };
  shown.forEach((value, index) => {
    if (value == null) close();
    else run.push([x(index).toFixed(1), y(value).toFixed(1)]);
  });
  close();
  const last = known.at(-1);
  const words = known.length
    ? `lowest ${say(Math.min(...known))}, highest ${say(Math.max(...known))}, last ${say(last)}`
    : "nothing yet";
  const base = make("line", { x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5, class: "base" });
  svg.replaceChildren(make("title", {}, words), base, ...pieces);
  svg.label ??= svg.getAttribute("aria-label");
  svg.setAttribute("aria-label", `${svg.label}: ${words}`);
}
