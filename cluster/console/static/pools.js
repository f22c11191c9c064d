// The pools: what is wanted, what there is, each replica's load, and the controls.

import { NONE, badge, bar, byId, classes, column, el, keyed, millis, percent, rate, rows, show, size, text } from "/console/dom.js";

const STATES = { ready: "good", leaving: "warn", connecting: "warn", refused: "bad" };
const LATE_S = 3;
const MIN_SCALE = 8; // sequences that fill a bar when no replica has more

const COLUMNS = [
  {
    fill: (cell, { replica }) => {
      if (!cell.firstElementChild) {
        cell.append(el("span"), el("small"), el("small", { className: "experts" }), el("small"));
      }
      text(cell.children[0], replica.replica_id);
      const parts = [shapeOf(replica), loadOf(replica).backend, `process ${replica.process_id}`];
      text(cell.children[1], parts.filter(Boolean).join(", "));
      text(cell.children[2], expertsOf(loadOf(replica)));
      show(cell.children[2], Boolean(loadOf(replica).expert_imbalance));
      const groups = layersOf(loadOf(replica));
      text(cell.children[3], groups);
      show(cell.children[3], Boolean(groups));
    },
  },
  {
    fill: (cell, { replica }) => {
      if (!cell.firstElementChild) cell.append(el("span"));
      badge(cell.firstElementChild, replica.state, STATES[replica.state] || "");
    },
  },
  {
    fill: (cell, { replica }) => {
      if (!cell.firstElementChild) cell.append(el("span"), el("small"));
      text(cell.children[0], replica.role);
      const isLent = replica.home_role && replica.home_role !== replica.role;
      text(cell.children[1], isLent ? `lent; home: ${replica.home_role}` : "");
    },
  },
  {
    fill: (cell, { replica, scale }) => {
      const { num_running: running, num_waiting: waiting } = loadOf(replica);
      bar(cell, (running + waiting) / scale, `${running} / ${waiting}`, waiting > running ? "busy" : "");
    },
  },
  {
    fill: (cell, { replica }) => {
      const load = loadOf(replica);
      const used = load.num_total_blocks - load.num_free_blocks;
      const share = load.num_total_blocks ? used / load.num_total_blocks : 0;
      bar(cell, share, `${used} / ${load.num_total_blocks}`, share > 0.9 ? "full" : "");
      const cached = `${percent(share)} of the blocks in use; ${load.num_cached_blocks} cached`;
      if (cell.title !== cached) cell.title = cached;
    },
  },
  column(({ replica }) => loadOf(replica).num_landings, "num wide"),
  column(({ replica }) => (loadOf(replica).decode_step_ms ? millis(loadOf(replica).decode_step_ms) : NONE), "num"),
  column(({ replica }) => rate(loadOf(replica).prefill_tok_s, 0, "tok/s"), "num wide"),
  column(({ replica }) => rate(loadOf(replica).transfer_gb_s, 2, "GB/s"), "num wide"),
];

const MEANINGS = {
  Landings: "Prompts whose KV arrives from other replicas",
  Step: "Time of a decode step, averaged over the last ones",
  Prefill: "Prompt tokens computed in a second of prefill, averaged over the last ones",
  Pushes: "What the last hand-overs reached, waiting included: less than the path's measured rate where KV is small",
};

const EMPTY = {
  num_running: 0, num_waiting: 0, num_landings: 0, num_free_blocks: 0, num_cached_blocks: 0, num_total_blocks: 0,
  decode_step_ms: 0, prefill_tok_s: 0, transfer_gb_s: 0,
};
const loadOf = (replica) => replica.load || EMPTY;

// `2x2 (10+18)`: ranks that share a layer x stages, and the layers of each stage.
function shapeOf(replica) {
  const layers = replica.stage_layers || [];
  if (replica.tp * layers.length <= 1) return "";
  const parts = replica.ep > 1 ? ` ep ${replica.ep}` : "";
  return `${replica.tp}x${layers.length}${parts}${layers.length > 1 ? ` (${layers.join("+")})` : ""}`;
}

