/** What prefixes share and who holds them: as bars to zoom into, as a list, and one of them closely. */

import { el, fill, mark, say } from "./dom.js";
import { age, ago, plural, plurals, shortened, whole } from "./format.js";
import { Icicle } from "./icicle.js";
import { card } from "./parts.js";
import { replica } from "./places.js";

const MAX_CHIPS = 40;
const ROOT = "root";

/** `noun` is what a bar's width counts; `hue(name)` a replica's colour. */
export class PrefixTree {
  constructor({ title, noun, hue }) {
    this._noun = noun;
    this._hue = hue;
    this._by = "prompts";
    this._highlight = null;
    this._answer = null;
    this._build(title);
    mark(this._icicle.node, "hidden", true);
  }

  close() {
    this._icicle.close();
  }

  /** An answer of GET /prefixes; `trunk` says what all of it is. */
  show(answer, trunk) {
    this._answer = answer;
    this._trunkTitle = trunk;
    this._show();
  }

  // ---- parts

  _build(title) {
    this._icicle = new Icicle({
      label: "Prefix tree as bars. The list says the same in words.",
      looked: (path) => this._look(path),
      zoomed: (path) => this._crumb(path),
    });
    this._crumbs = el("ol", { class: "plain crumbs" });
    this._holders = el("div", { class: "row holder-key" });
    this._list = el("div", { hidden: true });
    this._empty = el("p", { class: "empty", role: "status" }, "Reading the tree\u2026");
    this._detail = el("div", { class: "stack" }, el("p", { class: "soft" }, "Point at a bar."));
    const looks = segmented(
      [
        ["Bars", true],
        ["List", false],
      ],
      (asBars) => this._switch(asBars),
    );
    this._weights = segmented(
      [
        [`By ${plurals(this._noun)}`, "prompts"],
        ["By tokens", "tokens"],
      ],
      (by) => this._weigh(by),
    );
    this._weights.title = "What the width of a bar stands for";
    this._models = el("select", { "aria-label": "Model", hidden: true, on: { change: () => this._show() } });
    this._picture = el("div", { class: "stack" }, el("nav", { "aria-label": "Zoom" }, this._crumbs), this._icicle.node);
    const tools = el("div", { class: "end row" }, this._models, this._weights, looks);
    this.node = el(
      "section",
      { class: "card live-figures" },
      el("header", {}, el("h2", {}, title), tools),
      el("div", { class: "stack" }, this._holders, this._picture, this._list, this._empty),
    );
    this.detail = card("This part", this._detail);
  }

  _switch(asBars) {
    mark(this._picture, "hidden", !asBars);
    mark(this._weights, "hidden", !asBars);
    mark(this._list, "hidden", asBars);
    this._show();
  }

  _weigh(by) {
    this._by = by;
    this._show();
  }

  // ---- what is shown

  _show() {
    if (this._answer === null) return;
    const prefixes = this._ofModel();
    say(this._empty, `No two ${plurals(this._noun)} have begun alike yet.`);
    mark(this._empty, "hidden", prefixes.length > 0);
    mark(this._icicle.node, "hidden", prefixes.length === 0);
    this._showHolders(prefixes);
    if (!this._list.hidden) {
      fill(this._list, this._listed(prefixes));
      return;
    }
    this._icicle.show(this._trunk(prefixes));
    this._icicle.highlight(this._highlight);
  }

  /** All of them, or those of the model that was chosen. */
  _ofModel() {
    const { prefixes } = this._answer;
    const names = [...new Set(prefixes.map(({ model }) => model))].sort();
    mark(this._models, "hidden", names.length < 2);
    if (names.join("\n") !== this._names) {
      this._names = names.join("\n");
      fill(
        this._models,
        el("option", { value: "" }, "All models"),
        names.map((name) => el("option", { value: name }, name)),
      );
    }
    const chosen = this._models.value;
    return chosen === "" ? prefixes : prefixes.filter(({ model }) => model === chosen);
  }

  _trunk(prefixes) {
    const below = prefixes.map((prefix) => this._bar(prefix));
    const weight = below.reduce((sum, one) => sum + one.weight, 0);
    const title = this._trunkTitle;
    const under = plural(counted(prefixes), "part");
    return { id: ROOT, weight, title, under, label: `${title}, ${under}`, holders: [], trunk: true, below };
  }

  _bar(prefix) {
    const below = prefix.below.map((one) => this._bar(one));
    const tokens = prefix.tokens + below.reduce((sum, one) => sum + one.tokens, 0);
    return {
      id: prefix.id,
      weight: this._by === "prompts" ? prefix.prompts : tokens,
      tokens,
      title: shortened(firstLine(prefix.text) || `from token ${whole(prefix.begin)}`, 120),
      under: `${sized(prefix)}, ${plural(prefix.prompts, this._noun)}${kept(prefix)}`,
      label: this._told(prefix),
      holders: prefix.replicas.map((name) => ({ name, hue: this._hue(name) })),
      prefix,
      below,
    };
  }

