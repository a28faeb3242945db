/** Write a conversation; see its tokens and blocks, which replicas have them, where it would go; send it. */

import { strip, tokenText } from "../blocks.js";
import { weighed } from "../candidates.js";
import { Clocks } from "../clocks.js";
import { completed } from "../completion.js";
import { Conversation } from "../conversation.js";
import { announce, el, fill, mark } from "../dom.js";
import { plural, seconds, whole } from "../format.js";
import { get, post } from "../http.js";
import { onKey } from "../keys.js";
import { badge, card, facts, failure, offer, sentence } from "../parts.js";
import * as places from "../places.js";
import { SAMPLES } from "../samples.js";
import { explanation } from "./requests.js";

const TYPING_MS = 350;
const LONGEST_ANSWER = 200_000; // characters kept of one
const LOOKS = 8; // after an answer, until the router has heard that it has ended, and what is kept of it
const LOOK_MS = 250;

export function open({ view, state }) {
  return new Playground(view, state);
}

class Playground {
  constructor(view, state) {
    this._state = state;
    this._looking = null;
    this._sending = null;
    this._text = "";
    this._warm = 0; // tokens that were cached when the prompt was drawn last
    this._build(view);
    this._readModels();
    const unsubscribes = [state.subscribe(() => offer(this._model, state.models)), onKey(() => this._look())];
    this._unsubscribe = () => unsubscribes.forEach((unsubscribe) => unsubscribe());
  }

  close() {
    clearTimeout(this._typing);
    this._looking?.abort();
    this._sending?.abort();
    this._clocks.stop();
    this._unsubscribe();
  }

  // ---- parts

  _build(view) {
    this._conversation = new Conversation(() => this._changed());
    this._model = el("select", { id: "model", on: { change: () => this._changed() } });
    this._longest = el("input", { id: "max-tokens", type: "number", min: "1", max: "100000", value: "64" });
    const own = { placeholder: "the model's" }; // of a request that names none
    this._temperature = el("input", { id: "temperature", type: "number", min: "0", max: "2", step: "0.1", ...own });
    this._send = el("button", { class: "primary", type: "submit" }, "Send");
    this._stop = el("button", { type: "button", disabled: true, on: { click: () => this._stopped() } }, "Stop");
    const fields = el(
      "div",
      { class: "fields" },
      field("Model", "model", this._model),
      field("Longest answer", "max-tokens", this._longest),
      field("Temperature", "temperature", this._temperature),
    );
    const form = el(
      "form",
      { class: "stack", on: { submit: (event) => this._submitted(event), keydown: (event) => this._keyed(event) } },
      fields,
      this._samples(),
      el("p", { class: "soft small" }, "What you write goes to a replica as you write it, to be cut into tokens."),
      this._conversation.node,
      el("div", { class: "row sending" }, this._send, this._stop, el("span", { class: "soft small" }, "Ctrl+Enter sends")),
    );
    this._tokens = el("div", {}, EMPTY());
    this._route = el("div", { class: "stack" }, EMPTY());
    this._answerBox = el("div", { class: "answer", tabindex: "0", role: "region", "aria-label": "The answer" });
    this._outcome = el("div", { class: "stack" });
    this._clocks = new Clocks();
    this._answer = card("Answer", this._clocks.node, this._answerBox, this._outcome);
    mark(this._answer, "hidden", true);
    view.append(
      el(
        "div",
        { class: "page-head" },
        el("h1", {}, "Playground"),
        el("p", {}, "Write, see what is cached where, and send."),
      ),
      el(
        "div",
        { class: "playground" },
        el("div", { class: "stack" }, card("Conversation", form), this._answer),
        el("div", { class: "stack" }, card("Tokens and blocks", this._tokens), card("Where it would go", this._route)),
      ),
    );
  }

  _samples() {
    const buttons = SAMPLES.map(({ title, system, message }) =>
      el("button", { type: "button", on: { click: () => this._try(system, message) } }, title),
    );
    const label = { class: "row samples", role: "group", "aria-label": "Sample prompts" };
    return el("div", label, el("span", { class: "soft small" }, "Try"), buttons);
  }

