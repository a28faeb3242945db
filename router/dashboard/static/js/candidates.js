/** Every replica that was weighed: what it has of the prompt, what it would cost, and why it was taken or not. */

import { amounts, pieces, strip, toldHits } from "./blocks.js";
import { el, fill } from "./dom.js";
import { seconds, whole } from "./format.js";
import { badge, sentence } from "./parts.js";
import { replica } from "./places.js";

const SHOWN = 12;
const PARTS = { compute_s: "compute", queue_s: "queue", harm_s: "harm" };

/**
 * What `/explain` answers and what is kept of a decision, in one form: the latter has neither hits nor queues.
 */
export function weighed(found) {
  const blockTokens = found.block_size || (found.blocks ? found.prompt_tokens / found.blocks : found.prompt_tokens);
  const candidates = found.candidates.map((one) => ({
    ...one,
    cost: one.cost ?? one.cost_s ?? null,
    lower: Math.max(one.matched_tokens, one.lower_tokens ?? 0),
    portions: one.portions ?? (one.name === found.chosen ? found.portions : undefined) ?? [],
    hits: found.hits?.[one.name] ?? [[0, one.matched_tokens / blockTokens - 1]],
    available: one.available ?? (one.cost ?? one.cost_s ?? null) !== null,
  }));
  return { ...found, blockTokens, blocks: found.blocks ?? 0, candidates: ranked(candidates, found.chosen) };
}

function ranked(candidates, chosen) {
  const cost = (one) => one.cost ?? Number.POSITIVE_INFINITY;
  return [...candidates].sort(
    (one, other) =>
      (other.name === chosen) - (one.name === chosen) ||
      other.available - one.available ||
      (cost(one) === cost(other) ? 0 : cost(one) - cost(other)) ||
      one.name.localeCompare(other.name, "en", { numeric: true }),
  );
}

export function candidateList(found, state) {
  const list = el("ol", { class: "plain candidates" });
  const dearest = Math.max(...found.candidates.map((one) => one.cost ?? 0), 1e-9);
  const show = (count) => {
    const items = found.candidates.slice(0, count).map((one) => candidate(one, found, dearest, state));
    const rest = found.candidates.length - count;
    const more = el(
      "button",
      { type: "button", on: { click: () => show(Number.POSITIVE_INFINITY) } },
      `Show ${whole(rest)} more`,
    );
    fill(list, items, rest > 0 && el("li", {}, more));
  };
  show(SHOWN);
  return el("div", { class: "stack" }, keys(found), list);
}

function candidate(one, found, dearest, state) {
  const isWinner = one.name === found.chosen;
  const name = el("a", { href: replica(one.name) }, one.name);
  const swatch = el("span", { class: "swatch", style: { "--hue": state.hue(one.name) } });
  const mark = isWinner ? badge("chosen", "good") : one.available ? null : badge("cannot take it", "");
  const head = el(
    "div",
    { class: "row" },
    el("strong", {}, swatch, name),
    mark,
    el("span", { class: "figures" }, figures(one)),
  );
  const tokens = brings(one.portions) ? el("p", { class: "small" }, `${toldPortions(one.portions).join(", ")}.`) : null;
  const why = one.why ? el("p", { class: "small" }, sentence(one.why)) : null;
  const kind = isWinner ? "candidate winner" : one.available ? "candidate" : "candidate out";
  return el(
    "li",
    { class: kind },
    head,
    el("div", { class: "bars" }, promptBar(one, found), costBar(one, dearest)),
    one.parts && el("p", { class: "small soft" }, `cost: ${toldParts(one.parts)}`),
    tokens,
    why,
  );
}

const PLACES = { GPU: "in its KV cache", CPU: "from host memory", STORAGE: "from disk", COMPUTE: "computed" };

/** Whether a part comes neither from its KV cache nor from computing. */
const brings = (portions) => portions.some(({ source }) => source !== "GPU" && source !== "COMPUTE");

/** Where a replica takes a prompt's tokens from, part by part. */
export function toldPortions(portions) {
  return portions.map(({ source, tokens, seconds: took, neighbours }) => {
    const place = PLACES[source] ?? `from ${neighbours?.join(" or ") || "a neighbour"}`;
    return `${whole(tokens)} ${place}${took > 0 ? ` in ${seconds(took)}` : ""}`;
  });
}