  _showHolders(prefixes) {
    const names = [...new Set(holdersOf(prefixes))].sort((one, other) =>
      one.localeCompare(other, "en", { numeric: true }),
    );
    const text = names.join("\n");
    if (text === this._holderText) return;
    this._holderText = text;
    if (!names.includes(this._highlight)) this._highlight = null;
    const chip = (name, words, swatch) =>
      el(
        "button",
        { type: "button", "aria-pressed": String(this._highlight === name), on: { click: () => this._choose(name) } },
        swatch,
        words,
      );
    const chips = names
      .slice(0, MAX_CHIPS)
      .map((name) => chip(name, name, el("span", { class: "swatch", style: { "--hue": this._hue(name) } })));
    fill(this._holders, el("span", { class: "soft small" }, "Held by"), chip(null, "any", null), chips);
  }

  _choose(name) {
    this._highlight = name;
    this._holderText = null;
    this._showHolders(this._ofModel());
    this._icicle.highlight(name);
  }

  _crumb(path) {
    const text = path.map(({ id, title }) => `${id} ${title}`).join("\n");
    if (text === this._crumbText) return;
    this._crumbText = text;
    const last = path.length - 1;
    const crumbs = path.map(({ id, title }, place) => {
      const words = place === 0 ? "All" : shortened(title, 40);
      return place === last
        ? el("li", {}, el("span", { "aria-current": "true" }, words))
        : el("li", {}, el("button", { type: "button", on: { click: () => this._icicle.zoom(id) } }, words));
    });
    fill(this._crumbs, crumbs);
  }

  _look(path) {
    const { prefix } = path.at(-1);
    if (prefix === undefined) return;
    const told = this._told(prefix);
    // What somebody reads by the keyboard is not taken from under the cursor.
    const isRead = prefix.id === this._detailId && this._detail.contains(document.activeElement);
    if (told === this._detailText || isRead) return;
    this._detailText = told;
    this._detailId = prefix.id;
    fill(this._detail, this._close(prefix));
  }

  // ---- words

  _told(prefix) {
    const words = prefix.text ? `: ${shortened(firstLine(prefix.text), 80)}` : "";
    const counted = plural(prefix.prompts, this._noun);
    const where = `${sized(prefix)} from token ${whole(prefix.begin)}`;
    return `${where}, ${counted}, last ${ago(prefix.idle_s)}, ${heldBy(prefix)}${kept(prefix)}${words}`;
  }

  _close(prefix) {
    const counted = plural(prefix.prompts, this._noun);
    const where = `from token ${whole(prefix.begin)} on, in ${counted}; last ${ago(prefix.idle_s)}.`;
    const text =
      prefix.text === null
        ? null
        : el(
            "div",
            { class: "prefix-text", tabindex: "0", role: "region", "aria-label": "How it begins" },
            prefix.text,
          );
    return [el("p", {}, el("strong", {}, sized(prefix)), ` ${where}`), this._holdersOf(prefix), retention(prefix), text];
  }

  _holdersOf({ held_by: count, replicas, sources }) {
    if (count === 0)
      return el(
        "p",
        { class: "note warn" },
        "No replica holds all of it: the next prompt that begins so is computed anew.",
      );
    const items = replicas.map((name) => {
      const swatch = el("span", { class: "swatch", style: { "--hue": this._hue(name) } });
      return el("li", {}, swatch, el("a", { href: replica(name) }, name), slower(sources, name));
    });
    const more = count > replicas.length ? el("li", {}, `and ${whole(count - replicas.length)} more`) : null;
    return el("ul", { class: "plain row" }, el("li", { class: "soft" }, "Held, with all before it, by"), items, more);
  }

  _listed(prefixes) {
    if (prefixes.length === 0) return null;
    return el(
      "ul",
      { class: "prefix-list" },
      prefixes.map((prefix) => el("li", {}, this._told(prefix), this._listed(prefix.below))),
    );
  }
}

const sized = (prefix) => `${prefix.exact ? "" : "about "}${plural(prefix.tokens, "token")}`;

const firstLine = (text) => (text ?? "").trim().replace(/\s+/g, " ");

const MEMORY = { CPU: " (host memory)", STORAGE: " (disk)" };

/** The slower memory that a replica needs for a prefix, if it does. */
const slower = (sources, name) => MEMORY[sources?.[name]] ?? "";

function heldBy({ held_by: count, replicas, sources }) {
  if (count === 0) return "held by nobody";
  const more = count > replicas.length ? ` and ${count - replicas.length} more` : "";
  return `held by ${replicas.map((name) => name + slower(sources, name)).join(", ")}${more}`;
}

/** For how long replicas give it up last, if they do. */
const kept = ({ retained_s: left }) => (left == null ? "" : `, kept ${age(left)}`);

const retention = ({ retained_s: left }) =>
  left == null ? null : el("p", { class: "note" }, `Given up last for another ${age(left)}; each use renews it.`);

/** How many there are, those below them included. */
const counted = (prefixes) => prefixes.reduce((sum, { below }) => sum + 1 + counted(below), 0);

const holdersOf = (prefixes) => prefixes.flatMap(({ replicas, below }) => [...replicas, ...holdersOf(below)]);

/** Buttons of which one is pressed. */
function segmented(choices, chosen) {
  const buttons = choices.map(([words, value], place) => {
    const press = () => {
      for (const button of buttons) mark(button, "aria-pressed", String(button === buttons[place]));
      chosen(value);
    };
    return el("button", { type: "button", "aria-pressed": String(place === 0), on: { click: press } }, words);
  });
  return el("div", { class: "segmented", role: "group" }, buttons);
}