  async _try(system, message) {
    try {
      this._conversation.begin(await system(), message);
    } catch (error) {
      fill(this._route, failure(error));
    }
  }

  /** From the feed; before that has told, and where it is refused, as clients ask for them. */
  async _readModels() {
    offer(this._model, this._state.models);
    if (this._state.models.length > 0) return;
    try {
      const { data } = await get("v1/models");
      if (this._state.models.length === 0)
        offer(
          this._model,
          data.map(({ id }) => id),
        );
    } catch (error) {
      fill(this._route, failure(error));
    }
  }

  // ---- what is written

  _changed() {
    clearTimeout(this._typing);
    this._typing = setTimeout(() => this._look(), TYPING_MS);
  }

  /** Tokens and the router's opinion of what stands there now. */
  async _look() {
    clearTimeout(this._typing);
    this._looking?.abort();
    const messages = this._conversation.messages();
    if (messages.length === 0) {
      fill(this._tokens, EMPTY());
      fill(this._route, EMPTY());
      this._warm = 0;
      return null;
    }
    this._looking = new AbortController();
    const { signal } = this._looking;
    const body = { model: this._model.value, messages };
    const [tokens, route] = await Promise.allSettled([
      post("tokenize", { ...body, return_token_strs: true }, { signal }),
      post("explain", body, { signal }),
    ]);
    if (signal.aborted) return null;
    const found = route.status === "fulfilled" ? route.value : null;
    fill(this._route, found === null ? failure(route.reason) : explanation(found, this._state));
    fill(this._tokens, tokens.status === "rejected" ? failure(tokens.reason) : this._drawnTokens(tokens.value, found));
    return found;
  }

  _drawnTokens({ count, tokens, token_strs: strings }, found) {
    const best = found === null ? null : weighed(found).candidates[0];
    const warm = best?.lower ?? 0;
    const size = found?.block_size ?? 0;
    const before = Math.min(this._warm, warm);
    this._warm = warm;
    const named = best !== null && warm > 0 ? `; ${whole(warm)} of them cached on ${best.name}` : "";
    const cut = size > 0 ? ` in ${plural(Math.floor(count / size), "block")} of ${size}` : "";
    return [
      el("p", { class: "small" }, `${plural(count, "token")}${cut}${named}.`),
      el("p", { class: "key-list" }, key("warm", "cached there"), key("cold", "to compute")),
      tokenText({ strings: strings ?? tokens.map(String), blockSize: size, warm, before }),
    ];
  }

  // ---- sending

  _keyed(event) {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    this._submitted(event);
  }

  async _submitted(event) {
    event.preventDefault();
    const messages = this._conversation.messages();
    if (this._sending !== null || messages.length === 0) return;
    this._sending = new AbortController();
    this._begin();
    const predicted = await this._look().catch(() => null);
    const body = {
      model: this._model.value,
      messages,
      max_tokens: Number(this._longest.value) || undefined,
      temperature: this._temperature.value === "" ? undefined : Number(this._temperature.value),
    };
    this._clocks.start(this._warm * 2 > (predicted?.prompt_tokens ?? Infinity));
    await this._stream(body, predicted);
    this._sending = null;
    mark(this._send, "disabled", false);
    mark(this._stop, "disabled", true);
    await this._lookAgain();
  }

  /** Show what the answer has left in the cache, once its events have arrived. */
  async _lookAgain() {
    const before = this._warm;
    for (let look = 0; look < LOOKS && this._sending === null; look++) {
      const found = await this._look();
      if (found === null) return;
      const isKept = this._warm > before || this._warm + found.block_size >= found.prompt_tokens;
      // The replica tells its load a few times a second: the answer that has just ended may still count as running.
      if (isKept && found.candidates.every(({ running }) => !running)) return;
      await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    }
  }

  _begin() {
    this._text = "";
    fill(this._answerBox);
    fill(this._outcome);
    mark(this._answer, "hidden", false);
    mark(this._answerBox, "data-state", "streaming");
    mark(this._send, "disabled", true);
    mark(this._stop, "disabled", false);
    this._answer.scrollIntoView({ block: "nearest" });
  }

