/** A tree drawn as bars: what lies below a bar goes on from it. Zoomed by click, Enter and Escape; walked by arrows. */

import { el, fill, mark, say } from "./dom.js";

const ROW = 48;
const NARROW = 44; // pixels; less has no room for words
const TIGHT = 150; // less has room for one text, on two lines
const LEAST = 4;

/**
 * A node is `{id, weight, title, under, label, holders: [{name, hue}], trunk?, below}`; those below weigh no more than
 * it does. `looked(path)` is told what is pointed at or focused, `zoomed(path)` what fills the width: paths from the root.
 */
export class Icicle {
  constructor({ label, looked, zoomed }) {
    this.node = el("div", {
      class: "icicle",
      role: "group",
      "aria-label": label,
      on: { keydown: (event) => this._key(event) },
    });
    this._looked = looked;
    this._zoomed = zoomed;
    this._buttons = new Map();
    this._placed = new Map(); // by id: {node, above, depth, from, width}
    this._root = null;
    this._view = null; // id of the node that fills the width
    this._current = null; // id of the node that Tab comes to
    this._seen = null; // id of the node that was pointed at last
    this._highlight = null;
    this._watch = new ResizeObserver(() => this._draw());
    this._watch.observe(this.node);
  }

  close() {
    this._watch.disconnect();
  }

  show(root) {
    this._root = root;
    this._placed = new Map();
    this._place(root, null, 0, 0, 1);
    if (!this._placed.has(this._view)) this._view = root.id;
    if (!this._placed.has(this._current)) this._current = this._view;
    this._draw();
    this._zoomed(this._path(this._view));
    if (this._placed.has(this._seen)) this._look(this._seen);
  }

  /** Only what this replica holds is coloured; null: what anyone does. */
  highlight(name) {
    this._highlight = name;
    this._draw();
  }

  zoom(id) {
    if (!this._placed.has(id)) return;
    this._view = this._current = id;
    this._draw();
    this._zoomed(this._path(id));
    this._look(id);
  }

  // ---- where things lie

  _place(node, above, depth, from, width) {
    this._placed.set(node.id, { node, above, depth, from, width });
    const whole =
      Math.max(
        node.weight,
        node.below.reduce((sum, one) => sum + one.weight, 0),
      ) || 1;
    let begin = from;
    for (const below of node.below) {
      const part = (width * below.weight) / whole;
      this._place(below, node.id, depth + 1, begin, part);
      begin += part;
    }
  }

  _path(id) {
    const path = [];
    for (let at = id; at !== null; at = this._placed.get(at).above) path.unshift(this._placed.get(at).node);
    return path;
  }

  // ---- drawing

  _draw() {
    if (this._root === null) return;
    const pixels = this.node.clientWidth;
    const view = this._placed.get(this._view);
    const drawn = new Map();
    let deepest = 0;
    const above = new Set(this._path(this._view).map(({ id }) => id));
    for (const [id, place] of this._placed) {
      const [left, width] = above.has(id) ? [0, 1] : [(place.from - view.from) / view.width, place.width / view.width];
      const outside = left < -1e-9 || left + width > 1 + 1e-9;
      if (!above.has(id) && (outside || width * pixels < LEAST)) continue;
      const button = this._buttons.get(id) ?? this._button(id);
      drawn.set(id, button);
      this._write(button, place, left, width, width * pixels);
      deepest = Math.max(deepest, place.depth);
    }
    for (const [id, button] of this._buttons) if (!drawn.has(id)) button.remove();
    this._buttons = drawn;
    this.node.style.height = `${(deepest + 1) * ROW}px`;
    this._inOrder();
  }

  /** For who hears the page: each bar after the one it goes on from. */
  _inOrder() {
    let place = 0;
    for (const id of this._placed.keys()) {
      const button = this._buttons.get(id);
      if (button === undefined) continue;
      const there = this.node.children[place++];
      if (there !== button) this.node.insertBefore(button, there ?? null);
    }
  }

  _button(id) {
    const words = el("span", { class: "words" }, el("span"), el("span", { class: "under" }));
    return el(
      "button",
      {
        type: "button",
        on: {
          click: () => this.zoom(id),
          focus: () => this._focused(id),
          pointerenter: () => this._look(id),
        },
      },
      el("span", { class: "holders" }),
      words,
    );
  }

  _write(button, { node, depth }, left, width, pixels) {
    const lit = this._highlight === null || node.holders.some(({ name }) => name === this._highlight);
    const kinds = [
      "node",
      pixels < NARROW && "narrow",
      pixels < TIGHT && "tight",
      node.trunk && "trunk",
      !node.trunk && node.holders.length === 0 && "cold",
      !lit && "dim",
    ];
    mark(button, "class", kinds.filter(Boolean).join(" "));
    mark(button, "aria-label", node.label);
    mark(button, "tabindex", node.id === this._current ? "0" : "-1");
    button.style.left = `${left * 100}%`;
    button.style.width = `${width * 100}%`;
    button.style.top = `${depth * ROW}px`;
    const [holders, words] = button.children;
    const named = node.holders.filter(({ name }) => this._highlight === null || name === this._highlight);
    const key = named.map(({ name }) => name).join("\n");
    if (holders.dataset.key !== key) {
      holders.dataset.key = key;
      fill(
        holders,
        named.map(({ hue }) => el("span", { style: { "--hue": hue } })),
      );
    }
    say(words.children[0], node.title);
    say(words.children[1], node.under);
  }

  // ---- walking

  _focused(id) {
    if (this._current !== id) {
      mark(this._buttons.get(this._current), "tabindex", "-1");
      this._current = id;
      mark(this._buttons.get(id), "tabindex", "0");
    }
    this._look(id);
  }

  _look(id) {
    this._seen = id;
    this._looked(this._path(id));
  }

  _key(event) {
    if (event.key === "Escape") {
      const above = this._placed.get(this._view)?.above;
      if (above !== null && above !== undefined) this._go(event, above, true);
      return;
    }
    const to = this._neighbour(event.key);
    if (to !== null && this._buttons.has(to)) this._go(event, to, false);
  }

  _go(event, id, zooms) {
    event.preventDefault();
    if (zooms) this.zoom(id);
    this._buttons.get(id)?.focus();
  }

  _neighbour(key) {
    const here = this._placed.get(this._current);
    if (here === undefined) return null;
    if (key === "ArrowUp") return here.above;
    if (key === "ArrowDown") return here.node.below[0]?.id ?? null;
    if ((key !== "ArrowLeft" && key !== "ArrowRight") || here.above === null) return null;
    const beside = this._placed.get(here.above).node.below;
    const place = beside.findIndex(({ id }) => id === here.node.id) + (key === "ArrowLeft" ? -1 : 1);
    return beside[place]?.id ?? null;
  }
}
