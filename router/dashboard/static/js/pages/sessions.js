/** Sessions of agents: those that wait to begin, and the last ones that had a turn. */

import { el } from "../dom.js";
import { age, plural, seconds, share, whole } from "../format.js";
import { get } from "../http.js";
import { badge, facts, showFailure } from "../parts.js";
import * as places from "../places.js";
import { Poll } from "../poll.js";
import { Table } from "../table.js";

const LIMIT = 200;
const EVERY_S = 2;

export function open({ view, state }) {
  const table = new Table({
    label: "Sessions",
    key: ({ model, session }) => `${model}\n${session}`,
    columns: columns(state),
    most: 40,
    empty: "No session had a turn yet. A policy that weighs costs follows those with long prompts.",
  });
  const models = el("div", { class: "stack" });
  const failure = el("div");
  view.append(
    el(
      "div",
      { class: "page-head" },
      el("h1", {}, "Sessions"),
      el("p", {}, "New ones wait to begin while the caches do not hold the contexts of those that go on."),
    ),
    el("section", { class: "card live-figures" }, failure, models, table.node),
  );
  const read = async (signal) => {
    const found = Object.entries((await get(`sessions?limit=${LIMIT}`, { signal })).models);
    showFailure(failure, null);
    models.replaceChildren(...found.map(([model, its]) => facts(summary(model, its))));
    table.show(found.flatMap(([model, its]) => its.sessions.map((row) => ({ ...row, model }))));
  };
  const poll = new Poll(EVERY_S, read, (error) => showFailure(failure, error));
  return { close: () => poll.close() };
}

function summary(model, its) {
  const waits = Object.values(its.longest_wait_s);
  return [
    ["Model", model],
    ["Contexts", `${plural(Math.round(its.context_tokens), "token")} of sessions that will likely go on`],
    ["Bound", its.bound_tokens ? plural(Math.round(its.bound_tokens), "token") : "none: no session has to wait"],
    ["Lost", `${share(its.lost)} of what sessions had computed was in no cache any more`],
    ["Longest wait", waits.length > 0 ? badge(age(Math.max(...waits)), "warn") : "nobody waits"],
  ];
}

function columns(state) {
  return [
    { title: "Session", head: true, cell: (one) => one.session },
    { title: "State", cell: stateCell },
    { title: "Context", right: true, cell: (one) => whole(one.context_tokens) },
    { title: "Turns", right: true, cell: (one) => whole(one.turns) },
    {
      title: "Gap",
      right: true,
      wide: true,
      cell: (one) => seconds(one.gap_s),
      about: "from the answer before to its newest prompt",
    },
    { title: "Replica", cell: (one) => replicaCell(one, state) },
    { title: "Model", wide: true, cell: (one) => one.model },
  ];
}

function stateCell({ waits_s: waits, is_here: isHere, running, idle_s: idle }) {
  if (waits !== undefined) return { text: `waits ${age(waits)}${isHere ? "" : ", away"}`, badge: "warn" };
  return running ? { text: "computes", badge: "good" } : { text: `silent ${age(idle)}`, soft: true };
}

function replicaCell({ replica }, state) {
  return replica ? { text: replica, href: places.replica(replica), hues: [state.hue(replica)] } : "";
}
