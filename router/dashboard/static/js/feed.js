/** The router's feed: connected, read, and connected again after ever longer pauses while nobody answers. */

import { Refused, ask, wantsKey } from "./http.js";
import { askForKey, onKey } from "./keys.js";
import { events } from "./sse.js";

const LONGEST_PAUSE_S = 10;
const SILENCE_S = 8; // a frame comes each second; after so long the connection is as good as lost

/**
 * Calls `take(event, content)` for what comes, and `tell(state, why)` with
 * connecting, live, gone or refused.
 */
export class Feed {
  constructor(take, tell) {
    this._take = take;
    this._tell = tell;
    this._query = "";
    this._attempt = null; // aborts what is under way
    this._pauses = 0;
    onKey(() => this.restart());
    window.addEventListener("pagehide", () => this._attempt?.abort());
    window.addEventListener("pageshow", (event) => event.persisted && this.restart());
  }

  /** Of other replicas, or in another order. */
  ask(query) {
    const text = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "")).toString();
    if (text === this._query) return;
    this._query = text;
    if (this._attempt !== null) this.restart();
  }

  restart() {
    this._attempt?.abort();
    this._attempt = new AbortController();
    this._run(this._attempt);
  }

  async _run(attempt) {
    while (!attempt.signal.aborted) {
      try {
        this._tell("gone", (await this._read(attempt)) ?? "the router has ended the connection");
      } catch (error) {
        if (attempt.signal.aborted) return;
        if (wantsKey(error)) {
          this._tell("refused", error.message);
          await askForKey(error.message); // a key given starts a new attempt
          return;
        }
        this._tell("gone", error instanceof Refused ? error.message : "the router does not answer");
      }
      await this._pause(attempt.signal);
    }
  }

  /** Resolves when the router ends it: to the reason, if it gave one. */
  async _read(attempt) {
    const reading = new AbortController(); // AbortSignal.any is too new
    const quit = () => reading.abort();
    let timer = 0;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(quit, SILENCE_S * 1000);
    };
    attempt.signal.addEventListener("abort", quit);
    heard();
    try {
      const path = `dashboard/feed${this._query ? `?${this._query}` : ""}`;
      const response = await ask("GET", path, undefined, { signal: reading.signal });
      for await (const { event, data } of events(response.body)) {
        heard();
        this._pauses = 0;
        this._tell("live", "");
        const content = JSON.parse(data);
        if (event === "end") return content.why;
        this._take(event, content);
      }
      return null;
    } finally {
      clearTimeout(timer);
      attempt.signal.removeEventListener("abort", quit);
    }
  }

  _pause(signal) {
    this._pauses = Math.min(LONGEST_PAUSE_S, this._pauses + 1);
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, this._pauses * 1000);
      signal.addEventListener("abort", () => {
        clearTimeout(timer);
        resolve();
      });
    });
  }
}
