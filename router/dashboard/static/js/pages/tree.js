/** What prompts share, and which replicas hold it. */

import { el, say } from "../dom.js";
import { age, compact, plural, shortened, whole } from "../format.js";
import { get } from "../http.js";
import { offer, showFailure } from "../parts.js";
import { Poll } from "../poll.js";
import { Table } from "../table.js";

const LIMIT = 200;
const EVERY_S = 4;
const ANY = "any replica";
const NAMED = 3; // replicas; of more the number is said
const SLOWER = { CPU: " (host memory)", STORAGE: " (disk)" };

export function open({ view, choice, state }) {
  let rows = [];
  let wanted = choice.get("holder");
  const about = el("p");
  const problem = el("div");
  const holder = el("select", { on: { change: () => show() } });
  const table = new Table({
    label: "Shared prefixes",
    key: ({ id }) => id,
    columns: columns(state),
    rowClass: ({ held_by: count }) => (count === 0 ? "faint" : null),
    empty: "Reading the tree\u2026",
  });
  view.append(
    el("div", { class: "page-head" }, el("h1", {}, "Prefix tree"), about),
    problem,
    el(
      "section",
      { class: "card live-figures" },
      el(
        "header",
        {},
        el("h2", {}, "What prompts share"),
        el("label", { class: "end small" }, "Held by ", holder),
      ),
      table.node,
    ),
  );
  table.show(rows);

  const show = () => {
    const name = holder.value;
    table.show(name === ANY ? rows : rows.filter(({ replicas }) => replicas.includes(name)));
  };
  const read = async (signal) => {
    const answer = await get(`prefixes?limit=${LIMIT}`, { signal });
    showFailure(problem, null);
    say(about, aboutPrompts(answer));
    rows = flat(answer.prefixes, answer.prompts);
    const names = [...new Set(rows.flatMap(({ replicas }) => replicas))];
    offer(holder, [ANY, ...names.sort((one, other) => one.localeCompare(other, "en", { numeric: true }))]);
    if (names.includes(wanted)) holder.value = wanted;
    wanted = null;
    table.says("No two prompts have begun alike yet.");
    show();
  };
  return new Poll(EVERY_S, read, (error) => showFailure(problem, error));
}

function aboutPrompts({ prompts, span_s: spanS, texts }) {
  const hidden = texts ? "" : " Their words are not kept: clients have keys, or the router was told so.";
  return `Of the last ${plural(prompts, "prompt")}, in ${age(spanS)}.${hidden}`;
}

/** The tree as rows: each prefix above those that go on from it. */
const flat = (prefixes, prompts, depth = 0) =>
  prefixes.flatMap((prefix) => [{ ...prefix, depth, share: prefix.prompts / prompts }, ...flat(prefix.below, prompts, depth + 1)]);

const columns = (state) => [
  { title: "Begins", head: true, cell: textCell },
  { title: "Tokens", right: true, cell: ({ exact, tokens }) => `${exact ? "" : "about "}${whole(tokens)}` },
  { title: "Prompts", cell: ({ prompts, share }) => ({ text: whole(prompts), share }), about: "the bar is their share" },
  {
    title: "Saves",
    right: true,
    wide: true,
    cell: ({ tokens, prompts }) => compact(tokens * (prompts - 1)),
    about: "tokens that need not be computed if it stays cached: all prompts but the first reuse it",
  },
  { title: "Last", right: true, wide: true, cell: ({ idle_s: idleS }) => age(idleS) },
  { title: "Held by", cell: (prefix) => holderCell(prefix, state), about: "with all before it" },
  { title: "Model", wide: true, cell: ({ model }) => model },
];

function textCell({ text, begin, depth }) {
  const words = (text ?? "").trim().replace(/\s+/g, " ");
  return { text: shortened(words || `from token ${whole(begin)}`, 90), title: words, soft: words === "", depth };
}

function holderCell({ held_by: count, replicas, sources }, state) {
  if (count === 0) return { text: "nobody", title: "The next prompt that begins so is computed anew.", soft: true };
  const named = replicas.slice(0, NAMED);
  const more = count > named.length ? ` and ${whole(count - named.length)} more` : "";
  const text = named.map((name) => name + (SLOWER[sources?.[name]] ?? "")).join(", ");
  return { text: text + more, hues: named.map((name) => state.hue(name)) };
}
