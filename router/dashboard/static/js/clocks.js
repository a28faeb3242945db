/** Times to first token side by side: of the last answer to a cold prompt, and of the last one to a warm prompt. */

import { el, mark, say } from "./dom.js";
import { NONE, plural, seconds, whole } from "./format.js";

const TICK_MS = 50;

export class Clocks {
  constructor() {
    this._ticking = null;
    this._cold = face("cold");
    this._warm = face("warm");
    this._before = "";
    this.node = el("div", { class: "clocks" }, this._cold.node, this._warm.node);
  }

  /** Runs until `stop`; by what is predicted, as nothing else is known yet. */
  start(isWarm) {
    this.stop();
    this._running = isWarm ? this._warm : this._cold;
    this._before = this._running.time.textContent;
    mark(this._running.node, "data-state", "running");
    const beganMs = performance.now();
    const tick = () => say(this._running.time, `${((performance.now() - beganMs) / 1000).toFixed(2)} s`);
    tick();
    this._ticking = setInterval(tick, TICK_MS);
  }

  /** Stands still; with what the answer has told, on the face where it belongs. */
  stop(told) {
    clearInterval(this._ticking);
    if (told === undefined) return;
    mark(this._running.node, "data-state", null);
    say(this._running.time, this._before);
    const { ttftS, cachedTokens: cached, promptTokens: tokens } = told ?? {};
    if (ttftS === null || ttftS === undefined) return;
    const shown = cached * 2 > tokens ? this._warm : this._cold;
    say(shown.time, seconds(ttftS));
    const known = cached !== null && tokens !== null;
    say(shown.cached, known ? `${whole(cached)} of ${plural(tokens, "token")} cached` : "cached tokens not reported");
  }
}

function face(kind) {
  const time = el("strong", {}, NONE);
  const cached = el("span", { class: "soft small" }, "no answer yet");
  const label = el("span", { class: "small" }, el("span", { class: `swatch ${kind}` }), kind);
  return { node: el("div", { class: `clock ${kind}` }, label, time, cached), time, cached };
}
