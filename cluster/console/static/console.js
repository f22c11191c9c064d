// Polls the gateway and shows what it says, or for how long it has said nothing.

import { badge, byId, duration, el, keyed, millis, show, text } from "/console/dom.js";
import { openExplain } from "/console/explain.js";
import { askScale, confirm, ordered, release, scale, startOrders } from "/console/orders.js";
import { costOf, notesOf, showPools } from "/console/pools.js";
import { ANSWER_MS, get, isSignedIn, mayOrder, startSession } from "/console/session.js";
import { showAdmission, showGateways, showGoodput, showMoves, showPaths, showQuotas, showRequests, showTiers, showTraffic, startFilter } from "/console/tables.js";
import { readTrends, showTrends, startTrends } from "/console/trends.js";

const PERIOD_MS = 1000;
const AWAY_MS = 3000;
const PATHS_MS = 5000; // they change seldom, and are many

let about = null;
let status = null;
let paths = { replicas: [], num_left_out: 0 };
let pathsAt = -Infinity;
let updatedAt = 0;
let problem = "";
let isPolling = false;

async function poll() {
  if (isPolling || document.hidden) return;
  isPolling = true;
  try {
    if (!(await isSignedIn())) {
      problem = "";
      return;
    }
    if (!about || problem) about = await get("/console/api/about");
    const [latest, requests, curves] = await Promise.all(
      ["status", "requests", "curves"].map((name) => get(`/console/api/${name}`)),
    );
    await readTrends();
    if (performance.now() - pathsAt >= PATHS_MS) {
      paths = await get("/console/api/paths");
      pathsAt = performance.now();
    }
    status = latest;
    updatedAt = performance.now();
    problem = "";
    confirm(status.pools);
    showAll(requests, curves);
  } catch (error) {
    problem = error.name === "TimeoutError" ? `no answer within ${ANSWER_MS / 1000} s` : error.message;
  } finally {
    isPolling = false;
    showFreshness();
  }
}

function showAll(requests, curves) {
  showHead(curves);
  const notes = [...missingNotes({ ...requests.missing, ...curves.missing }), ...notesOf(status, paths.replicas)];
  keyed(byId("notes"), notes, (note) => note, () => el("li"), text);
  show(byId("notes-card"), notes.length > 0);
  showOwnPools();
  showTrends(curves, about);
  showRequests(requests, openExplain);
  showTiers(status.store_stats);
  showPaths(paths);
  showMoves(status.scaling_changes, about.autoscale);
  showGateways(status.gateways, about.gateway_id, curves.totals);
  showAdmission(status.gateways);
  showGoodput(status.gateways);
  showQuotas(status.quotas || []);
  showTraffic(status.traffic);
}

function showOwnPools() {
  if (!status) return;
  showPools(status, ordered, {
    step: (name, change) => {
      const shown = status.pools.find((pool) => pool.name === name);
      const from = ordered.get(name) ?? (shown ? shown.desired : 1);
      const to = Math.max(1, from + change);
      askScale(name, from, to, costOf(status, name, about.gpus_per_rank[name]), () => scale(name, to));
    },
    release,
  }, mayOrder());
}

function missingNotes(missing) {
  return Object.entries(missing).sort().map(([id, why]) => `${id} ${why}: its requests are not shown`);
}

function showHead({ minute, totals }) {
  const model = status.model;
  const all = (name) => Object.values(totals).reduce((sum, each) => sum + each[name], 0);
  text(byId("model"), `${about.app}: ${model.name}, context ${model.max_context_tokens} tokens`);
  badge(byId("ready"), status.ready ? "ready" : "not ready", status.ready ? "good" : "bad");
  const figures = [
    ["running", all("num_running")],
    ["finished", all("num_finished")],
    ["failed", all("num_failed")],
    ["cancelled", all("num_cancelled")],
    ["tokens/s, last minute", (minute.num_output_tokens / minute.window_s).toFixed(1)],
    ["TTFT p90", minute.ttft_p90_s ? millis(1000 * minute.ttft_p90_s) : "–"],
    ["ITL p90", minute.itl_p90_s ? millis(1000 * minute.itl_p90_s) : "–"],
  ];
  keyed(byId("figures"), figures, ([name]) => name, () => el("div", {}, el("dt"), el("dd")), (node, [name, value]) => {
    text(node.children[0], name);
    text(node.children[1], value);
  });
  const versions = Object.entries(status.versions).map(([name, version]) => `${name} ${version || "?"}`).join(", ");
  text(byId("about"), `${about.gateway_id}, up ${duration(status.uptime_s)}; ${versions}`);
  show(byId("dashboard"), Boolean(about.dashboard));
  if (about.dashboard) byId("dashboard").href = about.dashboard;
}

// Also while nothing arrives.
function showFreshness() {
  const ageMs = performance.now() - updatedAt;
  const isAway = Boolean(problem) || (updatedAt > 0 && ageMs > AWAY_MS && !byId("main").hidden);
  const since = updatedAt ? `last update ${duration(ageMs / 1000)} ago` : "no data yet";
  text(byId("freshness"), since);
  const what = updatedAt ? `${since}; what you see is from then` : since;
  if (isAway) text(byId("away"), `The gateway does not answer (${problem || "no news"}): ${what}.`);
  show(byId("away"), isAway);
  byId("main").classList.toggle("stale", isAway);
}

startOrders(showOwnPools);
startTrends(poll);
startFilter();
startSession(poll);
byId("explain-close").onclick = () => byId("explain").close();
document.addEventListener("visibilitychange", poll);
setInterval(poll, PERIOD_MS);
setInterval(showFreshness, PERIOD_MS);
poll();
