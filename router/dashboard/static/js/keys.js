/** The key that this tab sends: asked for where an answer demands one, and kept as long as the tab is. */

import { typed } from "./dialog.js";

const STORED = "warmroute.key";
const listeners = new Set();
let asking = null;
let declined = false;

export const key = () => sessionStorage.getItem(STORED);

export const headers = () => (key() === null ? {} : { Authorization: `Bearer ${key()}` });

export const onKey = (listener) => listeners.add(listener);

/** Whether there is another key than before. Who asks at once gets one answer; after a no, only `insist` asks again. */
export function askForKey(why, { insist = false } = {}) {
  if (declined && !insist) return Promise.resolve(false);
  asking ??= ask(why).finally(() => {
    asking = null;
  });
  return asking;
}

async function ask(why) {
  const given = await typed({
    title: "This router wants a key",
    text: why,
    label: "Key",
    agree: "Use it",
    secret: true,
  });
  declined = given === null;
  if (given === null) return false;
  sessionStorage.setItem(STORED, given);
  for (const listener of listeners) listener();
  return true;
}

export function forget() {
  sessionStorage.removeItem(STORED);
  declined = false;
  for (const listener of listeners) listener();
}
