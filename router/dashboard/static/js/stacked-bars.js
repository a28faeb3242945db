/** Amounts by day, one upon the other. */

import { Chart } from "./chart.js";
import { svg } from "./dom.js";
import { date, dateOfYear } from "./format.js";

const DAY_S = 86_400;
const FILLED = 0.8; // of a day's width

/** A `Chart` with a moment for each day: `series` from the ground up, of one unit. */
export class StackedBars extends Chart {
  constructor(options) {
    super({ ...options, moment: date, axis: "Day" });
  }

  // ---- axes

  _top() {
    return Math.max(0, ...this._sums());
  }

  _ends() {
    return [this._at[0] - DAY_S / 2, this._at.at(-1) + DAY_S / 2];
  }

  /** Counted from the last day, so that it always has a label. */
  _labels(count) {
    const step = Math.ceil(this._at.length / count);
    const labelled = this._at.filter((_, place) => (this._at.length - 1 - place) % step === 0);
    return [...labelled].map((at) => [at, dateOfYear(at)]);
  }

  // ---- words

  _told(place) {
    const told = super._told(place);
    return told.length > 1 ? [...told, ["total", this._format(this._sums()[place])]] : told;
  }

  _words() {
    const sums = this._sums();
    const most = Math.max(0, ...sums);
    if (most === 0) return "No tokens on these days.";
    const place = sums.indexOf(most);
    const told = this._told(place).map((words) => words.join(" "));
    return `Most on ${date(this._at[place])}: ${told.join(", ")}.`;
  }

  // ---- drawing

  _drawn() {
    const ground = new Float64Array(this._at.length);
    return this._shown().map((one) => {
      const style = { "--hue": one.hue };
      return svg("path", { class: "bar", d: this._layer(one, ground), style });
    });
  }

  /** The boxes of one series upon the `ground`, which they raise. */
  _layer(one, ground) {
    const width = this._dayWidth() * FILLED;
    let path = "";
    this._values.get(one.name).forEach((value, place) => {
      const [from, to] = [ground[place], ground[place] + value].map((height) => this._y(height).toFixed(1));
      const left = this._x(this._at[place]) - width / 2;
      if (value > 0) path += `M${left.toFixed(1)} ${from}V${to}h${width.toFixed(1)}V${from}Z`;
      ground[place] += value;
    });
    return path;
  }

  _cursorMarks() {
    if (this._cursor === null) return [];
    const width = this._dayWidth();
    const [top, bottom] = [this._y(this._ticks.at(-1)), this._y(0)];
    const x = this._x(this._at[this._cursor]) - width / 2;
    return [svg("rect", { class: "day", x, y: top, width, height: bottom - top })];
  }

  _dayWidth() {
    return this._x(DAY_S) - this._x(0);
  }

  /** What is shown of each day. */
  _sums() {
    const shown = this._shown().map((one) => this._values.get(one.name));
    return Array.from(this._at, (_, place) => shown.reduce((sum, values) => sum + values[place], 0));
  }
}
