// Small tools that change the page in place: what did not change keeps its node, and with it focus and place.

export const byId = (id) => document.getElementById(id);

export function el(tag, fields = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(fields)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export function text(node, value) {
  const wanted = String(value);
  if (node.textContent !== wanted) node.textContent = wanted;
}

export function classes(node, wanted) {
  if (node.className !== wanted) node.className = wanted;
}

export function show(node, isShown) {
  if (node.hidden === isShown) node.hidden = !isShown;
}

// Make the children of `parent` those of `items`, in their order; `update` fills new and old ones alike.
export function keyed(parent, items, keyOf, make, update) {
  const keys = new Set(items.map((item) => String(keyOf(item))));
  const known = new Map();
  for (const node of [...parent.children]) {
    if (keys.has(node.dataset.key)) known.set(node.dataset.key, node);
    else node.remove();
  }
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let node = known.get(key);
    if (!node) {
      node = make(item);
      node.dataset.key = key;
    }
    update(node, item);
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
  }
}

// Rows of a table. A column is {fill(cell, item), kind}; the first one heads its row.
export function rows(body, items, keyOf, columns) {
  const make = () => {
    const row = el("tr");
    columns.forEach((column, index) => {
      const cell = index ? el("td") : el("th", { scope: "row" });
      if (column.kind) cell.className = column.kind;
      row.append(cell);
    });
    return row;
  };
  keyed(body, items, keyOf, make, (row, item) => {
    columns.forEach((column, index) => column.fill(row.children[index], item));
  });
}

export const column = (get, kind = "") => ({ kind, fill: (cell, item) => text(cell, get(item)) });

// A bar with its text beside it; `share` from 0 to 1.
export function bar(cell, share, label, kind = "") {
  if (!cell.firstElementChild) cell.append(el("span", { className: "bar" }, el("span")), el("span"));
  const [track, words] = cell.children;
  classes(track, `bar ${kind}`.trim());
  const width = `${Math.round(100 * Math.max(0, Math.min(1, share || 0)))}%`;
  if (track.firstElementChild.style.width !== width) track.firstElementChild.style.width = width;
  text(words, label);
}

export function badge(node, words, kind) {
  text(node, words);
  classes(node, `badge ${kind}`.trim());
}

// ------------------------------------------------------------------------------------------- figures

export const NONE = "–";
const UNITS = ["B", "kB", "MB", "GB", "TB"];

export function size(numBytes) {
  let value = numBytes;
  let unit = 0;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return unit ? `${value.toFixed(1)} ${UNITS[unit]}` : `${value} B`;
}

export function millis(ms) {
  if (ms === null || ms === undefined) return NONE;
  if (ms >= 10000) return `${(ms / 1000).toFixed(1)} s`;
  return `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
}

export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export const rate = (value, digits, unit) => (value ? `${value.toFixed(digits)} ${unit}` : NONE);

export const percent = (share) => `${Math.round(100 * share)} %`;
