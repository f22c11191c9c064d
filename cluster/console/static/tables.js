// Requests, tiers, transfers, scaling moves, gateways, admission and traffic.

import { NONE, badge, bar, byId, classes, column, duration, el, keyed, millis, percent, rows, show, size, text } from "/console/dom.js";

const STATES = { running: "good", finished: "", cancelled: "warn", failed: "bad" };
const INDEX_STATES = { up: "good", off: "", slow: "warn", down: "bad" };
const NUM_MOVES = 20;
const NUM_TENANTS = 20;

// ------------------------------------------------------------------------------------------ requests

let latestReply = { requests: [] };
let openExplain = () => {};

export function startFilter() {
  byId("filter").oninput = () => showRequests(latestReply, openExplain);
}

// Whether each word of the filter is in what the row says.
function matches(request, words) {
  const { request_id: id, state, tenant, reason, prefill, decode, gateway_id: gateway } = request;
  const said = [id, state, tenant, reason, prefill, decode, gateway].join(" ").toLowerCase();
  return words.every((word) => said.includes(word));
}

export function showRequests(reply, explain) {
  latestReply = reply;
  openExplain = explain;
  const columns = [
    {
      fill: (cell, request) => {
        if (!cell.firstElementChild) {
          cell.append(el("button", { type: "button", className: "link" }));
          cell.firstElementChild.onclick = () => explain(request); // its id and tenant never change
        }
        text(cell.firstElementChild, request.request_id);
      },
    },
    {
      fill: (cell, request) => {
        if (!cell.firstElementChild) cell.append(el("span"));
        badge(cell.firstElementChild, request.state, STATES[request.state] || "");
        if (cell.title !== request.reason) cell.title = request.reason;
      },
    },
    column((request) => request.tenant || NONE, "wide"),
    column((request) => request.num_prompt_tokens, "num"),
    column((request) => request.num_output_tokens, "num"),
    column((request) => millis(request.ttft_ms), "num"),
    column((request) => millis(request.e2e_ms), "num"),
    column((request) => request.attempts, "num wide"),
    column((request) => placeOf(request)),
    column((request) => request.gateway_id, "wide"),
    column((request) => `${duration(request.age_s)} ago`, "num"),
  ];
  const keyOf = (request) => [request.gateway_id, request.tenant, request.request_id].join("/");
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = reply.requests.filter((request) => matches(request, words));
  rows(byId("requests"), shown, keyOf, columns);
  text(byId("filter-count"), words.length ? `${shown.length} of ${reply.requests.length}` : "");
  text(byId("requests-empty"), reply.requests.length ? "No request has all these words." : "No request has come to any gateway yet.");
  show(byId("requests-empty"), !shown.length);
}

function placeOf(request) {
  if (!request.decode) return NONE;
  return request.prefill && request.prefill !== request.decode ? `${request.prefill} → ${request.decode}` : request.decode;
}

// --------------------------------------------------------------------------------------------- tiers

export function showTiers(stores) {
  const items = stores.flatMap((node) => {
    if (node.error) return [{ node, tier: null }];
    return (node.tiers || []).map((tier) => ({ node, tier }));
  });
  rows(byId("tiers"), items, ({ node, tier }) => `${node.member.node_id}/${tier ? tier.tier : ""}`, [
    column(({ node }) => node.member.host || node.member.node_id),
    column(({ tier }) => (tier ? tier.tier : "not reached")),
    {
      kind: "nowrap",
      fill: (cell, { tier }) => {
        if (!tier || !tier.capacity_bytes) {
          text(cell, tier && tier.num_bytes ? size(tier.num_bytes) : NONE);
          return;
        }
        if (cell.firstChild && !cell.firstElementChild) cell.replaceChildren();
        bar(cell, tier.num_bytes / tier.capacity_bytes, `${size(tier.num_bytes)} of ${size(tier.capacity_bytes)}`);
      },
    },
    column(({ tier }) => (tier ? tier.num_records : NONE), "num"),
    column(({ tier }) => (tier && tier.num_hits + tier.num_misses ? percent(tier.num_hits / (tier.num_hits + tier.num_misses)) : NONE), "num"),
    column(({ tier }) => (tier && tier.read_gb_s ? `${tier.read_gb_s.toFixed(2)} GB/s` : NONE), "num wide"),
    column(({ tier }) => (tier && tier.write_gb_s ? `${tier.write_gb_s.toFixed(2)} GB/s` : NONE), "num wide"),
    {
      fill: (cell, { node, tier }) => {
        if (!cell.firstElementChild) cell.append(el("span"));
        const state = tier && tier.tier === "dram" && node.index ? node.index.state : "";
        badge(cell.firstElementChild, state, state ? INDEX_STATES[state] || "" : "none");
      },
    },
  ]);
  show(byId("tiers-empty"), !items.length);
}

