// Two lines over the last minutes, as inline SVG: the median and the 90th percentile of each second.

import { millis } from "/console/dom.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 190;
const LEFT = 58;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 24;
const GAP_S = 5;
const LABEL = 78; // of `−5 min`, half as much again because the first and the last one end at the edges

function shape(tag, fields, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(fields)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// 1, 2 or 5 times a power of ten, at least `value`.
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= value * 0.999);
}

function path(points, x, y, index) {
  let before = -Infinity;
  const parts = points.map((point) => {
    const command = point[0] - before > GAP_S ? "M" : "L";
    before = point[0];
    const place = `${x(point[0]).toFixed(1)} ${y(1000 * point[index]).toFixed(1)}`;
    return command === "M" ? `M${place}h0.01` : `L${place}`; // so that a point alone is seen
  });
  return parts.join("");
}

// `curves`: {at, span_s}; `points`: [unix time, median, p90] in seconds; `minute`: {p50, p90} in seconds.
export function draw(parent, name, curves, points, minute, sloS) {
  const width = Math.max(240, parent.clientWidth);
  const start = curves.at - curves.span_s;
  const shown = points.filter((point) => point[0] >= start);
  const highest = Math.max(1, ...shown.map((point) => 1000 * point[2]));
  const top = nice(highest * 1.1);
  const x = (at) => LEFT + ((at - start) / curves.span_s) * (width - LEFT - RIGHT);
  const y = (ms) => HEIGHT - BOTTOM - (ms / top) * (HEIGHT - TOP - BOTTOM);

  const grid = [0, 0.5, 1].map((share) => shape("g", {},
    shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(share * top), y2: y(share * top) }),
    shape("text", { class: "tick", x: LEFT - 6, y: y(share * top) + 4, "text-anchor": "end" }, share ? millis(share * top) : "0"),
  ));
  // As many minutes between labels as keep them apart.
  const minuteWidth = (60 / curves.span_s) * (width - LEFT - RIGHT);
  const step = 60 * Math.max(1, Math.ceil(LABEL / minuteWidth));
  for (let back = Math.floor(curves.span_s / step) * step; back >= 0; back -= step) {
    const anchor = back === 0 ? "end" : back === curves.span_s ? "start" : "middle";
    const label = back === 0 ? "now" : `−${Math.round(back / 60)} min`;
    grid.push(shape("text", { class: "tick", x: x(curves.at - back), y: HEIGHT - 6, "text-anchor": anchor }, label));
  }
  if (1000 * sloS <= top) {
    const at = y(1000 * sloS);
    grid.push(shape("line", { class: "slo", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
  }
  const words = minute.p90
    ? `last minute: p50 ${millis(1000 * minute.p50)}, p90 ${millis(1000 * minute.p90)}`
    : "no tokens in the last minute";
  const drawing = shape(
    "svg",
    { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": `${name}; ${words}` },
    ...grid,
    shape("path", { class: "p90", d: path(shown, x, y, 2) }),
    shape("path", { class: "p50", d: path(shown, x, y, 1) }),
  );
  const legend = document.createElement("p");
  legend.className = "legend";
  legend.append(mark("p50", "p50"), mark("p90", "p90"));
  if (1000 * sloS <= top) legend.append(mark("slo", `objective ${millis(1000 * sloS)}`));
  const label = document.createElement("span");
  label.className = "muted";
  label.textContent = words;
  legend.append(label);
  parent.replaceChildren(drawing, legend);
}

function mark(kind, words) {
  const node = document.createElement("span");
  node.className = `mark ${kind}`;
  node.textContent = words;
  return node;
}
