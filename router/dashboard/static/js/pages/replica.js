/** One replica: whether it takes requests, its stream of events, what it holds, and how it did lately. */

import { Chart } from "../chart.js";
import { confirmed } from "../dialog.js";
import { announce, el, fill, mark } from "../dom.js";
import { ago, compact, perSecond, plural, seconds, share, whole } from "../format.js";
import { get, post } from "../http.js";
import { Totals, badge, blocksOf, card, facts, kindOf, sentence, showFailure } from "../parts.js";
import { Poll } from "../poll.js";
import { Ring } from "../ring.js";
import * as places from "../places.js";
import { meter } from "../table.js";

const EVERY_S = 2;
const RATES = 300; // ten minutes of them
const TOTALS = ["Hit rate", "Time to first token", "Requests", "In flight", "Queue", "Predictions"];

export function open({ view, argument, state }) {
  return new ReplicaPage(view, argument, state);
}

class ReplicaPage {
  constructor(view, name, state) {
    this._name = name;
    this._state = state;
    this._view = view;
    this._isGone = false;
    this._path = `dashboard/replicas/${encodeURIComponent(name)}`;
    this._rates = new Ring(RATES);
    this._build(view);
    this._poll = new Poll(
      EVERY_S,
      (signal) => this._read(signal),
      (error) => this._fail(error),
    );
    this._unsubscribe = state.subscribe((what) => what === "hello" && this._showActions());
    this._showActions();
  }

  close() {
    this._unsubscribe();
    this._poll.close();
    for (const chart of this._charts) chart.close();
    this._goes(false);
  }

  // ---- parts

  _build(view) {
    this._badges = el("span", { class: "row" });
    this._actions = el("div", { class: "row end" });
    this._failure = el("div");
    this._why = el("div");
    this._totals = new Totals(TOTALS);
    this._facts = el("div");
    this._stream = el("div", { class: "stack" });
    this._fill = el("div", { class: "stack" });
    this._ratesChart = new Chart({
      title: "Blocks stored and removed",
      about: "in a second",
      format: perSecond,
      series: RATE_SERIES,
    });
    this._hitChart = new Chart({ title: "Hit rate", format: share, top: 1, series: HIT_SERIES });
    this._ttftChart = new Chart({ title: "Time to first token", format: seconds, series: TTFT_SERIES });
    this._loadChart = new Chart({ title: "Requests in flight", format: compact, counts: true, series: LOAD_SERIES });
    this._charts = [this._ratesChart, this._hitChart, this._ttftChart, this._loadChart];
    const swatch = el("span", { class: "swatch", style: { "--hue": this._state.hue(this._name) } });
    const held = el("a", { href: places.tree(this._name) }, "Shared prefixes that it holds");
    const cache = card("Cache", this._fill, el("p", { class: "after" }, held));
    view.append(
      el("div", { class: "page-head" }, el("h1", {}, swatch, this._name), this._badges, this._actions),
      this._failure,
      this._why,
      this._totals.node,
      el("div", { class: "columns live-figures" }, card("Event stream", this._stream), card("Facts", this._facts)),
      el("div", { class: "live-figures" }, cache),
      el(
        "div",
        { class: "columns live-figures" },
        this._charts.map((chart) => chart.node),
      ),
    );
  }

  // ---- what may be done

  _showActions() {
    if (!this._state.isAdmin || this._isGone) {
      fill(this._actions);
      return;
    }
    const drains = this._status === "draining";
    const key = String(drains);
    if (this._actionKey === key && this._actions.childElementCount > 0) return;
    this._actionKey = key;
    const button = (name) =>
      el("button", { type: "button", on: { click: () => this._act(name) } }, ACTIONS[name].label);
    fill(this._actions, button(drains ? "undrain" : "drain"), button("resync"));
  }

