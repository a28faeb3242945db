/** A recording of event streams: what was held over time, what happened, and the tree at the moment that is chosen. */

import { Chart } from "./chart.js";
import { el, fill, mark, say } from "./dom.js";
import { clock, compact, day, plural, seconds, whole } from "./format.js";
import { get } from "./http.js";
import { card, failure } from "./parts.js";
import { PrefixTree, counted } from "./prefix-tree.js";
import { Table } from "./table.js";
import { themed } from "./theme.js";
import { WORDS } from "./troubles.js";

const HUES = 12;
const STEPS = 1000; // of the slider
const MOVING_MS = 200;
const KINDS = {
  ...WORDS,
  session: ["recorder restarted", "info", "the recorder was started again; what was before is not known"],
};
const HUE_OF = { good: "var(--good)", warn: "var(--warn)", bad: "var(--bad)", info: "var(--info)" };

class RecordingPage {
  constructor(view, about) {
    this._about = about;
    this._asking = null;
    this._build(view);
    this._draw();
    this._move(about.end);
  }

  // ---- parts

  _build(view) {
    const { name, replicas } = this._about;
    const hue = (replica) => this._hue(replica);
    this._problem = el("div");
    this._chart = this._chartOf(
      "Blocks held",
      "click a moment",
      replicas.map((one) => ({ name: one, label: one, hue: hue(one) })),
    );
    this._flow = this._chartOf("Blocks stored and removed", `in ${seconds(this._everyS())}`, [
      { name: "stored", label: "stored", hue: "var(--hue-2)" },
      { name: "removed", label: "removed", hue: "var(--hue-7)" },
    ]);
    this._tree = new PrefixTree({ title: "The tree at that moment", noun: "branch", hue, linked: false });
    view.append(
      el("div", { class: "page-head" }, el("h1", {}, name), el("p", {}, this._summary())),
      this._remarks(),
      el("div", { class: "columns" }, this._chart.node, this._flow.node),
      this._momentCard(),
      this._problem,
      this._tree.node,
      this._tree.detail,
      card("What happened", this._happened()),
    );
  }

  _chartOf(title, about, series) {
    return new Chart({
      title,
      about,
      series,
      format: compact,
      counts: true,
      leastSpanS: 0,
      picked: (at) => this._move(at),
    });
  }

  _everyS() {
    const { begin, end, timeline } = this._about;
    return (end - begin) / timeline.at.length;
  }

  _summary() {
    const { begin, end, replicas, redacted, texts } = this._about;
    const words = redacted ? "; redacted" : texts ? "" : "; --tokenizer DIR would show text";
    return `${plural(replicas.length, "replica")}, ${day(begin)}, ${seconds(end - begin)}${words}`;
  }

  _remarks() {
    const { damage } = this._about;
    return el("div", {}, damage.length > 0 && el("p", { class: "note warn" }, `Damaged: ${damage.join("; ")}.`));
  }

  _draw() {
    const { timeline, marks } = this._about;
    const at = Float64Array.from(timeline.at);
    this._chart.show(at, (name) => Float64Array.from(timeline.resident[name]));
    this._flow.show(at, (name) => Float64Array.from(timeline[name]));
    this._chart.mark(marks.map((one) => ({ at: one.at, hue: HUE_OF[KINDS[one.kind]?.[1]] ?? "var(--ink)" })));
  }

  _momentCard() {
    const slid = { input: () => this._slid() };
    this._slider = el("input", { type: "range", min: "0", max: String(STEPS), step: "1", id: "moment", on: slid });
    this._when = el("output", { for: "moment", class: "number" });
    this._earlier = el("button", { type: "button", on: { click: () => this._toMark(-1) } }, "Earlier mark");
    this._later = el("button", { type: "button", on: { click: () => this._toMark(1) } }, "Later mark");
    this._held = el("p", { class: "row" });
    const buttons = el("span", { class: "row end" }, this._earlier, this._later);
    const head = el("div", { class: "row" }, el("label", { for: "moment" }, "Moment"), this._when, buttons);
    return el("section", { class: "card moment" }, head, this._slider, this._held);
  }

