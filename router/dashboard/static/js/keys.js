/** The key that this tab sends: asked for where an answer demands one, and kept as long as the tab is. */

import { typed } from "./dialog.js";

const STORED = "warmroute.key";
const SENDABLE = /^[\x21-\x7e]+$/; // in a header, and as the router takes keys
const TYPING = "input, textarea, select";
const listeners = new Set();
let asking = null;
let declined = false;

export const key = () => sessionStorage.getItem(STORED);

export const headers = () => (key() === null ? {} : bearer(key()));

const bearer = (text) => ({ Authorization: `Bearer ${text}` });

/** The answer ends that. */
export function onKey(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/**
 * Whether there is another key than before. Who asks at once gets one answer. Only `insist` asks again after a no, and
 * takes the focus from a field that is being written in: what was meant for that is no key.
 */
export function askForKey(why, { insist = false } = {}) {
  if (asking === null && !insist && (declined || document.activeElement?.matches(TYPING))) {
    return Promise.resolve(false);
  }
  asking ??= ask(why).finally(() => {
    asking = null;
  });
  return asking;
}

/** The key before is kept until another one is found to be good. */
async function ask(why) {
  let text = why;
  while (text !== null) {
    const given = await typed({ title: "This router wants a key", text, label: "Key", agree: "Use it", secret: true });
    declined = given === null;
    if (given === null) return false;
    text = await objection(given);
    if (text === null) sessionStorage.setItem(STORED, given);
  }
  tell();
  return true;
}

/** Why this is no key; null: the router knows it. */
async function objection(given) {
  if (!SENDABLE.test(given)) return "A key has visible ASCII characters only, and no blanks. Nothing was sent.";
  try {
    const options = { headers: bearer(given), cache: "no-store", credentials: "same-origin" };
    const { ok, status } = await fetch("decisions?limit=1", options);
    if (ok || status === 403) return null; // 403: it is somebody's, but no administrator's
    return status === 401 ? "The router does not know that key." : `The router answered with status ${status}.`;
  } catch {
    return "The router does not answer, so the key was not tried.";
  }
}

export function forget() {
  sessionStorage.removeItem(STORED);
  declined = false;
  tell();
}

function tell() {
  for (const listener of [...listeners]) listener();
}