  async _act(name) {
    const { label, text, done } = ACTIONS[name];
    const agreed = await confirmed({ title: `${label} ${this._name}?`, text, agree: label });
    if (!agreed) return;
    try {
      await post(`replicas/${encodeURIComponent(this._name)}/${name}`, {}, { asksForKey: true });
      announce(`${this._name}: ${done}`);
      this._poll.again();
    } catch (error) {
      showFailure(this._failure, error);
    }
  }

  // ---- what is shown

  async _read(signal) {
    const page = await get(this._path, { signal });
    showFailure(this._failure, null);
    this._goes(false);
    this._status = page.replica.standing;
    this._showActions();
    this._showStanding(page.replica);
    this._showTotals(page);
    fill(this._facts, facts(about(page.replica)));
    this._showStream(page.stream);
    this._showCache(page.replica);
    this._showCharts(page);
  }

  _fail(error) {
    showFailure(this._failure, error);
    this._goes(error.status === 404);
    this._showActions();
  }

  /** What stands there was true until it was taken from the fleet. */
  _goes(isGone) {
    this._isGone = isGone;
    this._view.classList.toggle("gone", isGone);
  }

  _showStanding({ standing, state, why: unavailable, inexact, idle }) {
    const words = [...new Set([standing, state])];
    fill(
      this._badges,
      words.map((word) => badge(word, kindOf(word))),
    );
    const why = unavailable ?? (state === "exact" ? null : inexact);
    if (!why && idle) {
      fill(this._why, el("p", { class: "note" }, sentence(`idle: ${idle}`)));
      return;
    }
    fill(this._why, why && el("p", { class: `note ${standing === "down" ? "bad" : "warn"}` }, sentence(why)));
  }

  _showTotals({ replica: { load, recent, index }, counts }) {
    const all = `${compact(counts.requests)} in all, ${compact(counts.errors)} failed`;
    this._totals.show({
      "Hit rate": [share(recent.hit_reported), `predicted ${share(recent.hit_predicted)}`],
      "Time to first token": [seconds(recent.ttft_p50_s), "median of late"],
      Requests: [perSecond(recent.requests_per_s), all],
      "In flight": [whole(load.in_flight), `${whole(load.running)} running, ${whole(load.waiting)} waiting`],
      Queue: [compact(load.queued_tokens), `prompt tokens, at ${perSecond(load.prefill_tokens_per_s)}`],
      Predictions: [
        share(index.accuracy),
        `exact; ${compact(counts.wrong_predictions)} of ${compact(counts.predictions)} were wrong`,
      ],
    });
  }

  _showStream(stream) {
    if (stream === null) {
      fill(
        this._stream,
        el("p", { class: "soft" }, "It sends no events: what it holds is guessed from what was sent there."),
      );
      return;
    }
    fill(
      this._stream,
      el(
        "ul",
        { class: "plain stack stream" },
        STREAM.map((line) => streamLine(line, stream)),
      ),
    );
    this._rates.push({ at: Date.now() / 1000, ...stream });
  }

  _showCache(replica) {
    const { block_size: blockSize, cache_used: used } = replica;
    const parts = Object.entries(replica.index.blocks).map(([medium, count]) => `${whole(count)} in ${MEDIA[medium] ?? medium}`);
    const size = blockSize === null ? "" : ` of ${blockSize} tokens`;
    fill(
      this._fill,
      el("p", {}, `${plural(blocksOf(replica), "block")}${size}${parts.length > 0 ? `: ${parts.join(", ")}` : ""}.`),
      used !== null && el("p", { class: "row" }, meter(used), `${share(used)} of ${plural(replica.load.total_blocks, "block")} taken`),
    );
  }

  _showCharts({ history, stream }) {
    mark(this._ratesChart.node, "hidden", stream === null);
    this._ratesChart.show(this._rates.values("at"), (name) => this._rates.values(name));
    const at = Float64Array.from(history.at);
    const column = (name) => Float64Array.from(history[name], (value) => value ?? Number.NaN);
    for (const chart of [this._hitChart, this._ttftChart, this._loadChart]) chart.show(at, column);
  }
}

