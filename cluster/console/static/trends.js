// The curves: TTFT and ITL, second by second in the last minutes, and what the gateway keeps of the last hours.

import { draw } from "/console/charts.js";
import { byId, millis, percent, show } from "/console/dom.js";
import { get } from "/console/session.js";

const SECONDS_GAP_S = 5; // between points of the curves that have one for each second
const QUANTILES = ["p50", "p90", "p99"];
const KINDS = ["first", "second", "third"];
const NO_TRENDS = { at: 0, span_s: 0, period_s: 10, points: [] };

let trends = NO_TRENDS;
let readAt = -Infinity;

const chosenS = () => Number(byId("range").value);

// Read the points again once another one can be there, or another range was chosen.
export async function readTrends() {
  const isOld = performance.now() - readAt >= (1000 * trends.period_s) / 2;
  if (!isOld && trends.span_s === chosenS()) return;
  trends = await get(`/console/api/trends?span_s=${chosenS()}`);
  readAt = performance.now();
}

export function startTrends(onChoice) {
  byId("range").onchange = onChoice;
}

export function showTrends(curves, about) {
  const { minute } = curves;
  drawTimes("ttft", "Time to first token", curves, about.ttft_slo_s,
    QUANTILES.map((name) => minute[`ttft_${name}_s`]));
  drawTimes("itl", "Time between tokens", curves, about.itl_slo_s,
    QUANTILES.map((name) => minute[`itl_${name}_s`]));
  drawTrend("throughput", "Output tokens per second", [["", (point) => point.output_tok_s]],
    { least: 1, format: (value) => (value < 10 ? value.toFixed(1) : value.toFixed(0)) });
  drawTrend("queue", "Requests that wait", [["", (point) => point.num_waiting]],
    { least: 1, format: (value) => (value < 1 ? value.toFixed(1) : value.toFixed(0)) });
  const shares = { least: 1, most: 1, format: percent };
  drawTrend("hits", "Prompt tokens found in a cache", [["", (point) => point.hit_share]], shares);
  const roles = new Set(trends.points.flatMap((point) => Object.keys(point.role_to_kv_share)));
  drawTrend("kv-use", "KV blocks in use", [...roles].sort().map((role) => [role, (point) => point.role_to_kv_share[role]]), shares);
  const hasGpus = Object.values(about.gpus_per_rank).some((num) => num > 0);
  show(byId("gpu-memory-part"), hasGpus);
  if (hasGpus) drawTrend("gpu-memory", "Memory in use on the fullest GPU", [["", (point) => point.gpu_memory_share]], shares);
}

// `latest`: the quantiles of the last minute, in seconds; 0 without tokens.
function drawTimes(id, name, curves, sloS, latest) {
  const isShort = chosenS() <= curves.span_s;
  const lines = QUANTILES.map((label, index) => ({
    kind: KINDS[index],
    label,
    points: isShort
      ? curves[id].map((point) => [point[0], 1000 * point[index + 1]])
      : trends.points.filter((point) => point[id]).map((point) => [point.at, 1000 * point[id][index]]),
  }));
  const [p50, p90, p99] = latest.map((seconds) => millis(1000 * seconds));
  draw(byId(id), {
    name,
    at: curves.at,
    spanS: chosenS(),
    gapS: isShort ? SECONDS_GAP_S : 2 * trends.period_s,
    least: 1,
    lines,
    format: millis,
    words: latest[1] ? `last minute: p50 ${p50}, p90 ${p90}, p99 ${p99}` : "no tokens in the last minute",
    objective: { value: 1000 * sloS, label: `objective ${millis(1000 * sloS)}` },
  });
}

// `series`: [label, value of a point] of each line; a point without a value is left out.
function drawTrend(id, name, series, scale) {
  const lines = series.map(([label, valueOf], index) => ({
    kind: KINDS[index % KINDS.length],
    label,
    points: trends.points.map((point) => [point.at, valueOf(point)]).filter(([, value]) => value !== null && value !== undefined),
  }));
  const latest = lines.filter((line) => line.points.length)
    .map((line) => [line.label, scale.format(line.points.at(-1)[1])].filter(Boolean).join(" "));
  draw(byId(id), {
    name,
    at: trends.at,
    spanS: trends.span_s || chosenS(),
    gapS: 2 * trends.period_s,
    lines,
    words: latest.length ? `latest: ${latest.join(", ")}` : "nothing measured yet",
    objective: null,
    ...scale,
  });
}
