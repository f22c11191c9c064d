// Orders to the gateway, which passes them to the scaler under the name of who is signed in.

import { byId, show, text } from "/console/dom.js";
import { post } from "/console/session.js";

const KEEP_MS = 20000; // an order that the status does not show after so long is not waited for

let notifyChange = () => {};

export const ordered = new Map(); // pool name to the count that was ordered and is not in the status yet
const orderedAt = new Map();

export function startOrders(onChange) {
  notifyChange = onChange;
}

// Call `then` once the operator has agreed; `cost` says what one replica of the pool takes.
export function askScale(pool, from, to, cost, then) {
  const dialog = byId("scale-dialog");
  const isMore = to > from;
  text(byId("scale-title"), isMore ? "More replicas" : "Fewer replicas");
  text(byId("scale-what"), `Scale the pool ${pool} from ${from} to ${to}?`);
  text(byId("scale-cost"), isMore
    ? `One more replica takes ${cost}.`
    : `One replica leaves and gives back ${cost}: its streams finish or move, its cache is lost.`);
  text(byId("scale-yes"), isMore ? "Scale up" : "Scale down");
  byId("scale-cancel").onclick = () => dialog.close();
  byId("scale-form").onsubmit = (event) => {
    event.preventDefault();
    dialog.close();
    then();
  };
  if (!dialog.open) dialog.showModal();
  byId("scale-cancel").focus();
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
  return send("scale", { pool, replicas }, () => ordered.delete(pool));
}

export const release = (pool) => send("release", { pool }, () => {});

async function send(what, order, undo) {
  showMessage("", "");
  const { error, fields, status } = await post(what, order);
  if (!error) {
    showMessage(fields.message || "done", "good");
    return;
  }
  undo();
  showMessage(status ? `The order was refused: ${error}` : `The order did not reach the gateway: ${error}`, "bad");
}

function showMessage(words, kind) {
  const node = byId("message");
  text(node, words);
  node.className = `banner ${kind}`.trim();
  show(node, Boolean(words));
  notifyChange();
}
