/** What keys have used: tokens by day, and sums by key or model. */

import { Chart } from "../chart.js";
import { announce, el, fill, mark, say } from "../dom.js";
import { compact, date, duration, plural, seconds, share, whole } from "../format.js";
import { ask, get } from "../http.js";
import { Totals, sentence, showFailure } from "../parts.js";
import * as places from "../places.js";
import { Poll } from "../poll.js";
import { Table } from "../table.js";
import { KINDS, PERIODS, asked, chosen, daily, figured, ordered, secondsOf, together } from "../usage.js";

const EVERY_S = 15;
const LIMIT = 1000; // rows of the table
const MAX_FIRST = { by: "tokens", descending: true };
const TOTALS = ["Tokens", "From the cache", "Prefill saved", "Requests", "Time to first token"];
const SERIES = [
  { name: "computed_tokens", label: "computed", hue: "var(--hue-0)" },
  { name: "cached_tokens", label: "cached", hue: "var(--warm)" },
  { name: "generated_tokens", label: "generated", hue: "var(--hue-2)" },
];

export function open({ view, choice }) {
  return new UsagePage(view, chosen(choice));
}

class UsagePage {
  constructor(view, choice) {
    this._choice = choice;
    this._order = MAX_FIRST;
    this._rows = [];
    this._isNew = true; // nothing has been told of this choice yet
    this._build(view);
    this._poll = new Poll(
      EVERY_S,
      (signal) => this._read(signal),
      (error) => this._fail(error),
    );
  }

  close() {
    this._poll.close();
    this._chart.close();
  }

  // ---- parts

  _build(view) {
    this._about = el("p");
    this._only = el("div", { class: "narrowed" });
    this._failure = el("div");
    this._notes = el("div", { class: "stack" });
    this._waiting = el("p", { class: "empty", role: "status" }, "Reading what was used\u2026");
    this._totals = new Totals(TOTALS);
    this._chart = new Chart({ title: "Tokens", about: "by day", format: compact, counts: true, days: true, series: SERIES });
    this._figures = el(
      "div",
      { class: "stack live-figures", hidden: true },
      this._totals.node,
      this._chart.node,
      this._tableCard(),
    );
    const periods = PERIODS.map((days) => [days, `${days} days`]);
    const period = el("label", { class: "end small" }, "Last ", this._select("days", periods));
    view.append(
      el("div", { class: "page-head" }, el("h1", {}, "Usage"), this._about, period),
      this._only,
      this._failure,
      this._notes,
      this._waiting,
      this._figures,
    );
    this._showOnly();
  }

  _select(name, options) {
    const change = ({ target }) => this._choose({ [name]: name === "days" ? Number(target.value) : target.value });
    const made = options.map(([value, text]) => el("option", { value, selected: value === this._choice[name] }, text));
    return el("select", { on: { change } }, made);
  }

  _tableCard() {
    this._count = el("span", { class: "soft small" });
    this._filter = el("input", {
      class: "filter",
      type: "search",
      placeholder: "Key or model",
      "aria-label": "Filter usage",
      on: { input: () => this._showRows() },
    });
    this._csv = el("a", { download: "usage.csv", on: { click: (event) => this._download(event) } }, "Download CSV");
    this._tables = el("div");
    const kinds = el("label", { class: "small" }, "By ", this._select("by", Object.entries(KINDS)));
    const end = el("div", { class: "end row" }, this._filter, this._csv);
    const head = el("header", {}, el("h2", {}, "Sums"), kinds, this._count, end);
    return el("section", { class: "card" }, head, this._tables);
  }

  _newTable() {
    const columns = columnsOf(this._choice);
    if (!columns.some(({ sort }) => sort === this._order.by)) this._order = MAX_FIRST;
    this._table = new Table({
      label: "Usage",
      key: (row) => JSON.stringify([row.key, row.model]),
      columns,
      order: this._order,
      onSort: (by) => this._sort(by),
      most: 100,
      empty: "No name is like that.",
    });
    fill(this._tables, this._table.node);
  }

  // ---- what is asked for

  /** In place, so that the focus stays where it is; the address and the way back are as after a link. */
  _choose(changes) {
    this._choice = { ...this._choice, ...changes };
    history.pushState(null, "", places.usage(this._choice));
    this._isNew = true;
    this._showOnly();
    mark(this._figures, "aria-busy", "true");
    this._poll.again();
  }

  _sort(by) {
    const isName = by === "key" || by === "model";
    this._order = { by, descending: this._order.by === by ? !this._order.descending : !isName };
    this._table.sorted(by, this._order.descending);
    this._showRows();
  }

  async _download(event) {
    event.preventDefault(); // a link of the browser's own would not send the key
    try {
      const answer = await ask("GET", this._csv.getAttribute("href"), undefined, { asksForKey: true });
      saved(await answer.blob(), this._csv.download);
    } catch (error) {
      showFailure(this._failure, error);
    }
  }

  // ---- what is shown

  async _read(signal) {
    const of = (more) => get(asked(this._choice, Date.now(), more), { signal });
    const [byDay, sums] = await Promise.all([of({ by: "day" }), of({ by: this._choice.by, limit: LIMIT })]);
    showFailure(this._failure, null);
    say(this._about, `${date(secondsOf(byDay.from))} to ${date(secondsOf(byDay.to))} (UTC)`);
    this._showNotes(byDay);
    mark(this._waiting, "hidden", true);
    mark(this._figures, "hidden", byDay.usage.length === 0);
    mark(this._figures, "aria-busy", null);
    const all = together(byDay.usage);
    this._showTotals(all);
    const columns = daily(byDay);
    this._chart.show(columns.at, (name) => columns[name]);
    this._showSums(sums);
    if (this._isNew) announce(`Last ${this._choice.days} days: ${plural(all.tokens, "token")}`);
    this._isNew = false;
  }

