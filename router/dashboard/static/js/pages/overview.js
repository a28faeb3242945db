/** The fleet at a glance: totals, what is wrong, replicas, the last decisions. */

import { spark } from "../chart.js";
import { el, fill, mark, say } from "../dom.js";
import { Flow } from "../flow.js";
import { age, bytes, clock, compact, duration, perSecond, plural, seconds, share, whole } from "../format.js";
import { Totals, alertNote, blocksOf, endedNote, kindOf } from "../parts.js";
import * as places from "../places.js";
import { Table } from "../table.js";
import { decisionColumns, decisionKey } from "../decisions.js";

const TOTALS = ["Prefill saved", "Prefill computed", "Replicas", "Requests", "First token", "Hit rate", "In flight", "Tokens"];
const STATES = ["exact", "approximate", "partial", "lagging", "syncing", "draining", "down"];
const ASCENDING = ["name", "accuracy"]; // their natural order
const TYPING_MS = 250;
const MONEY = { minimumFractionDigits: 2, maximumFractionDigits: 2 };
const HEARD_S = 2; // replicas of ours say something several times a second

export function open({ view, state, feed }) {
  return new Overview(view, state, feed);
}

class Overview {
  constructor(view, state, feed) {
    this._state = state;
    this._feed = feed;
    this._query = { sort: "worst", order: "desc", filter: "" };
    this._build(view);
    this._unsubscribe = state.subscribe((what) => this._show(what));
    this._show("fleet");
  }

  close() {
    clearTimeout(this._typing);
    this._unsubscribe();
    this._feed.ask({});
  }

  // ---- parts

  _build(view) {
    this._about = el("p");
    this._totals = new Totals(TOTALS);
    this._flow = new Flow();
    this._alerts = el("ul", { class: "plain alerts" });
    this._judged = el("span", { class: "end soft small" });
    this._alertCard = section("What is wrong", this._alerts, this._judged);
    this._replicas = this._replicaTable();
    this._decisions = new Table({
      label: "Last decisions",
      key: decisionKey,
      columns: decisionColumns(this._state, true),
      empty: "No request has been answered yet.",
    });
    this._decisionCard = section("Last decisions", this._decisions.node, link("All of them", places.requests));
    view.append(
      el("div", { class: "page-head" }, el("h1", {}, "Fleet"), this._about),
      this._totals.node,
      this._flow.node,
      this._alertCard,
      this._replicaCard(),
      this._decisionCard,
    );
  }

  _replicaTable() {
    return new Table({
      label: "Replicas",
      key: (row) => row.name,
      columns: replicaColumns(this._state),
      order: { by: "worst", descending: true },
      onSort: (by) => this._sort(by),
      rowClass: (row) => (row.standing === "down" ? "faint" : null),
      empty: "No replica is like that.",
    });
  }

  _replicaCard() {
    const filtered = () => {
      clearTimeout(this._typing);
      this._typing = setTimeout(() => this._ask({ filter: input.value.trim() }), TYPING_MS);
    };
    const input = el("input", {
      class: "filter",
      type: "search",
      placeholder: "Name, model, engine or state",
      "aria-label": "Filter replicas",
      maxlength: "100",
      on: { input: filtered },
    });
    const choose = (name) => {
      input.value = input.value === name ? "" : name;
      this._ask({ filter: input.value });
    };
    this._chips = STATES.map((name) => {
      const count = el("span", { class: "number" });
      const button = el(
        "button",
        { type: "button", class: "chip", on: { click: () => choose(name) } },
        count,
        ` ${name}`,
      );
      return { name, count, button };
    });
    this._matching = el("p", { class: "soft small after" });
    const head = el(
      "header",
      {},
      el("h2", {}, "Replicas"),
      this._chips.map((one) => one.button),
      el("div", { class: "end" }, input),
    );
    return el("section", { class: "card live-figures" }, head, this._replicas.node, this._matching);
  }

  // ---- what is asked for

  _sort(by) {
    const { sort, order } = this._query;
    const natural = ASCENDING.includes(by) ? "asc" : "desc";
    const other = order === "asc" ? "desc" : "asc";
    this._ask({ sort: by, order: sort === by ? other : natural });
    this._replicas.sorted(by, this._query.order === "desc");
  }

