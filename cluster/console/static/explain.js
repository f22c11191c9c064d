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

function table(names, kinds, rows) {
  const head = el("tr", {}, ...names.map((name, index) => el("th", { scope: "col", className: kinds[index] }, name)));
  const body = rows.map(({ cells, isChosen }) => el(
    "tr", { className: isChosen ? "chosen" : "" },
    ...cells.map((cell, index) => el("td", { className: kinds[index] },
      index === 0 && isChosen ? `✓ ${cell}` : String(cell))),
  ));
  return el("div", { className: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
}
