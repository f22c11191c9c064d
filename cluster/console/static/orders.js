// Orders to the gateway, which hands them to Ray's dashboard with the operator's own token. The token is typed
// into the dialog and kept in this tab only; addresses end up in histories and logs, so none is taken from there.

import { byId, show, text } from "/console/dom.js";

const KEY = "tandem-ray-token";
const ORDER_MS = 15000;
const KEEP_MS = 20000; // an order that the status does not show after so long is not waited for

let token = "";
let notifyChange = () => {};
let afterToken = null;

export const ordered = new Map(); // pool name to the count that was ordered and is not in the status yet
const orderedAt = new Map();

export function startOrders(onChange) {
  notifyChange = onChange;
  keep(stored());
  byId("token-button").onclick = () => ask("", null);
  byId("token-cancel").onclick = () => byId("token-dialog").close();
  byId("token-forget").onclick = () => {
    keep("");
    byId("token-dialog").close();
  };
  byId("token-dialog").onclose = () => {
    byId("token-input").value = "";
    const resume = afterToken;
    afterToken = null;
    if (resume) resume();
  };
  byId("token-form").onsubmit = (event) => {
    event.preventDefault();
    keep(byId("token-input").value.trim());
    const again = afterToken && afterToken.again;
    afterToken = null;
    byId("token-dialog").close();
    if (again) again();
  };
}

// Call `then` once the operator has agreed that the pool gets fewer replicas.
export function askFewer(pool, from, to, then) {
  const dialog = byId("fewer-dialog");
  text(byId("fewer-what"), `Scale the pool ${pool} from ${from} to ${to}?`);
  byId("fewer-cancel").onclick = () => dialog.close();
  byId("fewer-form").onsubmit = (event) => {
    event.preventDefault();
    dialog.close();
    then();
  };
  if (!dialog.open) dialog.showModal();
  byId("fewer-cancel").focus();
}

// Drop what the status confirms by now, or never will.
export function confirm(pools) {
  for (const pool of pools) {
    if (ordered.get(pool.name) === pool.desired || performance.now() - orderedAt.get(pool.name) > KEEP_MS) {
      ordered.delete(pool.name);
    }
  }
}

export function scale(pool, replicas) {
  ordered.set(pool, replicas);
  orderedAt.set(pool, performance.now());
  return send("/console/api/scale", { pool, replicas }, () => scale(pool, replicas), () => ordered.delete(pool));
}

export const release = (pool) => send("/console/api/release", { pool }, () => release(pool), () => {});

async function send(path, order, again, undo) {
  showMessage("", "");
  const headers = { "Content-Type": "application/json" };
  if (token) headers.Authorization = `Bearer ${token}`;
  let reply;
  try {
    reply = await fetch(path, {
      method: "POST", headers, body: JSON.stringify(order), credentials: "omit", signal: AbortSignal.timeout(ORDER_MS),
    });
  } catch (error) {
    undo();
    showMessage(`The order did not reach the gateway: ${error.message}`, "bad");
    return;
  }
  const fields = await reply.json().catch(() => ({}));
  if (reply.ok) {
    showMessage(fields.message || "done", "good");
    return;
  }
  undo();
  const problem = fields.error || `status ${reply.status}`;
  if (reply.status === 401 || reply.status === 403) {
    ask(token ? `Ray did not accept this token (${problem}).` : "Ray wants your token for this order.", again);
  } else {
    showMessage(`The order was refused: ${problem}`, "bad");
  }
}

function ask(why, again) {
  const dialog = byId("token-dialog");
  const hint = byId("token-why");
  if (!hint.dataset.usual) hint.dataset.usual = hint.textContent.replace(/\s+/g, " ");
  text(hint, [why, hint.dataset.usual].filter(Boolean).join(" "));
  show(byId("token-forget"), Boolean(token));
  afterToken = again ? Object.assign(() => showMessage("Nothing was changed.", ""), { again }) : null;
  if (!dialog.open) dialog.showModal();
  byId("token-input").focus();
  notifyChange();
}

function showMessage(words, kind) {
  const node = byId("message");
  text(node, words);
  node.className = `banner ${kind}`.trim();
  show(node, Boolean(words));
  notifyChange();
}

function keep(value) {
  token = value;
  try {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  } catch {
    // Storage is forbidden here: the token lives as long as the page.
  }
  text(byId("token-button"), value ? "Token is set" : "Set token");
}

function stored() {
  try {
    return sessionStorage.getItem(KEY) || "";
  } catch {
    return "";
  }
}
