/** Requests to the router this page came from, with the key, and errors that say what is wrong. */

import { askForKey, headers, key } from "./keys.js";

/** The router answered, and said no. */
export class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Nobody answered. */
export class Gone extends Error {}

export const get = async (path, options) => (await ask("GET", path, undefined, options)).json();
export const post = async (path, body, options) => (await ask("POST", path, body, options)).json();

/** The answer, with a body not yet read. `asksForKey` is for what somebody has just pressed a button for. */
export async function ask(method, path, body, { signal, asksForKey = false } = {}) {
  for (;;) {
    const sent = key();
    const response = await fetched(method, path, body, signal);
    if (response.ok) return response;
    const refusal = await refused(response);
    if (!asksForKey || refusal.status !== 401) throw refusal;
    if (key() === sent && !(await askForKey(refusal.message))) throw refusal;
  }
}

/** Whether another key may help. */
export const wantsKey = (error) => error instanceof Refused && (error.status === 401 || error.status === 403);

async function fetched(method, path, body, signal) {
  const sent = { ...headers(), ...(body === undefined ? {} : { "Content-Type": "application/json" }) };
  try {
    return await fetch(path, {
      method,
      headers: sent,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "same-origin",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Gone("the router does not answer");
  }
}

async function refused(response) {
  const text = await response.text().catch(() => "");
  try {
    const { message, code } = JSON.parse(text).error;
    return new Refused(response.status, message, code);
  } catch {
    return new Refused(response.status, `status ${response.status}: ${text.slice(0, 300)}`, null);
  }
}
