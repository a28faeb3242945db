/** A prompt from its beginning to its end: what a replica has of it, block by block. */

import { el, svg } from "./dom.js";
import { plural, whole } from "./format.js";

const MAX_CUTS = 96; // blocks that are still told apart by lines
const MANY_CUTS = 40; // too many for a narrow page
const MAX_TOKENS = 3000; // shown as text

/**
 * Pieces `{kind, from, to}` in tokens: `warm` can be used as it is, `part` lies in slower memory, `gap` is held but
 * comes after something that is not. `hits` are ranges of blocks, both ends included.
 */
export function pieces({ hits, blockTokens, matched, lower }) {
  const found = [];
  const add = (kind, from, to) => to > from && found.push({ kind, from, to });
  for (const [first, last] of hits) {
    const [from, to] = [first * blockTokens, (last + 1) * blockTokens];
    add("warm", from, Math.min(to, matched));
    add("part", Math.max(from, matched), Math.min(to, lower));
    add("gap", Math.max(from, lower), to);
  }
  return found;
}

/** The bar; `blocks` full ones, and a tail that is no block. `grows`: what is warm fills up when it is shown. */
export function strip({ tokens, blocks, blockTokens, drawn, label, grows = false }) {
  const full = Math.min(tokens, blocks * blockTokens);
  const cuts = [];
  for (let block = 1; blocks <= MAX_CUTS && block <= blocks; block++) {
    const x = block * blockTokens;
    cuts.push(svg("line", { class: "cut", x1: x, x2: x, y1: 0, y2: 1, "vector-effect": "non-scaling-stroke" }));
  }
  const kinds = `${blocks > MANY_CUTS ? " many" : ""}${grows ? " grows" : ""}`;
  const all = [{ kind: "tail", from: full, to: tokens }, ...drawn];
  const sized = all.map(({ kind, from, to }) => ({ kind, from, size: to - from }));
  return boxes(sized, Math.max(1, tokens), label, kinds, cuts);
}

/** Parts `[kind, amount]` one after the other, in a bar of this whole. */
export function amounts(parts, whole, label, kinds = "") {
  let from = 0;
  const laid = parts.map(([kind, size]) => {
    from += size;
    return { kind, from: from - size, size };
  });
  return boxes(laid, whole, label, kinds);
}

function boxes(drawn, whole, label, kinds, cuts = []) {
  const rects = drawn
    .filter(({ size }) => size > 0)
    .map(({ kind, from, size }) => svg("rect", { class: kind, x: from, y: 0, width: size, height: 1 }));
  const box = { class: `strip${kinds}`, viewBox: `0 0 ${whole} 1`, preserveAspectRatio: "none", role: "img" };
  return svg("svg", { ...box, "aria-label": label }, rects, cuts);
}

/** The same in words. */
export function toldHits(name, drawn, tokens) {
  const held = drawn.filter(({ kind }) => kind !== "gap").reduce((sum, { from, to }) => sum + to - from, 0);
  const apart = drawn.filter(({ kind }) => kind === "gap").length;
  const behind = apart > 0 ? `, and ${plural(apart, "part")} behind a gap, of no use` : "";
  return `${name} has the first ${whole(held)} of ${whole(tokens)} tokens cached${behind}`;
}

/**
 * The prompt's own text, cut into tokens and blocks; `warm` tokens from its beginning are cached, `before` of them were
 * so when it was drawn last.
 */
export function tokenText({ strings, blockSize, warm, before }) {
  const node = el("div", {
    class: "tokens",
    tabindex: "0",
    role: "region",
    "aria-label": "The prompt in tokens and blocks",
  });
  const count = Math.min(strings.length, MAX_TOKENS);
  const size = blockSize || 16;
  for (let from = 0; from < count; from += size) {
    const to = Math.min(from + size, count);
    const isFull = to - from === size && blockSize > 0;
    const isFresh = isFull && to <= warm && to > before;
    const kind = !isFull ? "block tail" : to <= warm ? `block warm${isFresh ? " fresh" : ""}` : "block";
    const title = isFull ? `block ${from / size + 1}, ${to <= warm ? "cached" : "not cached"}` : "less than a block";
    const style = isFresh ? { "--place": (from - before) / (warm - before) } : {};
    node.append(el("span", { class: kind, title, style }, strings.slice(from, to).map(token)));
  }
  if (strings.length > count)
    node.append(el("span", { class: "soft" }, ` \u2026 and ${whole(strings.length - count)} tokens more`));
  return node;
}

function token(text) {
  const special = /^<[|｜].*[|｜]>$/.test(text);
  return el(
    "span",
    { class: special ? "token special" : "token" },
    text.replaceAll("\n", "\u21b5\n").replace(/^$/, "\u2205"),
  );
}