function figures(one) {
  if (one.queued_tokens === undefined) return "";
  return `${whole(one.uncached_tokens)} to compute, ${whole(one.queued_tokens)} queued, ${whole(one.running)} running`;
}

function promptBar(one, found) {
  const { prompt_tokens: tokens, blocks, blockTokens } = found;
  const drawn = pieces({ hits: one.hits, blockTokens, matched: one.matched_tokens, lower: one.lower });
  const label = toldHits(one.name, drawn, tokens);
  const bar = strip({ tokens, blocks, blockTokens, drawn, label });
  return row("prompt", bar, `${whole(one.lower)} cached`);
}

function costBar(one, dearest) {
  if (one.cost === null) return row("cost", el("span"), "none");
  const split = one.parts ? `: ${toldParts(one.parts)}` : "";
  const label = `${one.name} would cost ${seconds(one.cost)}${split}`;
  return row("cost", amounts(costParts(one), dearest, label, " thin"), seconds(one.cost));
}

const row = (name, bar, value) => [el("span", { class: "name" }, name), bar, el("span", { class: "value" }, value)];

/** A cost by its parts; an older router does not tell them. */
const costParts = ({ parts, cost }) =>
  parts ? Object.entries(PARTS).map(([field, kind]) => [kind, parts[field]]) : [["compute", cost]];

const toldParts = (parts) =>
  Object.entries(PARTS)
    .map(([field, kind]) => `${kind} ${seconds(parts[field])}`)
    .join(" + ");

const UNIT =
  "Costs are in seconds of a replica's prefill. Compute counts twice: this prompt waits for it, and the next one finds " +
  "less room. Queue is the prefill ahead of it and the requests that are decoded. Harm is what others lose: they wait " +
  "longer, or their cached blocks are evicted.";

function keys(found) {
  const told = [
    ["warm", "cached"],
    ["cold", "not cached"],
  ];
  if (found.candidates.some((one) => one.lower > one.matched_tokens)) told.push(["part", "in slower memory"]);
  if (found.hits !== undefined) told.push(["gap", "cached, but behind a gap"]);
  const isSplit = found.candidates.some(({ parts }) => parts);
  if (isSplit) for (const kind of Object.values(PARTS)) told.push([kind, `cost: ${kind}`]);
  else told.push(["compute", "cost"]);
  const swatches = told.map(([kind, words]) => el("span", {}, el("span", { class: `swatch ${kind}` }), words));
  return [el("p", { class: "key-list" }, swatches), isSplit && el("p", { class: "small soft" }, UNIT)];
}

const PAST = { goes: "It went", has: "had", costs: "would have cost" };
const NOW = { goes: "It would go", has: "has", costs: "would cost" };

/** Why it went, or would go, where it does: in a sentence or two. */
export function inWords(found, { past }) {
  const { goes, has, costs } = past ? PAST : NOW;
  const [winner, next] = found.candidates;
  if (found.chosen === null || winner === undefined)
    return past ? "No replica could take it." : "It would wait: no replica takes it now.";
  const among =
    found.candidates.length === 1 ? "the only replica" : `one of ${whole(found.candidates.length)} replicas`;
  const held =
    winner.lower > 0
      ? `it ${has} ${whole(winner.lower)} of the prompt's ${whole(found.prompt_tokens)} tokens cached`
      : `none of the prompt ${past ? "was" : "is"} cached there`;
  const price = winner.cost === null ? "" : `, at a cost of ${seconds(winner.cost)}`;
  const words = `${goes} to ${winner.name}, ${among}: ${held}${price}.`;
  if (next === undefined) return words;
  if (next.cost === null) return `${words} No other one could take it.`;
  const second = `The next best, ${next.name}, ${has} ${whole(next.lower)} cached`;
  return `${words} ${second}, and ${costs} ${compared(winner, next)}.`;
}

function compared(winner, next) {
  const times = winner.cost > 0 ? next.cost / winner.cost : Number.POSITIVE_INFINITY;
  if (times < 0.98) return "less: the policy goes by something else";
  if (times < 1.02) return "as much";
  return Number.isFinite(times) ? `${times.toFixed(times < 10 ? 1 : 0)} times as much` : seconds(next.cost);
}
