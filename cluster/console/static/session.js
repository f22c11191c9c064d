// Requests to the gateway that serves the page, and who is signed in there. The API key is typed into the form,
// sent once, and kept nowhere: the browser holds a cookie that no script can read.

import { byId, show, text } from "/console/dom.js";

export const ANSWER_MS = 5000;
const ORDER_MS = 45000; // the scaler may wait for Ray's dashboard
const SIGNED_OUT = 401;

let session = null; // {auth, insecure, identity}; `identity` is null while nobody is signed in
let notifyChange = () => {};

export function startSession(onChange) {
  notifyChange = onChange;
  byId("sign-out").onclick = signOut;
  byId("sign-in-form").onsubmit = (event) => {
    event.preventDefault();
    signIn(byId("key-input").value.trim());
  };
}

// Whether the page may show the cluster; asks the gateway as long as that is not known.
export async function isSignedIn() {
  if (!session) {
    session = await get("/console/api/session");
    showSession();
  }
  return Boolean(session.identity);
}

export const mayOrder = () => Boolean(session && session.identity && session.identity.roles.includes("operator"));

export async function get(path) {
  const reply = await fetch(path, { credentials: "same-origin", signal: AbortSignal.timeout(ANSWER_MS) });
  const fields = await reply.json();
  if (reply.status === SIGNED_OUT) ended(fields.error);
  if (!reply.ok) throw new Error(fields.error || `status ${reply.status}`);
  return fields;
}

// {fields, status, error}: `error` is "" where it was done, `status` 0 where nothing was answered.
export async function post(what, fields) {
  let reply;
  try {
    reply = await fetch(`/console/api/${what}`, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(fields),
      credentials: "same-origin", signal: AbortSignal.timeout(ORDER_MS),
    });
  } catch (error) {
    return { fields: {}, status: 0, error: error.message };
  }
  const answer = await reply.json().catch(() => ({}));
  if (reply.status === SIGNED_OUT && what !== "sign-in") ended(answer.error);
  return { fields: answer, status: reply.status, error: reply.ok ? "" : answer.error || `status ${reply.status}` };
}

async function signIn(key) {
  const { fields, error } = await post("sign-in", { key });
  byId("key-input").value = "";
  text(byId("sign-in-error"), error);
  show(byId("sign-in-error"), Boolean(error));
  if (error) {
    byId("key-input").focus();
    return;
  }
  session = fields;
  showSession();
}

async function signOut() {
  await post("sign-out", {});
  ended("");
}

function ended(why) {
  if (!session || !session.identity) return;
  session = { ...session, identity: null };
  showSession();
  text(byId("sign-in-error"), why ? `You are signed out: ${why}` : "");
  show(byId("sign-in-error"), Boolean(why));
}

function showSession() {
  const { auth, insecure, identity } = session;
  const isOpen = auth === "none";
  show(byId("sign-in"), !identity);
  show(byId("main"), Boolean(identity));
  show(byId("figures"), Boolean(identity));
  show(byId("sign-out"), Boolean(identity) && !isOpen);
  const roles = identity ? identity.roles.filter((role) => role !== "user").join(", ") : "";
  const open = insecure ? "no authentication, reachable by everybody" : "no authentication";
  text(byId("identity"), isOpen ? open : identity ? `${identity.name} (${roles})` : "not signed in");
  byId("identity").className = isOpen ? `badge ${insecure ? "bad" : "warn"}` : "muted";
  if (!identity) byId("key-input").focus();
  notifyChange();
}