  _ask(changes) {
    this._query = { ...this._query, ...changes };
    this._feed.ask(this._query);
  }

  // ---- what is shown

  _show(what) {
    const { fleet, hello } = this._state;
    if (hello !== null) say(this._about, aboutRouter(hello, this._state.models));
    if (what === "connection" || fleet === null) return;
    this._showTotals(fleet.totals);
    if (what !== "fleet") return;
    this._flow.show(fleet);
    this._showAlerts(fleet.alerts);
    this._replicas.show(fleet.replicas);
    this._showStates(fleet.states);
    const left = fleet.shown.matching - fleet.replicas.length;
    mark(this._matching, "hidden", left <= 0);
    say(this._matching, `and ${plural(left, "replica")} more: sort or filter to see others`);
    mark(this._decisionCard, "hidden", fleet.decisions === null);
    if (fleet.decisions !== null) this._decisions.show(fleet.decisions.slice(0, 12));
  }

  _showTotals(totals) {
    const lately = (name, hue) => spark(this._state.points.values(name).slice(-60), hue);
    this._totals.show({
      "Prefill saved": [compact(totals.saved_tokens), savedWords(totals, this._state.hello)],
      "Prefill computed": computedWords(totals.computed),
      Replicas: [
        `${whole(totals.up)} of ${whole(totals.replicas)}`,
        `${compact(totals.blocks)} blocks indexed, in ${bytes(totals.index_bytes)}`,
      ],
      Requests: [
        perSecond(totals.requests_per_s),
        totals.errors_per_s > 0 ? `${perSecond(totals.errors_per_s)} of them errors` : "no errors",
        lately("requests_per_s", "var(--hue-2)"),
      ],
      "First token": [
        seconds(totals.ttft_p50_s),
        `p90 ${seconds(totals.ttft_p90_s)}, p99 ${seconds(totals.ttft_p99_s)}`,
        lately("ttft_p50_s", "var(--hue-0)"),
      ],
      "Hit rate": [
        share(totals.hit_reported),
        `predicted ${share(totals.hit_predicted)}`,
        lately("hit_reported", "var(--hue-1)"),
      ],
      "In flight": [
        whole(totals.in_flight),
        `${whole(totals.waiting + totals.waiting_here)} waiting, ${compact(totals.queued_tokens)} tokens queued`,
        lately("in_flight", "var(--hue-0)"),
      ],
      Tokens: [
        perSecond(totals.generated_tokens_per_s),
        `${seconds(totals.token_s)} each; prompts ${perSecond(totals.prompt_tokens_per_s)}`,
        lately("generated_tokens_per_s", "var(--hue-4)"),
      ],
    });
  }

  _showAlerts({ judged_at: judgedAt, alerts, truncated, ended = [] }) {
    say(this._judged, judgedAt === null ? "" : `judged at ${clock(judgedAt)}`);
    const text = JSON.stringify([judgedAt === null, alerts, truncated, ended]);
    if (text === this._alertText) return;
    this._alertText = text;
    const isWell = judgedAt !== null && alerts.length === 0;
    say(this._alertCard.querySelector("h2"), isWell ? "Nothing is wrong" : "What is wrong");
    this._alertCard.classList.toggle("quiet", isWell);
    if (judgedAt === null) fill(this._alerts, el("li", { class: "soft" }, "Looking\u2026 this takes some seconds."));
    else
      fill(
        this._alerts,
        alerts.map(alertNote),
        truncated > 0 && el("li", { class: "soft" }, `and ${truncated} more`),
        ended.map(endedNote),
      );
  }

  _showStates(states) {
    for (const { name, count, button } of this._chips) {
      say(count, whole(states[name] ?? 0));
      mark(button, "hidden", !states[name] && this._query.filter !== name);
      mark(button, "aria-pressed", String(this._query.filter === name));
      mark(button, "class", `chip badge ${kindOf(name)}`);
    }
  }

}

function savedWords({ saved_tokens: tokens, saved_s: time }, hello) {
  const price = hello?.price_per_million_tokens ?? null;
  const money = price === null ? "" : `, worth ${((tokens * price) / 1e6).toLocaleString("en", MONEY)}`;
  return `tokens, ${duration(time)}${money}, since the start`;
}

