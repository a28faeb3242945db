/** Asks the router for a frame each second, and for the last half hour when it has another point. */

import { Gone, get, wantsKey } from "./http.js";
import { askForKey } from "./keys.js";
import { Poll } from "./poll.js";

const EVERY_S = 1;
const SILENCE_S = 8; // after so long without an answer the router is as good as gone

export class Feed {
  constructor(state) {
    this._state = state;
    this._query = "";
    this._points = null; // the number of points when the history was taken
    this._poll = null;
  }

  start() {
    this._poll = new Poll(
      EVERY_S,
      (signal) => this._read(signal),
      (error) => this._failed(error),
    );
  }

  /** Of other replicas, or in another order. */
  ask(query) {
    const text = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "")).toString();
    if (text === this._query) return;
    this._query = text;
    this._poll?.again();
  }

  async _read(signal) {
    const frame = await soon(get(`dashboard/fleet${this._query ? `?${this._query}` : ""}`, { signal }));
    if (frame.points !== this._points) {
      this._state.past(await soon(get("dashboard/history", { signal })));
      this._points = frame.points;
    }
    this._state.connect("live", "");
    this._state.take(frame);
  }

  _failed(error) {
    this._state.connect(wantsKey(error) ? "refused" : "gone", error.message);
    if (wantsKey(error)) askForKey(error.message); // a key given asks anew
  }
}

function soon(answer) {
  let timer = 0;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Gone("the router does not answer")), SILENCE_S * 1000);
  });
  return Promise.race([answer, late]).finally(() => clearTimeout(timer));
}
