// Where one request went, and why: each decision with all its candidates, and what happened when.

import { byId, el, text } from "/console/dom.js";
import { get } from "/console/session.js";

const COLUMNS = [
  ["Replica", "", (it) => it.replica_id],
  ["Side", "", (it) => it.side],
  ["Matched", "num", (it) => it.matched_tokens],
  ["Uncached", "num", (it) => it.uncached_tokens],
  ["Queue, ms", "num", (it) => (1e3 * it.queue_s).toFixed(1)],
  ["Load", "num", (it) => (1e3 * it.load_s).toFixed(1)],
  ["Prefill", "num", (it) => (1e3 * it.prefill_s).toFixed(1)],
  ["Transfer", "num", (it) => (1e3 * (it.transfer_s + it.once_s)).toFixed(1)],
  ["Pressure", "num", (it) => (1e3 * it.pressure_s).toFixed(1)],
  ["Cost", "num", (it) => (1e3 * it.cost_s).toFixed(1)],
  ["Note", "", (it) => it.note],
];

export async function openExplain({ request_id: requestId, tenant }) {
  const dialog = byId("explain");
  text(byId("explain-title"), `Request ${requestId}`);
  byId("explain-body").replaceChildren(el("p", { className: "muted" }, "loading"));
  if (!dialog.open) dialog.showModal();
  try {
    const reply = await get(`/console/api/explain?${new URLSearchParams({ id: requestId, tenant })}`);
    byId("explain-body").replaceChildren(...view(reply));
  } catch (error) {
    byId("explain-body").replaceChildren(el("p", { className: "error" }, error.message));
  }
}

function view(reply) {
  const end = reply.reason ? `${reply.state}: ${reply.reason}` : reply.state;
  return [
    el("p", { className: "end" }, end),
    el("p", { className: "muted" }, `at ${reply.gateway_id}${reply.tenant ? `, of ${reply.tenant}` : ""}`),
    ...reply.decisions.map(decisionView),
    ...promptView(reply),
    el("h3", {}, "Timeline"),
    table(["ms", "Event", "Detail"], ["num", "", ""], reply.timeline.map((event) => (
      { cells: [event.at_ms.toFixed(1), event.name, event.detail] }
    ))),
  ];
}

function decisionView(decision) {
  const chosen = new Set([
    `prefill ${decision.prefill}`,
    `${decision.prefill ? "decode" : "local"} ${decision.decode}`,
  ]);
  const rows = decision.candidates.map((candidate) => ({
    isChosen: chosen.has(`${candidate.side} ${candidate.replica_id}`),
    cells: COLUMNS.map(([, , get]) => get(candidate)),
  }));
  return el("section", { className: "decision" },
    el("h3", {}, `Attempt ${decision.attempt}, policy ${decision.policy}`),
    el("p", {}, decision.reason),
    table(COLUMNS.map(([name]) => name), COLUMNS.map(([, kind]) => kind), rows),
  );
}

const FATES = {
  new: "never seen",
  forgotten: "seen, and no longer anywhere",
  unusable: "its KV is there, but not the window or state to continue behind it",
  elsewhere: "elsewhere",
  expected: "being computed elsewhere",
};
const REASONS = {
  space: "evicted for space",
  share: "evicted: its group exceeded its share",
  offloaded: "moved to host memory",
  purged: "purged by an operator",
  left: "gone with the replica",
};

// How much of the prompt was cached, could have been, and why the rest was computed.
function promptView({ prompt, decisions }) {
  const last = decisions.at(-1);
  if (!last || !prompt?.block_tokens) return [];
  const size = prompt.block_tokens;
  const achievable = Math.max(last.achievable_tokens, prompt.num_cached_tokens);
  const relative = prompt.num_relative_tokens
    ? `The nearest relative is ${prompt.relative_id || "a request of another tenant"}: ${prompt.num_shared_tokens} tokens are the same.`
    : "No relative is remembered.";
  const rows = last.missed.map((missed) => ({
    cells: [missed.first * size, (missed.first + missed.num_blocks) * size, fateText(missed),
      missed.places.map((it) => `${it.replica_id} (${it.tier})`).join(", ")],
  }));
  return [
    el("h3", {}, "Prompt"),
    el("p", {}, `${prompt.num_tokens} tokens, ${prompt.num_cached_tokens} cached; a cache without a limit would have had ${achievable}. ${relative}`),
    ...(rows.length ? [table(["From", "To", "Why it was computed", "Where"], ["num", "num", "", ""], rows)] : []),
  ];
}

function fateText(missed) {
  if (missed.fate !== "removed") return FATES[missed.fate] ?? missed.fate;
  return `${REASONS[missed.reason] ?? "removed"}, ${missed.least_age_s.toFixed(1)} s before`;
}

function table(names, kinds, rows) {
  const head = el("tr", {}, ...names.map((name, index) => el("th", { scope: "col", className: kinds[index] }, name)));
  const body = rows.map(({ cells, isChosen }) => el(
    "tr", { className: isChosen ? "chosen" : "" },
    ...cells.map((cell, index) => el("td", { className: kinds[index] },
      index === 0 && isChosen ? `✓ ${cell}` : String(cell))),
  ));
  return el("div", { className: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
}
