/** A table that is sorted by its heads and renewed in place, so that focus and selection stay where they are. */

import { el, fill, mark, say } from "./dom.js";
import { whole } from "./format.js";

/**
 * `key(row)` is what a row is known by; of equal ones each has a line, and only the order tells them apart.
 *
 * A column is `{title, cell, sort?, right?, head?, wrap?, wide?, about?}`, `wide` where a phone leaves it out. `cell(row)` returns text, or
 * `{text, href?, badge?, share?, parts?, hues?, depth?, title?, soft?}`, with `parts` of one bar as `{share, hue}`. Of more
 * rows than `most` the rest is behind a button.
 */
export class Table {
  constructor({
    label,
    columns,
    key,
    order = null,
    onSort = null,
    empty = "Nothing here.",
    rowClass = null,
    most = 1000,
  }) {
    this._columns = columns;
    this._key = key;
    this._rowClass = rowClass;
    this._rows = new Map();
    this._most = most;
    this._heads = columns.map((column) => this._head(column, onSort));
    this._body = el("tbody");
    this._empty = el("p", { class: "empty", hidden: true }, empty);
    const table = el("table", { "aria-label": label }, el("thead", {}, el("tr", {}, this._heads)), this._body);
    // A region that scrolls must be reached by the keyboard.
    this._box = el("div", { class: "table-box", tabindex: "0", role: "region", "aria-label": label }, table);
    this._more = el("button", { type: "button", class: "after", hidden: true, on: { click: () => this._showAll() } });
    this.node = el("div", {}, this._box, this._empty, this._more);
    if (order !== null) this.sorted(order.by, order.descending);
  }

  show(rows) {
    mark(this._box, "hidden", rows.length === 0);
    mark(this._empty, "hidden", rows.length > 0);
    mark(this._more, "hidden", rows.length <= this._most);
    say(this._more, `Show ${whole(rows.length - this._most)} more`);
    this._all = rows;
    const before = this._rows;
    this._rows = new Map();
    rows.slice(0, this._most).forEach((row, place) => {
      const key = this._key(row);
      const line = before.get(key) ?? this._line();
      before.delete(key);
      this._rows.set(key, line);
      this._write(line, row);
      if (this._body.children[place] !== line) this._body.insertBefore(line, this._body.children[place] ?? null);
    });
    while (this._body.children.length > Math.min(rows.length, this._most)) this._body.lastChild.remove();
  }

  /** The words of a table without rows. */
  says(empty) {
    say(this._empty, empty);
  }

  sorted(by, descending) {
    this._columns.forEach((column, place) => {
      const sorts = column.sort !== undefined && column.sort === by;
      mark(this._heads[place], "aria-sort", sorts ? (descending ? "descending" : "ascending") : null);
    });
  }

  _showAll() {
    this._most = Number.POSITIVE_INFINITY;
    this.show(this._all);
  }

  _head(column, onSort) {
    const sortable = column.sort !== undefined && onSort !== null;
    const title = sortable
      ? el("button", { type: "button", on: { click: () => onSort(column.sort) } }, column.title)
      : column.title;
    return el("th", { scope: "col", class: classOf(column), title: column.about }, title);
  }

  _line() {
    const cells = this._columns.map((column) =>
      column.head
        ? el("th", { scope: "row" })
        : el("td", { class: classOf(column) }),
    );
    return el("tr", {}, cells);
  }

  _write(line, row) {
    if (this._rowClass !== null) mark(line, "class", this._rowClass(row));
    this._columns.forEach((column, place) => written(line.children[place], column.cell(row)));
  }
}

const classOf = (column) => ["right", "wrap", "wide"].filter((name) => column[name]).join(" ") || null;

const shown = new WeakMap();

function written(cell, content) {
  if (typeof content === "string") {
    if (shown.delete(cell)) fill(cell, content);
    else say(cell, content);
    return;
  }
  const text = JSON.stringify(content);
  if (shown.get(cell) === text) return;
  shown.set(cell, text);
  mark(cell, "title", content.title);
  fill(cell, pieces(content));
}

function pieces({ text, href, badge, share, parts, hues = [], depth = 0, soft }) {
  const swatches = hues.map((hue) => el("span", { class: "swatch", style: { "--hue": hue } }));
  const indent = depth > 0 && el("span", { class: "indent", style: { "--depth": depth } });
  let words = text;
  if (badge !== undefined) words = el("span", { class: `badge ${badge}` }, text);
  if (href !== undefined) words = el("a", { href }, text);
  if (soft) words = el("span", { class: "soft" }, words);
  const bar = share === undefined ? parts && meterOf(parts) : meter(share);
  return [indent, swatches, bar ? el("span", { class: "barred" }, bar, el("span", {}, words)) : words];
}

/** A share as a bar, beside its number. */
export const meter = (share) => meterOf([{ share }]);

function meterOf(parts) {
  const pieces = parts.map(({ share, hue }) => {
    const width = `${Math.round(Math.max(0, Math.min(1, share ?? 0)) * 1000) / 10}%`;
    return el("span", { style: hue === undefined ? { width } : { width, "--hue": hue } });
  });
  return el("span", { class: "meter", "aria-hidden": "true" }, pieces);
}
