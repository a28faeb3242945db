/** The last decisions; and where a prompt would go that has not been sent. */

import { candidateList, inWords, weighed } from "../candidates.js";
import { decisionColumns, decisionKey } from "../decisions.js";
import { el, fill, mark, say } from "../dom.js";
import { plural } from "../format.js";
import { get, post } from "../http.js";
import { card, failure, offer, showFailure } from "../parts.js";
import { playground } from "../places.js";
import { Poll } from "../poll.js";
import { Table } from "../table.js";

const LIMIT = 200;
const EVERY_S = 3;

export function open({ view, state }) {
  const list = new DecisionList(state);
  const asked = explainCard(state);
  view.append(
    el(
      "div",
      { class: "page-head" },
      el("h1", {}, "Requests"),
      el("p", {}, "What was decided, and what came of it. Decisions are kept without their prompts."),
    ),
    asked.node,
    list.node,
  );
  return {
    close() {
      asked.close();
      list.close();
    },
  };
}

class DecisionList {
  constructor(state) {
    this._decisions = [];
    this._table = new Table({
      label: "Last requests",
      key: decisionKey,
      columns: decisionColumns(state),
      most: 40,
      empty: "No request is like that.",
    });
    this._filter = el("input", {
      class: "filter",
      type: "search",
      placeholder: "Replica, model, request",
      "aria-label": "Filter requests",
      on: { input: () => this._show() },
    });
    this._hold = el("button", { type: "button", "aria-pressed": "false", on: { click: () => this._holdOn() } }, "Hold");
    this._count = el("span", { class: "soft small" });
    this._failure = el("div");
    const head = el(
      "header",
      {},
      el("h2", {}, "Last requests"),
      this._count,
      el("div", { class: "end row" }, this._filter, this._hold),
    );
    this.node = el("section", { class: "card live-figures" }, head, this._failure, this._table.node);
    this._poll = new Poll(
      EVERY_S,
      (signal) => this._read(signal),
      (error) => this._fail(error),
    );
  }

  close() {
    this._poll.close();
  }

  async _read(signal) {
    this._decisions = (await get(`decisions?limit=${LIMIT}`, { signal })).decisions;
    this._fail(null);
    this._show();
  }

  _fail(error) {
    showFailure(this._failure, error);
  }

  _holdOn() {
    const holds = this._hold.getAttribute("aria-pressed") !== "true";
    mark(this._hold, "aria-pressed", String(holds));
    say(this._hold, holds ? "Go on" : "Hold");
    if (holds) this._poll.close();
    else this._poll.again();
  }

  _show() {
    const wanted = this._filter.value.trim().toLowerCase();
    const named = ({ chosen, model, request_id: id }) =>
      `${chosen ?? "none"}\n${model}\n${id}`.toLowerCase().includes(wanted);
    const matching = this._decisions.filter(named);
    say(this._count, plural(matching.length, "request"));
    this._table.show(matching);
  }
}

/** A request's body, or only the words of a prompt, explained. */
function explainCard(state) {
  const text = el("textarea", {
    rows: "2",
    id: "explain-text",
    placeholder: 'Once upon a time\u2026  or  {"messages": [{"role": "user", "content": "\u2026"}]}',
    spellcheck: "false",
  });
  const model = el("select", { "aria-label": "Model" });
  const answer = el("div", { class: "stack", "aria-live": "polite" });
  const ask = async (event) => {
    event.preventDefault();
    try {
      const found = await post("explain", bodyOf(text.value, model.value), { asksForKey: true });
      fill(answer, explanation(found, state));
    } catch (error) {
      fill(answer, failure(error));
    }
  };
  const form = el(
    "form",
    { class: "stack", on: { submit: ask } },
    el("label", { for: "explain-text" }, "A prompt, or a request's whole JSON"),
    text,
    el("div", { class: "row" }, el("button", { class: "primary", type: "submit" }, "Explain"), model),
  );
  const about = el(
    "p",
    { class: "soft small" },
    "Where it would go now, block by block. Nothing is sent to a replica. To write a conversation, use the ",
    el("a", { href: playground }, "playground"),
    ".",
  );
  const renew = () => {
    offer(model, state.models);
    mark(model, "hidden", state.models.length < 2);
  };
  renew();
  return {
    node: card("Where would it go?", el("div", { class: "stack" }, about, form, answer)),
    close: state.subscribe(renew),
  };
}

/** A model that the JSON names itself goes before the one that is chosen. */
function bodyOf(text, model) {
  let body = { prompt: text };
  if (/^\s*[{[]/.test(text)) {
    try {
      body = JSON.parse(text);
    } catch (error) {
      throw new Error(`this is no JSON: ${error.message}; for a prompt that begins so, give {"prompt": "\u2026"}`);
    }
    if (Array.isArray(body)) body = { messages: body };
  }
  return { model: model || undefined, ...body };
}

export function explanation(answer, state) {
  const found = weighed(answer);
  const size = found.exact
    ? `${plural(found.prompt_tokens, "token")} in ${plural(found.blocks, "block")} of ${found.block_size}`
    : `about ${plural(Math.round(found.prompt_tokens), "token")}, approximate: ${found.why_not}`;
  return [
    el("p", {}, el("strong", {}, size), `, policy ${found.policy}.`),
    el("p", {}, inWords(found, { past: false })),
    candidateList(found, state),
  ];
}
