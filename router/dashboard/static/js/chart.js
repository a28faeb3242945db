/** Lines over time: axes with units, a legend that switches lines, a cursor, words and a table that say the same. */

import { announce, el, fill, mark, say, svg } from "./dom.js";
import { clock, date, dateOfYear, minutes } from "./format.js";
import { linear, ticks, timeTicks } from "./scale.js";

const HEIGHT = 190;
const TOP = 8;
const BOTTOM = 22;
const RIGHT = 26;
const LEFT = 52;
const TABLE_ROWS = 90;
const LEAST_SPAN_S = 30;

/**
 * A series is `{name, label, hue, dashed?}`; `format` writes a value with its unit; `top` fixes the axis' end; `counts`:
 * there are no halves; `days`: a point is a day.
 */
export class Chart {
  constructor({ title, about = "", series, format, top = null, counts = false, days = false }) {
    this._title = title;
    this._series = series.map((one) => ({ ...one, on: true }));
    this._format = format;
    this._fixedTop = top;
    this._leastStep = counts ? 1 : 0; // of what there is no half of
    this._days = days;
    this._moment = days ? date : clock;
    this._at = new Float64Array();
    this._values = new Map();
    this._cursor = null; // which point the pointer or the keyboard is at
    this._build(about);
    this._watch = new ResizeObserver(() => this._draw());
    this._watch.observe(this._plot);
  }

  close() {
    this._watch.disconnect();
  }

  /** `at` in unix seconds; `values(name)` as many, NaN where nothing is known. */
  show(at, values) {
    this._at = at;
    this._values = new Map(this._series.map((one) => [one.name, values(one.name)]));
    if (this._cursor !== null && this._cursor >= at.length) this._cursor = null;
    this._draw();
    say(this._summary, this._words());
    if (this._details.open) this._fillTable();
  }

  // ---- parts

  _build(about) {
    this._tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    this._svg = svg("svg", { height: HEIGHT, "aria-hidden": "true" });
    this._plot = el(
      "div",
      {
        class: "chart",
        tabindex: "0",
        role: "img",
        "aria-label": this._title,
        on: {
          pointermove: (event) => this._point(event),
          pointerleave: () => this._moveTo(null),
          keydown: (event) => this._key(event),
          blur: () => this._moveTo(null),
        },
      },
      this._svg,
      this._tip,
    );
    this._summary = el("p", { class: "chart-summary soft small" });
    this._table = el("div", {
      class: "table-box",
      tabindex: "0",
      role: "region",
      "aria-label": `${this._title}, figures`,
    });
    this._details = el(
      "details",
      { class: "chart-table", on: { toggle: () => (this._details.open ? this._fillTable() : fill(this._table)) } },
      el("summary", {}, "As a table"),
      this._table,
    );
    const heading = el("h2", {}, this._title, about && el("span", { class: "soft small" }, ` ${about}`));
    const head = el(
      "header",
      {},
      heading,
      el(
        "div",
        { class: "legend end" },
        this._series.map((one) => this._switch(one)),
      ),
    );
    this.node = el("section", { class: "card" }, head, this._plot, this._summary, this._details);
  }

  _switch(one) {
    const swatch = el("span", { class: "swatch", style: { "--hue": one.hue } });
    const toggle = () => {
      one.on = !one.on;
      mark(button, "aria-pressed", String(one.on));
      this._draw();
    };
    const button = el("button", { type: "button", "aria-pressed": "true", on: { click: toggle } }, swatch, one.label);
    return button;
  }

  _words() {
    const last = this._at.length - 1;
    if (last < 0) return "No figures yet.";
    const told = this._series.map((one) => {
      const values = this._values.get(one.name).filter((value) => !Number.isNaN(value));
      if (values.length === 0) return `${one.label}: nothing yet`;
      const now = this._format(values.at(-1));
      return `${one.label} ${now} (${this._format(least(values))} to ${this._format(most(values))})`;
    });
    return `Last: ${told.join(", ")}.`;
  }

  _fillTable() {
    const first = Math.max(0, this._at.length - TABLE_ROWS);
    const rows = [];
    for (let place = this._at.length - 1; place >= first; place--) {
      const cells = this._series.map((one) => el("td", { class: "right" }, this._written(one, place)));
      rows.push(el("tr", {}, el("th", { scope: "row" }, this._moment(this._at[place])), cells));
    }
    const heads = this._series.map((one) => el("th", { scope: "col", class: "right" }, one.label));
    const head = el("thead", {}, el("tr", {}, el("th", { scope: "col" }, this._days ? "Day" : "Time"), heads));
    fill(this._table, el("table", {}, head, el("tbody", {}, rows)));
  }

  _written(one, place) {
    return this._format(this._values.get(one.name)[place]);
  }

  _shown() {
    return this._series.filter((one) => one.on);
  }

  /** Names and values of one moment. */
  _told(place) {
    return this._shown().map((one) => [one.label, this._written(one, place)]);
  }

  // ---- drawing

