/** One decision: what was weighed, what was predicted, and what came of it. */

import { candidateList, inWords, toldPortions, weighed } from "../candidates.js";
import { el, fill } from "../dom.js";
import { day, plural, seconds, whole } from "../format.js";
import { Refused, get } from "../http.js";
import { onKey } from "../keys.js";
import { Totals, badge, card, failure } from "../parts.js";
import { replica, requests } from "../places.js";
import { strip } from "../blocks.js";

export function open({ view, argument, state }) {
  const body = el("div", { class: "stack" }, el("p", { class: "soft" }, "Reading\u2026"));
  view.append(
    el("div", { class: "page-head" }, el("h1", {}, "Request"), el("p", { class: "mono" }, argument)),
    el("p", {}, el("a", { href: requests }, "All requests")),
    body,
  );
  let leaving = null;
  const renew = () => {
    leaving?.abort();
    leaving = new AbortController();
    read(argument, leaving.signal)
      .then((decision) => fill(body, parts(decision, state)))
      .catch((error) => error.name === "AbortError" || fill(body, failure(error)));
  };
  const unsubscribe = onKey(renew);
  renew();
  return {
    close() {
      unsubscribe();
      leaving.abort();
    },
  };
}

/** The decision, and into which blocks its prompt was cut: the replica that had it says so. */
async function read(id, signal) {
  const decision = await get(`decisions/${encodeURIComponent(id)}`, { signal });
  if (decision.chosen === null || !decision.exact) return decision;
  try {
    const found = await get(`dashboard/replicas/${encodeURIComponent(decision.chosen)}`, { signal });
    const size = found.replica.block_size;
    return size === null ? decision : { ...decision, block_size: size, blocks: Math.floor(decision.prompt_tokens / size) };
  } catch (error) {
    if (error instanceof Refused) return decision; // the replica is gone; what was decided is not
    throw error;
  }
}

function parts(decision, state) {
  const found = weighed(decision);
  return [
    figures(decision),
    card("Why it went there", el("p", {}, inWords(found, { past: true })), outcome(decision)),
    card("Where its tokens come from", tokensBySource(decision)),
    card("Predicted and reported", comparison(decision)),
    card("What was weighed", candidateList(found, state)),
  ];
}

function tokensBySource({ portions }) {
  if (!portions?.length) return el("p", { class: "soft" }, "not told");
  return el("ul", { class: "plain" }, toldPortions(portions).map((told) => el("li", {}, told)));
}

function figures(decision) {
  const totals = new Totals(["Went to", "Prompt", "Cached", "Time to first token", "Whole answer", "When"]);
  const reported = decision.reported_cached_tokens;
  totals.show({
    "Went to": [decision.chosen ?? "nobody", `policy ${decision.policy}, model ${decision.model}`],
    Prompt: [whole(decision.prompt_tokens), decision.exact ? "tokens" : "tokens, an estimate"],
    Cached: [
      whole(reported ?? decision.predicted_cached_tokens),
      reported === null ? "tokens, as predicted" : "tokens, as reported",
    ],
    "Time to first token": [seconds(decision.ttft_s), `estimated ${seconds(decision.estimated_ttft_s)}`],
    "Whole answer": [
      seconds(decision.duration_s),
      decision.waited_s > 0 ? `${seconds(decision.waited_s)} of it waiting for room` : "did not wait for room",
    ],
    When: [day(decision.ts).split(", ")[1], day(decision.ts).split(", ")[0]],
  });
  return totals.node;
}

function outcome({ status, why, retries, resumes, chosen }) {
  const told = [];
  if (status === 200) told.push(why ? badge("broke off", "bad") : badge("answered", "good"));
  else if (status === 0) told.push(badge("the client left", "warn"));
  else told.push(badge(`status ${status}`, "bad"));
  if (retries > 0) told.push(badge(`tried ${retries} more ${retries === 1 ? "time" : "times"}`, "warn"));
  if (resumes > 0) told.push(badge(`went on elsewhere ${resumes === 1 ? "once" : `${resumes} times`}`, "warn"));
  if (why) told.push(el("span", {}, why));
  if (chosen !== null) told.push(el("a", { href: replica(chosen) }, `Look at ${chosen}`));
  return el("p", { class: "row after" }, told);
}

function comparison(decision) {
  const tokens = decision.prompt_tokens;
  const bar = (name, cached) => {
    if (cached === null)
      return [el("span", { class: "name" }, name), el("span", { class: "soft" }, "not told"), el("span")];
    const drawn = [{ kind: "warm", from: 0, to: cached }];
    const label = `${name}: ${whole(cached)} of ${whole(tokens)} tokens`;
    const drawing = strip({ tokens, blocks: 0, blockTokens: 1, drawn, label });
    return [el("span", { class: "name" }, name), drawing, el("span", { class: "value" }, whole(cached))];
  };
  const { predicted_cached_tokens: predicted, reported_cached_tokens: reported } = decision;
  return [
    el("div", { class: "bars wide" }, bar("predicted", predicted), bar("reported", reported)),
    el("p", { class: "small soft after" }, difference(predicted, reported)),
    el("p", { class: "row small after" }, exactness(decision)),
  ];
}

/** The three claims, each by itself; `why_inexact` is the reason for the first that does not hold. */
function exactness(decision) {
  const claims = { Tokens: "tokens_exact", Index: "index_exact", Prediction: "prediction_exact" };
  const told = Object.entries(claims).map(([name, field]) =>
    badge(`${name}: ${decision[field] ? "exact" : "not exact"}`, decision[field] ? "good" : "warn"),
  );
  return decision.why_inexact ? [...told, el("span", { class: "soft" }, decision.why_inexact)] : told;
}

function difference(predicted, reported) {
  if (predicted === null || reported === null) return "One of the two is not known.";
  const more = reported - predicted;
  if (more === 0) return "To the token what was predicted.";
  if (more > 0) {
    const told = `${plural(more, "token")} more than predicted`;
    return `${told}: answers still running, or the beginning of a block that goes on differently.`;
  }
  return `${plural(-more, "token")} fewer than predicted: they were evicted in the meantime, or not computed yet.`;
}