/** How much was computed, and why: the largest part first. */
function computedWords(computed) {
  const all = Object.values(computed).reduce((sum, tokens) => sum + tokens, 0);
  const parts = Object.entries(computed).filter(([, tokens]) => tokens > 0);
  parts.sort(([, one], [, other]) => other - one);
  return [compact(all), parts.map(([cause, tokens]) => `${share(tokens / all)} ${cause}`).join(", ") || "tokens"];
}

function aboutRouter(hello, models) {
  const served = models.length === 1 ? models[0] : plural(models.length, "model");
  const up = age(Date.now() / 1000 - hello.started);
  return `${served}, policy ${hello.policy}, router ${hello.version}, up for ${up}`;
}

const link = (text, href) => el("a", { class: "end small", href }, text);

function section(title, content, end = null) {
  return el("section", { class: "card live-figures" }, el("header", {}, el("h2", {}, title), end), content);
}

const replicaColumns = (state) => [
  {
    title: "Replica",
    sort: "name",
    head: true,
    cell: (row) => ({ text: row.name, href: places.replica(row.name), hues: [state.hue(row.name)] }),
  },
  {
    title: "State",
    sort: "worst",
    cell: stateCell,
    about: "what is known of its cache, and whether it takes requests",
  },
  { title: "Cache", sort: "blocks", cell: cacheCell, about: "how full its KV cache is, and blocks in the index" },
  {
    title: "Hit rate",
    sort: "hits",
    right: true,
    cell: (row) => share(row.recent.hit_reported),
    about: "share of prompt tokens found cached",
  },
  {
    title: "TTFT",
    sort: "ttft",
    right: true,
    wide: true,
    cell: (row) => seconds(row.recent.ttft_p50_s),
    about: "median time to first token",
  },
  {
    title: "Tokens",
    right: true,
    cell: tokensCell,
    about: "generated tokens; hover for the time of each",
  },
  { title: "Requests", sort: "requests", right: true, wide: true, cell: (row) => perSecond(row.recent.requests_per_s) },
  { title: "In flight", sort: "in_flight", right: true, wide: true, cell: (row) => whole(row.load.in_flight) },
  {
    title: "Queue",
    sort: "queued",
    right: true,
    wide: true,
    cell: (row) => compact(row.load.queued_tokens),
    about: "prompt tokens ahead of a new request",
  },
  {
    title: "Accuracy",
    sort: "accuracy",
    right: true,
    wide: true,
    cell: (row) => share(row.index.accuracy),
    about: "answers whose cached blocks were predicted to the block",
  },
  { title: "Heard", sort: "lag", right: true, wide: true, cell: heardCell, about: "how long ago it was last heard of" },
  { title: "Events", wide: true, cell: eventsCell, about: "gaps, repairs and restarts of its event stream" },
];

function stateCell(row) {
  const title = row.why ?? row.inexact ?? (row.idle ? `idle: ${row.idle}` : undefined);
  return { text: row.standing, badge: kindOf(row.standing), title };
}

function cacheCell(row) {
  const text = `${compact(blocksOf(row))} blocks`;
  return row.cache_used === null ? text : { text: share(row.cache_used), share: row.cache_used, title: text };
}

function tokensCell({ recent }) {
  return { text: perSecond(recent.generated_tokens_per_s), title: `${seconds(recent.token_s)} each` };
}

function heardCell(row) {
  const text = age(row.heard_age_s);
  return row.heard_age_s > HEARD_S && row.engine === "warmroute" ? { text, badge: "warn" } : text;
}

function eventsCell(row) {
  if (row.events === null) return "";
  const { gaps, repairs, restarts, digest_mismatches: mismatches, lost_batches: lost } = row.events;
  const told = [
    [gaps, "gap"],
    [repairs, "repair"],
    [restarts, "restart"],
    [mismatches, "mismatch"],
    [lost, "lost batch"],
  ].filter(([count]) => count > 0);
  if (told.length === 0) return { text: "in order", soft: true };
  const text = told.map(([count, noun]) => plural(count, noun));
  return { text: text.join(", "), badge: mismatches || lost ? "bad" : "info" };
}