// --------------------------------------------------------------------------------------------- paths

export function showPaths({ replicas, num_left_out: numLeftOut }) {
  const cells = new Map();
  const sources = new Set();
  const targets = new Set();
  for (const replica of replicas) {
    for (const path of replica.paths) {
      const key = `${replica.replica_id}\n${path.peer_replica_id}`;
      cells.set(key, [...(cells.get(key) || []), path]);
      sources.add(replica.replica_id);
      targets.add(path.peer_replica_id);
    }
  }
  const table = byId("paths");
  if (!table.firstElementChild) {
    table.append(el("thead", {}, el("tr", {})), el("tbody", {}));
  }
  const columns = [...targets].sort();
  keyed(table.tHead.rows[0], sources.size ? ["", ...columns] : [], (name) => name, (name) => (
    name ? el("th", { scope: "col" }) : el("td", { className: "corner" })
  ), (cell, name) => text(cell, name || "from \\ to"));
  keyed(table.tBodies[0], [...sources].sort(), (source) => source, () => el("tr"), (row, source) => {
    keyed(row, ["", ...columns], (name) => name, (name) => (name ? el("td") : el("th", { scope: "row" })), (cell, name) => {
      if (name) fillPath(cell, cells.get(`${source}\n${name}`) || []);
      else text(cell, source);
    });
  });
  show(byId("paths-empty"), !sources.size);
  text(byId("paths-more"), `${numLeftOut} more replicas write; tandem status shows all paths.`);
  show(byId("paths-more"), numLeftOut > 0);
}

function fillPath(cell, paths) {
  const kinds = new Map();
  for (const path of paths) kinds.set(path.transport, (kinds.get(path.transport) || 0) + 1);
  const isCut = paths.some((path) => !path.transport);
  const kindTexts = [...kinds].map(([kind, count]) => (count > 1 ? `${kind} ×${count}` : kind)).join(", ");
  const slowest = Math.min(...paths.map((path) => path.gb_s));
  const reasons = paths.map((path) => path.instead_of).filter(Boolean).join("\n");
  text(cell, !paths.length ? NONE : isCut ? "none" : `${kindTexts} ${slowest.toFixed(2)} GB/s`);
  classes(cell, isCut ? "bad-cell" : reasons ? "warn-cell" : "");
  if (cell.title !== reasons) cell.title = reasons;
}

// ------------------------------------------------------------------------- moves, gateways, traffic

export function showMoves(moves, isAutoscaled) {
  text(byId("autoscaler"), `the latest moves; the autoscaler is ${isAutoscaled ? "on" : "off"}`);
  const latest = moves.slice(-NUM_MOVES).reverse();
  rows(byId("moves"), latest, (move) => `${move.at}/${move.pool}/${move.reason}`, [
    column((move) => new Date(1000 * move.at).toLocaleTimeString([], { hour12: false }), "nowrap"),
    column((move) => move.pool),
    column((move) => `${move.before} → ${move.after}`, "num"),
    column((move) => move.by),
    column((move) => move.reason),
  ]);
  show(byId("moves-empty"), !latest.length);
}

export function showGateways(gateways, ownId, totals) {
  const total = (name) => (gateway) => (totals[gateway.gateway_id] || {})[name] ?? NONE;
  rows(byId("gateways"), gateways, (gateway) => gateway.gateway_id, [
    column((gateway) => gateway.gateway_id + (gateway.gateway_id === ownId ? " (this one)" : "")),
    column((gateway) => gateway.address),
    column((gateway) => gateway.process_id, "num wide"),
    column(total("num_running"), "num"),
    column(total("num_finished"), "num"),
    column(total("num_failed"), "num"),
    column((gateway) => (gateway.admission ? gateway.admission.classes.reduce((sum, it) => sum + it.num_waiting, 0) : NONE), "num"),
    column((gateway) => ((gateway.admission || {}).rung_name || NONE).replaceAll("_", " ")),
    {
      fill: (cell, gateway) => {
        if (!cell.firstElementChild) cell.append(el("a"));
        const link = cell.firstElementChild;
        text(link, gateway.console || NONE);
        if (gateway.console && gateway.gateway_id !== ownId) link.href = `${location.protocol}//${gateway.console}/console`;
        else link.removeAttribute("href");
      },
    },
  ]);
}