  async _stream(body, predicted) {
    const { signal } = this._sending;
    let told = null;
    let problem = null;
    try {
      const said = (text) => this._say(text);
      await completed(body, { signal, said, began: (known) => (told = known) });
    } catch (error) {
      problem = error.name === "AbortError" ? null : error;
    }
    this._clocks.stop(told);
    mark(this._answerBox, "data-state", "ended");
    announce(problem === null ? (signal.aborted ? "Stopped" : "The answer is complete") : problem.message);
    fill(this._outcome, this._told(told, predicted, problem, signal.aborted));
  }

  _say(text) {
    this._clocks.stop();
    if (this._text.length >= LONGEST_ANSWER) return;
    this._text += text;
    const follows = this._answerBox.scrollTop + this._answerBox.clientHeight >= this._answerBox.scrollHeight - 8;
    this._answerBox.append(text);
    if (follows) this._answerBox.scrollTop = this._answerBox.scrollHeight;
  }

  _stopped() {
    this._sending?.abort();
  }

  _told(told, predicted, problem, stopped) {
    const parts = [];
    if (problem !== null) parts.push(el("p", { class: "note bad", role: "alert" }, sentence(problem.message)));
    if (stopped) parts.push(el("p", { class: "note" }, "You stopped it; the replica has stopped, too."));
    if (told === null) return parts;
    const guess = predicted?.candidates.find(({ name }) => name === told.replica);
    const output = told.outputTokens === null ? "tokens not told" : plural(told.outputTokens, "token");
    const where = told.replica === null ? "nobody" : el("a", { href: places.replica(told.replica) }, told.replica);
    parts.push(
      facts([
        ["Answered by", where],
        ["Cached tokens", cachedWords(guess, told)],
        ["Time to first token", `${seconds(told.ttftS)} here, estimated ${seconds(guess?.ttft_s)}`],
        ["Whole answer", `${seconds(told.durationS)}, ${output}`],
        ["Ended", endWords(told.finish, stopped)],
        ["Request", told.requestId === null ? "" : el("a", { href: places.request(told.requestId) }, told.requestId)],
      ]),
    );
    if (told.promptTokens !== null && told.cachedTokens !== null) parts.unshift(hit(told));
    if (this._text !== "" && problem === null) {
      parts.push(
        el(
          "div",
          { class: "row" },
          el("button", { type: "button", on: { click: () => this._goOn() } }, "Go on from this answer"),
        ),
      );
    }
    return parts;
  }

  _goOn() {
    this._conversation.add("assistant", this._text);
    this._conversation.add("user", "");
    this._conversation.focusLast();
    mark(this._answer, "hidden", true);
    this._look();
  }
}

const EMPTY = () => el("p", { class: "empty" }, "Write something, and it is shown here.");

const key = (kind, words) => el("span", {}, el("span", { class: `swatch ${kind}` }), words);

const field = (label, id, input) => el("div", { class: "field" }, el("label", { for: id }, label), input);

function cachedWords(guess, told) {
  const reported = told.cachedTokens === null ? "not reported" : `${whole(told.cachedTokens)} reported`;
  return guess === undefined ? reported : `${whole(guess.lower_tokens ?? guess.matched_tokens)} predicted, ${reported}`;
}

/** The part of the prompt that was cached, filling up. */
function hit({ promptTokens: tokens, cachedTokens: cached }) {
  const label = `${whole(cached)} of the prompt's ${plural(tokens, "token")} were cached`;
  const drawn = [{ kind: "warm", from: 0, to: cached }];
  const bar = strip({ tokens, blocks: 0, blockTokens: 1, drawn, label, grows: true });
  return el("div", { class: "hit" }, bar, el("p", { class: "small" }, el("strong", {}, `${label}.`)));
}

function endWords(finish, stopped) {
  if (finish === null) return stopped ? "stopped" : badge("broke off", "warn");
  if (finish === "length") return "at its longest";
  return finish === "stop" ? "by itself" : finish;
}