// `experts: imbalance 1.8, hottest layer 3 expert 17 at 12 %`, and with copies `, 6 copies: ranks 2.1 to 1.1`: the
// imbalance of ranks without them and with them; "": there are none, or their loads are not known.
export function expertsOf(load) {
  if (!load.expert_imbalance) return "";
  const hottest = `layer ${load.hottest_expert_layer} expert ${load.hottest_expert} at ${percent(load.hottest_expert_share)}`;
  const shown = `experts: imbalance ${load.expert_imbalance.toFixed(1)}, hottest ${hottest}`;
  if (!load.num_expert_copies) return shown;
  const ranks = [load.expert_uncopied_imbalance, load.expert_rank_imbalance].map((ratio) => ratio.toFixed(1));
  return `${shown}, ${load.num_expert_copies} copies: ranks ${ranks.join(" to ")}`;
}

// `full 32 kB a token, 61 % used; state 1.2 MB a sequence, 40 % used`, and with misses
// `; 3 of 12 prompts computed 512 cached tokens again`: what groups of layers keep; "": all layers are alike.
export function layersOf(load) {
  const names = Object.keys(load.num_layers_blocks || {}).sort();
  if (names.length < 2) return "";
  const parts = names.map((name) => {
    const [ofSequence, ofToken, total, free] = [
      load.layers_sequence_bytes, load.layers_token_bytes, load.num_layers_blocks, load.num_free_layers_blocks,
    ].map((each) => Number(each[name] || 0));
    const kept = ofSequence ? `${size(ofSequence)} a sequence` : `${size(ofToken)} a token`;
    return `${name} ${kept}, ${percent(total ? (total - free) / total : 0)} used`;
  });
  const misses = Number(load.num_snapshot_misses);
  if (misses) {
    const all = misses + Number(load.num_snapshot_hits);
    parts.push(`${misses} of ${all} prompts computed ${Number(load.num_recomputed_tokens)} cached tokens again`);
  }
  return parts.join("; ");
}

// `4 GPUs (tp 2 x 2 stages)`, `0.5 GPUs`, `2 processes on CPUs`: what a replica takes, by the shape of the pool's
// replicas now.
export function costOf(status, pool, gpusPerRank) {
  const replica = status.replicas.find((it) => it.pool === pool && it.tp);
  if (!replica) return "the devices of its configuration";
  const stages = Math.max((replica.stage_layers || []).length, 1);
  const ranks = replica.tp * stages;
  const shape = ranks > 1 ? ` (tp ${replica.tp} x ${stages} stage${stages > 1 ? "s" : ""})` : "";
  if (!gpusPerRank) return `${ranks} process${ranks > 1 ? "es" : ""} on CPUs${shape}`;
  const gpus = ranks * gpusPerRank;
  return `${Number(gpus.toFixed(2))} GPU${gpus === 1 ? "" : "s"}${shape}`;
}

// `ordered`: pool name to the count that was ordered here and that the status does not show yet.
export function showPools(status, ordered, act, mayOrder) {
  const loads = status.replicas.map((replica) => loadOf(replica).num_running + loadOf(replica).num_waiting);
  const scale = Math.max(MIN_SCALE, ...loads);
  keyed(byId("pools"), poolsOf(status), (pool) => pool.name, (pool) => makePool(pool, act), (node, pool) => {
    const replicas = status.replicas.filter((replica) => replica.pool === pool.name);
    updatePool(node, pool, replicas, scale, ordered.get(pool.name), mayOrder);
  });
}

// By pool; a replica of an earlier registration, whose pool the status does not name, adds one.
function poolsOf(status) {
  const pools = new Map(status.pools.map((pool) => [pool.name, pool]));
  for (const replica of status.replicas) {
    if (pools.has(replica.pool)) continue;
    const same = status.replicas.filter((other) => other.pool === replica.pool);
    const ready = same.filter((other) => other.state === "ready").length;
    pools.set(replica.pool, {
      name: replica.pool, role: replica.home_role || replica.role, configured: same.length, desired: same.length,
      pinned: false, min: 0, max: 0, num_ready: ready, num_reassigned: 0,
    });
  }
  return [...pools.values()];
}

