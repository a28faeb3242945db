/** Questions that stand before the page until they are answered. */

import { el } from "./dom.js";

/** Resolves to whether it was agreed to. */
export async function confirmed({ title, text, agree }) {
  const answer = await asked(title, [el("p", {}, text)], agree);
  return answer !== null;
}

/** Resolves to what was typed, or null. */
export async function typed({ title, text, label, agree, secret = false }) {
  const input = el("input", {
    name: "answer",
    type: secret ? "password" : "text",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
  });
  const answer = await asked(title, [el("p", {}, text), el("label", {}, label, input)], agree, input);
  return answer === null ? null : input.value.trim() || null;
}

let last = Promise.resolve();

/** One at a time: a second question waits for the first one's answer. */
function asked(title, content, agree, focused = null) {
  const answer = last.then(() => shown(title, content, agree, focused));
  last = answer;
  return answer;
}

function shown(title, content, agree, focused) {
  return new Promise((resolve) => {
    const heading = el("h2", { id: "dialog-title" }, title);
    const yes = el("button", { class: "primary", type: "submit" }, agree);
    const no = el("button", { type: "button", on: { click: () => dialog.close() } }, "Cancel");
    let agreed = false;
    const submit = (event) => {
      event.preventDefault(); // a page that may submit forms nowhere closes its dialogs itself
      agreed = true;
      dialog.close();
    };
    const form = el("form", { on: { submit } }, heading, content, el("div", { class: "row" }, no, yes));
    const dialog = el("dialog", { "aria-labelledby": "dialog-title" }, form);
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(agreed ? true : null);
    });
    document.body.append(dialog);
    dialog.showModal();
    (focused ?? yes).focus();
  });
}
