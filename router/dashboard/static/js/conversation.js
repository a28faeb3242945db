/** The messages that are being written: a system prompt, and turns that come and go. */

import { el, fill } from "./dom.js";

const ROLES = ["user", "assistant", "tool"];
const MAX_MESSAGES = 100;

export class Conversation {
  /** `changed()` is called at each keystroke. */
  constructor(changed) {
    this._changed = changed;
    this._turns = [];
    this._list = el("ol", { class: "plain stack" });
    this._system = this._textarea("system-prompt", 3, "You are\u2026");
    const add = el("button", { type: "button", on: { click: () => this._added() } }, "Add a message");
    this.node = el(
      "div",
      { class: "stack" },
      el("div", { class: "field" }, el("label", { for: "system-prompt" }, "System prompt"), this._system),
      this._list,
      el("div", { class: "row" }, add),
    );
    this.add("user", "");
  }

  /** As the API takes them; empty turns are left out. */
  messages() {
    const turns = this._turns.map(({ role, text }) => ({ role: role.value, content: text.value }));
    const system = this._system.value === "" ? [] : [{ role: "system", content: this._system.value }];
    return [...system, ...turns.filter(({ content }) => content !== "")];
  }

  /** In the place of all that was written. */
  begin(system, message) {
    this._system.value = system;
    this._turns = [];
    this.add("user", message);
    this._changed();
  }

  add(role, content) {
    if (this._turns.length >= MAX_MESSAGES) return null;
    const turn = this._turn(role, content);
    this._turns.push(turn);
    this._show();
    return turn;
  }

  focusLast() {
    this._turns.at(-1)?.text.focus();
  }

  _added() {
    const before = this._turns.at(-1)?.role.value;
    this.add(before === "user" ? "assistant" : "user", "");
    this.focusLast();
    this._changed();
  }

  _turn(role, content) {
    const choice = el(
      "select",
      { "aria-label": "Role", on: { change: this._changed } },
      ROLES.map((name) => el("option", { value: name, selected: name === role }, name)),
    );
    const text = this._textarea(null, 3, role === "user" ? "Ask something" : "");
    text.value = content;
    const turn = { role: choice, text };
    const remove = el(
      "button",
      { type: "button", class: "quiet small", on: { click: () => this._remove(turn) } },
      "Remove",
    );
    turn.node = el("li", { class: "message" }, el("div", { class: "row" }, choice, remove), text);
    return turn;
  }

  _textarea(id, rows, placeholder) {
    return el("textarea", {
      id,
      rows,
      placeholder,
      "aria-label": id === null ? "Message" : null,
      on: { input: this._changed },
    });
  }

  _remove(turn) {
    this._turns = this._turns.filter((one) => one !== turn);
    if (this._turns.length === 0) this.add("user", "");
    this._show();
    this.focusLast();
    this._changed();
  }

  _show() {
    fill(
      this._list,
      this._turns.map(({ node }) => node),
    );
  }
}
