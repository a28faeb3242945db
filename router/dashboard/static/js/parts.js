/** Pieces that several pages show: states, totals, facts, alerts. */

import { el, fill, mark, say } from "./dom.js";
import { clock, duration } from "./format.js";
import { wantsKey } from "./http.js";
import { askForKey } from "./keys.js";
import { replica } from "./places.js";

const KINDS = {
  down: "bad",
  draining: "warn",
  exact: "good",
  lagging: "warn",
  partial: "warn",
  syncing: "info",
  approximate: "info",
};

/** The blocks of all media. */
export const blocksOf = ({ index }) => Object.values(index.blocks).reduce((sum, count) => sum + count, 0);

export const kindOf = (state) => KINDS[state] ?? "";

export const badge = (text, kind = kindOf(text)) => el("span", { class: `badge ${kind}` }, text);

/** Large figures that are renewed in place: `show({name: [value, below, spark?]})`. */
export class Totals {
  constructor(names) {
    this._cells = new Map(
      names.map((name) => {
        const value = el("span");
        const below = el("small");
        const drawn = el("div");
        return [name, { value, below, drawn }];
      }),
    );
    const boxes = [...this._cells].map(([name, { value, below, drawn }]) =>
      el("div", { class: "total" }, el("dt", {}, name), el("dd", {}, value, below, drawn)),
    );
    this.node = el("dl", { class: "totals live-figures" }, boxes);
  }

  show(figures) {
    for (const [name, [value, below = "", drawn = null]] of Object.entries(figures)) {
      const cell = this._cells.get(name);
      say(cell.value, value);
      say(cell.below, below);
      if (drawn !== null) fill(cell.drawn, drawn);
    }
  }
}

/** Names and values, one under the other; a value may be an element. */
export const facts = (entries) =>
  el(
    "dl",
    { class: "facts" },
    entries.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
  );

export const card = (title, ...content) =>
  el("section", { class: "card" }, el("header", {}, el("h2", {}, title)), content);

/** What the doctor finds: what is wrong, and what to do. */
export function alertNote(alert) {
  const where = alert.replica === null ? null : el("a", { href: replica(alert.replica) }, alert.replica);
  const figures = Object.entries(alert.figures ?? {})
    .filter(([, value]) => typeof value === "number") // what is text stands in the sentence already
    .map(([name, value]) => `${name.replaceAll("_", " ")} ${value.toLocaleString("en")}`);
  return el(
    "li",
    { class: "note warn alert" },
    el("div", { class: "row" }, badge(alert.rule, "warn"), where),
    el("p", {}, withCode(sentence(alert.what))),
    el("p", {}, el("strong", {}, "What to do: "), withCode(sentence(alert.turn))),
    figures.length > 0 && el("p", { class: "soft small" }, figures.join(", ")),
    el("p", { class: "soft small" }, "More: ", el("code", {}, `docs/troubleshooting.md#${alert.rule}`)),
  );
}

/** The line that follows an alert which is over. */
export function endedNote({ rule, replica: name, since, until }) {
  const where = name === null ? null : el("a", { href: replica(name) }, name);
  const times = `over since ${clock(until)}, after ${duration(until - since)}`;
  return el("li", { class: "soft small" }, el("div", { class: "row" }, badge(rule), where, el("span", {}, times)));
}

/** What stands between backticks is code. */
function withCode(text) {
  return text.split("`").map((part, place) => (place % 2 === 1 ? el("code", {}, part) : part));
}

export const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;

/** What went wrong, where a page's own figures would stand. */
export function failure(error) {
  const give = () => askForKey(error.message, { insist: true });
  const button = wantsKey(error) && el("button", { type: "button", on: { click: give } }, "Give a key");
  return el("p", { class: "note bad", role: "alert" }, sentence(error.message), button && [" ", button]);
}

/** The same in a place of its own, for what is asked again and again; null: nothing is wrong any more. */
export function showFailure(node, error) {
  const words = error === null ? null : error.message;
  if (node.getAttribute("data-told") === words) return; // an alert is read out whenever it is put there
  mark(node, "data-told", words);
  fill(node, error === null ? null : failure(error));
}

/** The models that can be chosen; who has chosen one keeps it while it is there. None: they are not known. */
export function offer(select, names) {
  if (names.length === 0) return;
  const before = [...select.options].map(({ value }) => value);
  if (JSON.stringify(before) === JSON.stringify(names)) return;
  const chosen = select.value;
  fill(
    select,
    names.map((name) => el("option", { value: name, selected: name === chosen }, name)),
  );
}