/** Where blocks are. On the wire an engine's own KV cache is called GPU, on a machine without one, too. */
const MEDIA = { GPU: "its KV cache", CPU: "host memory", STORAGE: "storage" };

const ACTIONS = {
  drain: {
    label: "Drain",
    text: "It gets no new requests. What it is answering comes to its end; nobody's request is lost.",
    done: "gets no new requests",
  },
  undrain: { label: "Undrain", text: "It gets new requests again.", done: "gets requests again" },
  resync: {
    label: "Resync",
    text: "Its whole cache is read anew. Until that is done, requests are routed by what was known before.",
    done: "its cache is read anew",
  },
};

const RATE_SERIES = [
  { name: "stored_per_s", label: "stored", hue: "var(--hue-2)" },
  { name: "removed_per_s", label: "removed", hue: "var(--hue-7)" },
];
const HIT_SERIES = [
  { name: "hit_reported", label: "reported", hue: "var(--hue-1)" },
  { name: "hit_predicted", label: "predicted", hue: "var(--hue-0)", dashed: true },
];
const TTFT_SERIES = [
  { name: "ttft_p50_s", label: "p50", hue: "var(--hue-0)" },
  { name: "ttft_p99_s", label: "p99", hue: "var(--hue-7)" },
];
const LOAD_SERIES = [{ name: "in_flight", label: "in flight", hue: "var(--hue-0)" }];

/** What is said of a stream: the words, the figure, and what a figure above zero is. */
const STREAM = [
  ["batches", "Batches", (stream) => whole(stream.batches), ""],
  [
    "stored_blocks",
    "Blocks stored",
    (stream) => `${whole(stream.stored_blocks)}, ${perSecond(stream.stored_per_s)}`,
    "",
  ],
  [
    "removed_blocks",
    "Blocks removed",
    (stream) => `${whole(stream.removed_blocks)}, ${perSecond(stream.removed_per_s)}`,
    "",
  ],
  [
    "last_event_age_s",
    "Last event",
    (stream) => (stream.last_event_age_s === null ? "none yet" : ago(stream.last_event_age_s)),
    "",
  ],
  ["lag_batches", "Behind by", (stream) => plural(stream.lag_batches, "batch"), "warn"],
  ["gaps", "Gaps", (stream) => whole(stream.gaps), "info"],
  ["replays", "Repaired by replay", (stream) => whole(stream.replays), "info"],
  ["snapshots", "Read whole", (stream) => plural(stream.snapshots, "time"), ""],
  ["lost_batches", "Lost for good", (stream) => whole(stream.lost_batches), "bad"],
  ["restarts", "Restarts", (stream) => whole(stream.restarts), "info"],
  ["reconnects", "Connected anew", (stream) => whole(stream.reconnects), ""],
  ["digest_checks", "Digests compared", (stream) => whole(stream.digest_checks), ""],
  ["digest_mismatches", "Digests that differed", (stream) => whole(stream.digest_mismatches), "bad"],
];

function streamLine([name, title, value, kind], stream) {
  const text = value(stream);
  const marked = kind !== "" && stream[name] > 0;
  return el(
    "li",
    { class: "stream-line" },
    el("span", { class: "soft" }, title),
    marked ? badge(text, kind) : el("span", { class: "number" }, text),
  );
}

function about(replica) {
  const isolation = { "by salt": "yes, by salts", unknown: "not known" };
  return [
    ["Address", replica.url],
    ["Engine", replica.engine],
    ["Role", replica.role ?? "whole requests"],
    ["Models", replica.models.join(", ") || "none yet"],
    ["Cache", replica.state],
    ["Tokenizer", replica.tokenizer ?? "not compared"],
    ["Block", replica.block_size === null ? "not known" : plural(replica.block_size, "token")],
    ["Longest prompt", replica.max_model_len === null ? "not known" : plural(replica.max_model_len, "token")],
    ["Breaker", replica.breaker],
    ["Apart by key", isolation[replica.isolation] ?? "no keys, nothing to keep apart"],
  ];
}