  _fail(error) {
    showFailure(this._failure, error);
    mark(this._waiting, "hidden", true);
    if (this._isNew) mark(this._figures, "hidden", true); // they are what was chosen before
  }

  /** The key and the model that it is narrowed to, with a way back. */
  _showOnly() {
    const told = ["key", "model"]
      .filter((name) => this._choice[name] !== null)
      .map((name) => {
        const all = el("a", { href: places.usage({ ...this._choice, [name]: null, by: name }) }, `all ${name}s`);
        return ["Only the ", name, " ", el("strong", {}, this._choice[name]), " (", all, "). "];
      });
    fill(this._only, told);
  }

  _showNotes({ usage, kept_in: keptIn, since, problem }) {
    const text = JSON.stringify([usage.length === 0, keptIn, since, problem]);
    if (text === this._noted) return;
    this._noted = text;
    fill(
      this._notes,
      problem !== null && el("p", { class: "note bad" }, sentence(`the file of --usage-db fails: ${problem}`)),
      keptIn === "memory" && inMemory(since),
      usage.length === 0 && el("p", { class: "empty" }, "Nothing was used on these days."),
    );
  }

  _showTotals(all) {
    const [computed, cached, generated] = SERIES.map(({ name, label }) => `${compact(all[name])} ${label}`);
    this._totals.show({
      Tokens: [compact(all.tokens), `${computed}, ${cached}, ${generated}`],
      "From the cache": [share(all.cached_share), `of ${compact(all.prompt_tokens)} prompt tokens`],
      "Prefill saved": [duration(all.saved_s), "estimated, by the measured speed of replicas"],
      Requests: [compact(all.requests), all.errors > 0 ? plural(all.errors, "error") : "no errors"],
      "Time to first token": [seconds(all.first_token_mean_s), `mean of ${plural(all.first_tokens, "answer")}`],
    });
  }

  _showSums({ usage, left_out: leftOut }) {
    if (this._isNew) this._newTable();
    mark(this._csv, "href", asked(this._choice, Date.now(), { by: `day,${this._choice.by}`, format: "csv" }));
    const rows = usage.map(figured);
    const most = Math.max(1, ...rows.map((row) => row.tokens));
    const partsOf = (row) => SERIES.map(({ name, hue }) => ({ share: row[name] / most, hue }));
    this._rows = rows.map((row) => ({ ...row, parts: partsOf(row) }));
    this._leftOut = leftOut;
    this._showRows();
  }

  _showRows() {
    const wanted = this._filter.value.trim().toLowerCase();
    const named = ({ key = "", model = "" }) => `${key}\n${model}`.toLowerCase().includes(wanted);
    const matching = this._rows.filter(named);
    const noun = this._choice.by === "key,model" ? "row" : this._choice.by;
    const all = whole(this._rows.length + this._leftOut);
    const among = this._leftOut > 0 ? ` of ${all}; these have the most tokens` : "";
    say(this._count, `${plural(matching.length, noun)}${among}`);
    this._table.show(ordered(matching, this._order.by, this._order.descending));
  }
}

function inMemory(since) {
  const began = `since the router started on ${date(secondsOf(since))}`;
  return el(
    "p",
    { class: "note" },
    `This is kept in memory, ${began}, and lost when it ends. `,
    el("code", {}, "--usage-db usage.db"),
    " keeps it in a file.",
  );
}

function saved(blob, name) {
  const href = URL.createObjectURL(blob);
  el("a", { href, download: name }).click();
  URL.revokeObjectURL(href);
}

function columnsOf(choice) {
  const named = choice.by.split(",").map((name, place) => ({
    title: name === "key" ? "Key" : "Model",
    sort: name,
    head: place === 0,
    cell: (row) => ({ text: row[name], title: row[name], href: narrower(choice, name, row[name]) }),
  }));
  return [...named, ...FIGURES];
}

/** A row of one name leads to its parts. */
const narrower = (choice, name, value) =>
  places.usage({ ...choice, [name]: value, by: name === "key" ? "model" : "key" });

const counted = (title, name, about) => ({
  title,
  sort: name,
  right: true,
  about,
  cell: (row) => compact(row[name]),
});

const FIGURES = [
  {
    title: "Tokens",
    sort: "tokens",
    right: true,
    about: "computed, cached and generated; the bar compares rows",
    cell: (row) => ({ text: compact(row.tokens), parts: row.parts }),
  },
  counted("Computed", "computed_tokens", "prompt tokens"),
  counted("Cached", "cached_tokens", "prompt tokens"),
  counted("Generated", "generated_tokens", "tokens of answers"),
  {
    title: "From cache",
    sort: "cached_share",
    right: true,
    about: "share of prompt tokens",
    cell: (row) => ({ text: share(row.cached_share), share: row.cached_share ?? 0 }),
  },
  counted("Requests", "requests", "that have ended"),
  counted("Errors", "errors", "of clients and of the server"),
  {
    title: "TTFT",
    sort: "first_token_mean_s",
    right: true,
    about: "mean time to first token",
    cell: (row) => seconds(row.first_token_mean_s),
  },
  {
    title: "Saved",
    sort: "saved_s",
    right: true,
    about: "prefill that the cache saved, estimated",
    cell: (row) => duration(row.saved_s),
  },
];
