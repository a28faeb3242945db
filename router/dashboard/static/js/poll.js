/** Asks again and again, one at a time, less often while it fails, and not while nobody can see the page. */

import { onKey } from "./keys.js";

const LONGEST_S = 15;

export class Poll {
  constructor(everyS, read, fail) {
    this._everyS = everyS;
    this._read = read;
    this._fail = fail;
    this.again();
  }

  close() {
    this._unsubscribe?.();
    clearTimeout(this._timer);
    this._leaving?.abort();
  }

  /** At once, and so on. */
  again() {
    this.close();
    this._failures = 0;
    this._leaving = new AbortController();
    this._unsubscribe = onKey(() => this.again());
    this._round(this._leaving.signal);
  }

  async _round(signal) {
    try {
      if (!document.hidden) await this._read(signal);
      this._failures = 0;
    } catch (error) {
      if (signal.aborted) return;
      this._failures += 1;
      this._fail(error);
    }
    if (signal.aborted) return;
    const pauseS = Math.min(LONGEST_S, this._everyS * (this._failures + 1));
    this._timer = setTimeout(() => this._round(signal), pauseS * 1000);
  }
}
