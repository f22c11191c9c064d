// Requests to the gateway that serves the page.

export const ANSWER_MS = 5000;
const ORDER_MS = 45000; // the scaler may wait for Ray's dashboard

export async function get(path) {
  const reply = await fetch(path, { credentials: "same-origin", signal: AbortSignal.timeout(ANSWER_MS) });
  const fields = await reply.json();
  if (!reply.ok) throw new Error(fields.error || `status ${reply.status}`);
  return fields;
}

// {fields, status, error}: `error` is "" where it was done, `status` 0 where nothing was answered.
export async function post(what, order) {
  let reply;
  try {
    reply = await fetch(`/console/api/${what}`, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(order),
      credentials: "same-origin", signal: AbortSignal.timeout(ORDER_MS),
    });
  } catch (error) {
    return { fields: {}, status: 0, error: error.message };
  }
  const fields = await reply.json().catch(() => ({}));
  return { fields, status: reply.status, error: reply.ok ? "" : fields.error || `status ${reply.status}` };
}
