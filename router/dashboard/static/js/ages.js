/** How much of a cache was last asked for how long ago. */

import { amounts } from "./blocks.js";
import { el } from "./dom.js";
import { compact } from "./format.js";

const BOUNDS = [
  [60, "a minute"],
  [300, "5 minutes"],
  [1800, "30 minutes"],
  [7200, "2 hours"],
];

/** `ages` are `{idle_s, tokens}`, in any order. */
export function ageStrip(ages) {
  const groups = grouped(ages);
  const all = groups.reduce((sum, { tokens }) => sum + tokens, 0);
  if (all === 0) return null;
  const present = groups.filter(({ tokens }) => tokens > 0);
  const told = present.map(({ words, tokens }) => `${words}: ${compact(tokens)} tokens`);
  const parts = groups.map(({ kind, tokens }) => [kind, tokens]);
  const key = present.map(({ kind }, place) => el("span", {}, el("span", { class: `swatch ${kind}` }), told[place]));
  return el(
    "div",
    { class: "stack tight" },
    el("h3", {}, "Last asked for"),
    amounts(parts, all, `Last asked for, ${told.join(", ")}`),
    el("p", { class: "key-list" }, key),
  );
}

function grouped(ages) {
  const groups = BOUNDS.map(([, words], place) => ({ kind: `age-${place}`, words: `within ${words}`, tokens: 0 }));
  groups.push({ kind: `age-${BOUNDS.length}`, words: "before", tokens: 0 });
  for (const { idle_s: idleS, tokens } of ages) {
    const place = BOUNDS.findIndex(([bound]) => idleS < bound);
    groups[place < 0 ? BOUNDS.length : place].tokens += tokens;
  }
  return groups;
}
