/** Requests as they end, each on the lane of its replica: orange as far as its prompt was cached. */

import { decisionKey, isFailed } from "./decisions.js";
import { el, fill, mark, say } from "./dom.js";
import { perSecond, plural, share, whole } from "./format.js";
import { replica } from "./places.js";

const MAX_LANES = 8;
const MAX_PILLS = 24; // on one lane
const FLIGHT_MS = 2400;
const FRAME_MS = 1000; // the next requests are told so much later
const LONGEST_TOKENS = 8192; // a longer prompt is drawn as long
const OTHERS = "";

const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Flow {
  constructor() {
    this._lanes = new Map();
    this._seen = new Set();
    this._list = el("ol", { class: "plain lanes" });
    this._count = el("span", { class: "end soft small" });
    const keys = [
      ["warm", "cached"],
      ["pill-cold", "computed"],
    ].map(([kind, words]) => el("span", {}, el("span", { class: `swatch ${kind}` }), words));
    this._keys = el("p", { class: "key-list" }, keys);
    this.node = el(
      "section",
      { class: "card live-figures flow" },
      el("header", {}, el("h2", {}, "Requests"), this._keys, this._count),
      this._list,
    );
  }

  /** A frame of the feed. */
  show(fleet) {
    this._showLanes(fleet);
    mark(this._keys, "hidden", fleet.decisions === null);
    const fresh = (fleet.decisions ?? []).filter((one) => one.chosen !== null && !this._seen.has(decisionKey(one)));
    this._seen = new Set((fleet.decisions ?? []).map(decisionKey));
    const { in_flight: running, requests_per_s: rate } = fleet.totals;
    const isSample = fleet.decisions !== null && rate > fleet.decisions.length && fresh.length > 0;
    const drawn = isSample ? `${plural(fresh.length, "request")} of ${perSecond(rate)} drawn` : `${perSecond(rate)} ended`;
    say(this._count, `${whole(running)} running, ${drawn}`);
    if (!document.hidden) fresh.reverse().forEach((one, place) => this._send(one, place / fresh.length));
  }

  // ---- lanes

  /** The busiest replicas, and one lane for all others. */
  _showLanes({ replicas, totals }) {
    const busiest = [...replicas]
      .sort((one, other) => busy(other) - busy(one))
      .slice(0, MAX_LANES)
      .sort((one, other) => one.name.localeCompare(other.name, "en", { numeric: true }));
    const before = this._lanes;
    this._lanes = new Map();
    for (const row of busiest) {
      const { hit_reported: hits, requests_per_s: rate } = row.recent;
      const warm = hits === null ? "" : `, ${share(hits)} warm`;
      this._lane(before, row, row.available ? `${perSecond(rate)}${warm}` : row.standing);
    }
    const others = totals.replicas - busiest.length;
    if (others > 0) {
      const rest = (part, name) => Math.max(0, busiest.reduce((sum, row) => sum - row[part][name], totals[name]));
      const row = { name: OTHERS, available: true, load: { in_flight: rest("load", "in_flight") } };
      this._lane(before, row, perSecond(rest("recent", "requests_per_s")), `${whole(others)} others`);
    }
    const nodes = [...this._lanes.values()].map(({ node }) => node);
    const there = this._list.children;
    const isSame = nodes.length === there.length && nodes.every((node, place) => node === there[place]);
    if (!isSame) fill(this._list, nodes);
  }

  _lane(before, { name, available, load, idle = null }, words, title = name) {
    const { in_flight: running } = load;
    const lane = before.get(name) ?? newLane(name);
    say(lane.title, title);
    say(lane.value, words);
    say(lane.now, running > 0 ? `${whole(running)} running` : idle && available ? `idle: ${idle}` : "");
    mark(lane.now, "class", running > 0 ? "now running" : "now");
    mark(lane.node, "class", available ? "lane" : "lane down");
    this._lanes.set(name, lane);
  }

  // ---- requests

  _send(decision, place) {
    const { track } = this._lanes.get(decision.chosen) ?? this._lanes.get(OTHERS) ?? {};
    if (track === undefined) return;
    while (track.children.length >= MAX_PILLS) track.firstChild.remove();
    const pill = pillOf(decision);
    track.append(pill);
    if (still.matches) return; // the last ones stand there in a row
    const way = `translateX(${track.clientWidth}px)`;
    const flight = pill.animate([{ transform: "translateX(-100%)" }, { transform: way }], {
      duration: FLIGHT_MS,
      delay: place * FRAME_MS,
      fill: "backwards",
    });
    flight.onfinish = () => pill.remove();
  }
}

/** Which replicas have a lane: those that have most to do now, and lately. */
const busy = ({ load, recent }) => load.in_flight + recent.requests_per_s;

function newLane(name) {
  const title = name === OTHERS ? el("span") : el("a", { href: replica(name) });
  const track = el("span", { class: "track", "aria-hidden": "true" });
  const now = el("span");
  const value = el("span", { class: "value" });
  return { node: el("li", {}, title, track, now, value), title, track, now, value };
}

function pillOf({ prompt_tokens: tokens, ...decision }) {
  const cached = decision.reported_cached_tokens ?? decision.predicted_cached_tokens ?? 0;
  const warm = tokens > 0 ? Math.min(1, cached / tokens) : 0;
  const length = Math.sqrt(Math.min(tokens, LONGEST_TOKENS) / LONGEST_TOKENS);
  const style = { "--warm-share": `${Math.round(warm * 100)}%`, "--length": length.toFixed(2) };
  return el("span", { class: isFailed(decision) ? "pill failed" : "pill", style });
}