function makePool(pool, act) {
  const titleId = `pool-${pool.name}`;
  const button = (what, sign, label, run) => el(
    "button", { type: "button", className: "step", "data-act": what, "aria-label": label, onclick: run }, sign,
  );
  const head = ["Replica", "State", "Role", "Batch / waiting", "KV blocks", "Landings", "Step", "Prefill", "Pushes"];
  return el("section", { className: "pool", "aria-labelledby": titleId },
    el("div", { className: "pool-head" },
      el("h3", { id: titleId }),
      el("p", { className: "counts" }),
      el("span", { className: "badge pinned" }, "pinned by an operator"),
      el("div", { className: "scale", role: "group", "aria-label": `Replicas of pool ${pool.name}` },
        button("release", "Release", `Release pool ${pool.name}: the autoscaler may move it again`,
          () => act.release(pool.name)),
        button("less", "−", `One ${pool.name} replica less`, () => act.step(pool.name, -1)),
        el("output", { className: "desired" }),
        button("more", "+", `One ${pool.name} replica more`, () => act.step(pool.name, 1)),
      ),
    ),
    el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-labelledby": titleId },
      el("table", {},
        el("thead", {}, el("tr", {}, ...head.map((name, index) => el(
          "th", { scope: "col", className: COLUMNS[index].kind || "", title: MEANINGS[name] || "" }, name,
        )))),
        el("tbody", {}),
      ),
    ),
  );
}

function updatePool(node, pool, replicas, scale, ordered, mayOrder) {
  const find = (selector) => node.querySelector(selector);
  text(find("h3"), pool.name);
  const parts = [`${pool.num_ready} ready`, `${pool.desired} desired`, `${pool.configured} configured`];
  if (pool.num_reassigned) parts.push(`${pool.num_reassigned} lent`);
  if (pool.max) parts.push(`autoscaled from ${pool.min} to ${pool.max}`);
  text(find(".counts"), `${pool.role}: ${parts.join(", ")}`);
  show(find(".pinned"), pool.pinned);
  show(find('[data-act="release"]'), pool.pinned);
  const wanted = ordered === undefined ? pool.desired : ordered;
  text(find(".desired"), wanted);
  classes(find(".desired"), ordered === undefined ? "desired" : "desired pending");
  disable(find('[data-act="less"]'), !mayOrder || wanted <= 1, mayOrder);
  disable(find('[data-act="more"]'), !mayOrder, mayOrder);
  disable(find('[data-act="release"]'), !mayOrder, mayOrder);
  const items = replicas.map((replica) => ({ replica, scale }));
  rows(find("tbody"), items, ({ replica }) => `${replica.replica_id}/${replica.epoch}`, COLUMNS);
}

function disable(button, isDisabled, mayOrder) {
  if (button.disabled !== isDisabled) button.disabled = isDisabled;
  const title = mayOrder ? "" : "Orders need the role operator";
  if (button.title !== title) button.title = title;
}

// What should not be: each a line, and none for healthy replicas and stores.
export function notesOf(status, writers) {
  const lines = [];
  for (const replica of status.replicas) {
    const load = replica.load || {};
    const addNote = (count, meaning) => count && lines.push(`${replica.replica_id}: ${count} ${meaning}`);
    if (replica.note) lines.push(`${replica.replica_id}: ${replica.note}`);
    if (load.age_s > LATE_S) lines.push(`${replica.replica_id}: its last report is ${load.age_s.toFixed(0)} s old`);
    addNote(load.num_checksum_failures, "pieces failed their checksum and were computed again");
    addNote(load.num_quarantined_blocks, "blocks in quarantine");
    addNote(load.num_leaked_blocks, "blocks referenced although nothing runs");
    addNote((load.num_unstored_blocks || {}).failed, "finished blocks could not be written to the store");
    addNote(load.num_store_checksum_failures, "records of the store failed their checksum and were computed");
  }
  for (const writer of writers) {
    for (const path of writer.paths.filter((each) => each.instead_of)) {
      const way = path.transport ? `writes to ${path.peer_replica_id} over ${path.transport}` : `cannot write to ${path.peer_replica_id}`;
      lines.push(`${writer.replica_id} ${way}: ${path.instead_of}`);
    }
  }
  for (const gateway of status.gateways) {
    if (gateway.quota_note) lines.push(`${gateway.gateway_id}: ${gateway.quota_note}`);
  }
  for (const node of status.store_stats) {
    if (node.error) lines.push(`store of node ${node.member.host}: ${node.error}`);
    if (node.index && node.index.note) lines.push(`index of node ${node.member.host}: ${node.index.note}`);
    for (const tier of node.tiers || []) {
      const where = `${tier.tier} of node ${node.member.host}`;
      if (tier.note) lines.push(`${where}: ${tier.note}`);
      if (tier.num_checksum_failures) lines.push(`${where}: ${tier.num_checksum_failures} records had a wrong checksum`);
      if (tier.num_io_errors) lines.push(`${where}: ${tier.num_io_errors} reads or writes failed`);
      if (tier.num_quarantined) lines.push(`${where}: ${tier.num_quarantined} places in quarantine`);
    }
  }
  return lines;
}
