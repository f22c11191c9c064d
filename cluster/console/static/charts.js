// One chart: lines over time, as inline SVG, with what they mean below.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 170;
const LEFT = 62;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 24;
const LABEL = 78; // of `−5 min`, half as much again because the first and the last one end at the edges
const STEPS_MIN = [1, 2, 5, 10, 15, 30, 60, 120];

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

function path(points, x, y, gapS) {
  let before = -Infinity;
  const parts = points.map(([at, value]) => {
    const isApart = at - before > gapS;
    before = at;
    const place = `${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    return isApart ? `M${place}h0.01` : `L${place}`; // so that a point alone is seen
  });
  return parts.join("");
}

function ago(seconds) {
  if (!seconds) return "now";
  const minutes = Math.round(seconds / 60);
  return minutes >= 60 && minutes % 60 === 0 ? `−${minutes / 60} h` : `−${minutes} min`;
}

// `chart`: {name, at, spanS, gapS, least, most, lines, format, words, objective}. Times are unix times. A line is
// {kind, label, points: [[time, value]]}, and broken where points are more than `gapS` apart. The scale ends at
// `least` or higher, or at `most` where there is one; `objective` is {value, label}, or null.
export function draw(parent, chart) {
  const { at: end, spanS, format, words, objective } = chart;
  const width = Math.max(240, parent.clientWidth);
  const start = end - spanS;
  const lines = chart.lines.map((line) => ({ ...line, points: line.points.filter(([at]) => at >= start) }));
  const highest = Math.max(chart.least, ...lines.flatMap((line) => line.points.map(([, value]) => value)));
  const top = chart.most || nice(highest * 1.1);
  const x = (at) => LEFT + ((at - start) / spanS) * (width - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);

  const grid = [0, 0.5, 1].map((share) => shape("g", {},
    shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(share * top), y2: y(share * top) }),
    shape("text", { class: "tick", x: LEFT - 6, y: y(share * top) + 4, "text-anchor": "end" }, share ? format(share * top) : "0"),
  ));
  // As many labels as keep apart.
  const minuteWidth = (60 / spanS) * (width - LEFT - RIGHT);
  const stepS = 60 * (STEPS_MIN.find((minutes) => minutes * minuteWidth >= LABEL) || STEPS_MIN.at(-1));
  for (let back = Math.floor(spanS / stepS) * stepS; back >= 0; back -= stepS) {
    const anchor = back === 0 ? "end" : back === spanS ? "start" : "middle";
    grid.push(shape("text", { class: "tick", x: x(end - back), y: HEIGHT - 6, "text-anchor": anchor }, ago(back)));
  }
  const isObjectiveShown = objective && objective.value <= top;
  if (isObjectiveShown) {
    const height = y(objective.value);
    grid.push(shape("line", { class: "slo", x1: LEFT, x2: width - RIGHT, y1: height, y2: height }));
  }
  const drawing = shape(
    "svg",
    { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": `${chart.name}; ${words}` },
    ...grid,
    ...lines.map((line) => shape("path", { class: line.kind, d: path(line.points, x, y, chart.gapS) })),
  );
  const legend = document.createElement("p");
  legend.className = "legend";
  if (lines.length > 1) legend.append(...lines.map((line) => mark(line.kind, line.label)));
  if (isObjectiveShown) legend.append(mark("slo", objective.label));
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