  _draw() {
    const width = this._plot.clientWidth;
    if (width === 0) return;
    mark(this._svg, "viewBox", `0 0 ${width} ${HEIGHT}`);
    if (this._at.length === 0) {
      fill(this._svg, svg("text", { class: "chart-none", x: LEFT, y: HEIGHT / 2 }, "No figures yet"));
      return;
    }
    this._scale(width);
    fill(this._svg, this._axes(width), this._lines(), this._cursorMarks());
    this._showTip(width);
  }

  _scale(width) {
    const top = Math.max(0, ...this._shown().map((one) => most(this._values.get(one.name))));
    this._ticks = ticks(this._fixedTop ?? top, 4, this._leastStep);
    this._span = [this._at[0], Math.max(this._at.at(-1), this._at[0] + LEAST_SPAN_S)];
    this._x = linear(...this._span, LEFT, width - RIGHT);
    this._y = linear(0, this._ticks.at(-1), HEIGHT - BOTTOM, TOP);
  }

  _axes(width) {
    const marks = [];
    for (const value of this._ticks) {
      const y = this._y(value);
      marks.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
      marks.push(svg("text", { class: "axis", x: LEFT - 7, y: y + 4, "text-anchor": "end" }, this._format(value)));
    }
    const [from, to] = this._span;
    const label = this._days ? dateOfYear : to - from < 300 ? clock : minutes;
    for (const at of timeTicks(from, to, Math.max(2, Math.floor(width / 90)))) {
      const x = this._x(at);
      marks.push(svg("line", { class: "grid", x1: x, x2: x, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }));
      marks.push(svg("text", { class: "axis", x, y: HEIGHT - 4, "text-anchor": "middle" }, label(at)));
    }
    return marks;
  }

  _lines() {
    return this._shown().map((one) => {
      const style = { "--hue": one.hue };
      const [path, dots] = through(this._values.get(one.name), (place) => this._x(this._at[place]), this._y);
      const alone = dots.map(([cx, cy]) => svg("circle", { class: "dot", cx, cy, r: 3, style }));
      return [svg("path", { class: one.dashed ? "line dashed" : "line", d: path, style }), alone];
    });
  }

  // ---- the cursor

  _cursorMarks() {
    if (this._cursor === null) return [];
    const x = this._x(this._at[this._cursor]);
    const dots = this._shown()
      .filter((one) => !Number.isNaN(this._values.get(one.name)[this._cursor]))
      .map((one) => {
        const cy = this._y(this._values.get(one.name)[this._cursor]);
        return svg("circle", { class: "dot", cx: x, cy, r: 4, style: { "--hue": one.hue } });
      });
    return [svg("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }), dots];
  }

  _showTip(width) {
    mark(this._tip, "hidden", this._cursor === null);
    if (this._cursor === null) return;
    const figures = this._told(this._cursor).map(([label, value]) => [el("dt", {}, label), el("dd", {}, value)]);
    fill(this._tip, el("strong", {}, this._moment(this._at[this._cursor])), el("dl", {}, figures));
    const x = this._x(this._at[this._cursor]);
    const left = x > width / 2 ? x - this._tip.offsetWidth - 12 : x + 12;
    this._tip.style.left = `${Math.max(0, left)}px`;
  }

  _point(event) {
    if (this._at.length === 0 || this._x === undefined) return;
    const x = event.clientX - this._plot.getBoundingClientRect().left;
    let nearest = 0;
    this._at.forEach((at, place) => {
      if (Math.abs(this._x(at) - x) < Math.abs(this._x(this._at[nearest]) - x)) nearest = place;
    });
    this._moveTo(nearest);
  }

  _key(event) {
    const last = this._at.length - 1;
    const from = this._cursor ?? last;
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this._moveTo(Math.max(0, Math.min(last, to)));
    const told = this._told(this._cursor).map((words) => words.join(" "));
    announce(`${this._moment(this._at[this._cursor])}: ${told.join(", ")}`);
  }

  _moveTo(place) {
    if (place === this._cursor) return;
    this._cursor = place;
    this._draw();
  }
}

const most = (values) => values.reduce((found, value) => (value > found ? value : found), Number.NEGATIVE_INFINITY);
const least = (values) => values.reduce((found, value) => (value < found ? value : found), Number.POSITIVE_INFINITY);

/** A path that breaks where nothing is known, and the points that nothing leads to. */
function through(values, x, y) {
  let path = "";
  const alone = [];
  values.forEach((value, place) => {
    if (Number.isNaN(value)) return;
    const begins = place === 0 || Number.isNaN(values[place - 1]);
    const ends = place === values.length - 1 || Number.isNaN(values[place + 1]);
    const point = [x(place).toFixed(1), y(value).toFixed(1)];
    if (begins && ends) alone.push(point);
    path += `${begins ? "M" : "L"}${point.join(" ")}`;
  });
  return [path, alone];
}

/** A line without axes, for beside a figure. */
export function spark(values, hue) {
  const known = [...values].filter((value) => !Number.isNaN(value));
  const x = linear(0, Math.max(1, values.length - 1), 1, 99);
  const [path] = through(values, x, linear(0, Math.max(...known, 1e-9), 19, 1));
  const line = svg("path", { class: "line", d: path, style: { "--hue": hue }, "vector-effect": "non-scaling-stroke" });
  return svg(
    "svg",
    { class: "spark chart", viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true" },
    line,
  );
}