// Classes and tenants, at all gateways together.
export function showAdmission(gateways) {
  const known = gateways.map((gateway) => gateway.admission).filter(Boolean);
  const named = new Map();
  for (const it of known.flatMap((admission) => admission.classes)) {
    const sum = named.get(it.service_class) || { name: it.service_class, waiting: 0, sent: 0, refused: {}, served: 0 };
    sum.waiting += it.num_waiting;
    sum.sent += it.num_released;
    add(sum.refused, it.num_refused);
    named.set(it.service_class, sum);
  }
  const tenants = new Map();
  let total = 0;
  for (const flow of known.flatMap((admission) => admission.flows)) {
    const tenant = tenants.get(flow.tenant) || { name: flow.tenant, served: 0, classes: {} };
    tenant.served += flow.served_s;
    add(tenant.classes, { [flow.service_class]: flow.served_s });
    tenants.set(flow.tenant, tenant);
    if (named.has(flow.service_class)) named.get(flow.service_class).served += flow.served_s;
    total += flow.served_s;
  }
  const share = (served) => (total ? served / total : 0);
  const shown = (served) => (total ? percent(share(served)) : NONE);
  const listed = (numbers, shown) => Object.entries(numbers).sort().map(([name, num]) => `${name} ${shown(num)}`).join(", ");
  const shareBar = { kind: "nowrap", fill: (cell, it) => bar(cell, share(it.served), shown(it.served)) };

  rows(byId("admission"), [...named.values()], (it) => it.name, [
    column((it) => it.name),
    column((it) => it.waiting, "num"),
    column((it) => it.sent, "num"),
    shareBar,
    column((it) => listed(it.refused, String) || NONE),
  ]);
  show(byId("admission-table"), named.size > 0);
  const largest = [...tenants.values()].sort((a, b) => b.served - a.served).slice(0, NUM_TENANTS);
  rows(byId("shares"), largest, (it) => it.name, [
    column((it) => it.name),
    shareBar,
    column((it) => listed(it.classes, shown)),
  ]);
  show(byId("shares-table"), largest.length > 0);
}

// How the latest requests were served, at all gateways together.
export function showGoodput(gateways) {
  const tenants = new Map();
  for (const it of gateways.flatMap((gateway) => gateway.outcomes || [])) {
    const tenant = tenants.get(it.tenant) || { name: it.tenant, outcomes: {} };
    add(tenant.outcomes, it.num_requests);
    tenants.set(it.tenant, tenant);
  }
  const counted = (it) => Object.entries(it.outcomes).reduce((sum, [name, num]) => sum + (name === "cancelled" ? 0 : num), 0);
  const share = (it) => (counted(it) ? (it.outcomes.good || 0) / counted(it) : 0);
  const largest = [...tenants.values()].sort((a, b) => counted(b) - counted(a)).slice(0, NUM_TENANTS);
  rows(byId("goodput"), largest, (it) => it.name, [
    column((it) => it.name),
    { kind: "nowrap", fill: (cell, it) => bar(cell, share(it), counted(it) ? percent(share(it)) : NONE) },
    column((it) => Object.entries(it.outcomes).sort().map(([name, num]) => `${name} ${num}`).join(", ")),
  ]);
  show(byId("goodput-table"), largest.length > 0);
}

function add(sums, numbers) {
  for (const [name, num] of Object.entries(numbers)) sums[name] = (sums[name] || 0) + num;
}

export function showQuotas(quotas) {
  const used = (quota) => Object.entries(quota.used || {}).sort();
  rows(byId("quotas"), quotas, (quota) => quota.tenant, [
    column((quota) => quota.tenant),
    column((quota) => used(quota).map(([name, share]) => `${name} ${percent(share)}`).join(", ")),
    column((quota) => Object.entries(quota.num_refused || {}).sort().map(([name, num]) => `${num} by ${name}`).join(", ") || NONE),
  ]);
  show(byId("quotas-table"), quotas.length > 0);
}

export function showTraffic(traffic) {
  const shares = Object.entries(traffic).sort();
  const total = shares.reduce((sum, [, share]) => sum + share, 0) || 1;
  keyed(byId("traffic"), shares, ([name]) => name, () => el("li", {}, el("span", {}), el("span", {})), (node, [name, share]) => {
    text(node.children[0], name);
    bar(node.children[1], share / total, percent(share / total));
  });
  show(byId("traffic-empty"), !shares.length);
}