  _happened() {
    const { begin, marks, more_marks: more } = this._about;
    const table = new Table({
      label: "What happened",
      key: (one) => `${one.at} ${one.replica} ${one.kind}`,
      empty: "No gap, no restart, no difference.",
      columns: [
        { title: "When", head: true, cell: (one) => `+${seconds(one.at - begin)}` },
        { title: "Replica", cell: (one) => one.replica || "all" },
        { title: "What", cell: kindCell },
        { title: "That is", wrap: true, cell: (one) => KINDS[one.kind][2] },
      ],
    });
    table.show(marks);
    const box = el(
      "div",
      { class: "happened", tabindex: "0", role: "region", "aria-label": "List of what happened" },
      table.node,
    );
    return [box, more > 0 && el("p", { class: "soft" }, `and ${whole(more)} more`)];
  }

  _hue(replica) {
    return `var(--hue-${this._about.replicas.indexOf(replica) % HUES})`;
  }

  // ---- the moment

  _slid() {
    const { begin, end } = this._about;
    this._move(begin + ((end - begin) * Number(this._slider.value)) / STEPS);
  }

  _toMark(step) {
    const moments = this._about.marks.map(({ at }) => at);
    const next = step > 0 ? moments.find((at) => at > this._at) : moments.findLast((at) => at < this._at);
    if (next !== undefined) this._move(next);
  }

  _move(at) {
    const { begin, end, marks } = this._about;
    this._at = at;
    this._slider.value = String(Math.round(((at - begin) / (end - begin || 1)) * STEPS));
    const words = `${clock(at)}, ${seconds(at - begin)} after the beginning`;
    say(this._when, words);
    mark(this._slider, "aria-valuetext", words);
    mark(this._earlier, "disabled", !marks.some((one) => one.at < at));
    mark(this._later, "disabled", !marks.some((one) => one.at > at));
    for (const chart of [this._chart, this._flow]) chart.pin(at);
    clearTimeout(this._moving);
    this._moving = setTimeout(() => this._read(at), MOVING_MS);
  }

  async _read(at) {
    this._asking?.abort();
    this._asking = new AbortController();
    try {
      const moment = await get(`recording/tree?at=${at}`, { signal: this._asking.signal });
      fill(this._problem);
      this._show(moment);
    } catch (error) {
      if (error.name !== "AbortError") fill(this._problem, failure(error));
    }
  }

  _show({ at, replicas, parts, prefixes }) {
    const count = counted(prefixes);
    fill(
      this._held,
      replicas.map((one) => this._holding(one)),
    );
    this._tree.show(
      { prefixes },
      parts > count ? `The largest of ${plural(parts, "part")} that were held` : "All that was held",
    );
    mark(this._held, "data-at", at); // all of the page is of this moment now
  }

  _holding({ name, blocks, inexact }) {
    const swatch = el("span", { class: "swatch", style: { "--hue": this._hue(name) } });
    const exactness = el(
      "span",
      { class: `badge ${inexact === null ? "good" : "warn"}`, title: inexact },
      inexact === null ? "exact" : "inexact",
    );
    return el(
      "span",
      {},
      swatch,
      `${name} ${plural(blocks, "block")} `,
      exactness,
      inexact === null ? "" : ` ${inexact}`,
    );
  }
}

function kindCell({ kind, count }) {
  const [text, badge] = KINDS[kind];
  return { text: count > 1 ? `${text} ${whole(count)}` : text, badge };
}

async function start() {
  themed(document.getElementById("theme"));
  const view = document.getElementById("main");
  const waiting = el("p", { class: "soft" }, "Playing the recording\u2026");
  view.append(waiting);
  try {
    const about = await get("recording");
    waiting.remove();
    new RecordingPage(view, about);
  } catch (error) {
    fill(view, el("h1", {}, "Recording"), failure(error));
  }
}

start();
