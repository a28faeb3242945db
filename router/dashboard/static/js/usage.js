/** Questions to the router about usage, and sums of its answers. */

import { searched } from "./places.js";

const DAY_S = 86_400;
const USUAL_DAYS = 30;
export const PERIODS = [7, USUAL_DAYS, 90];
export const KINDS = { key: "key", model: "model", "key,model": "key and model" };
export const TOKENS = ["computed_tokens", "cached_tokens", "generated_tokens"];
const COUNTED = [...TOKENS, "requests", "client_errors", "server_errors", "first_tokens", "first_token_s", "saved_s"];

/** What an address chooses; anything that cannot be chosen is as usual. */
export function chosen(words) {
  const [days, key, model, by] = [Number(words.get("days")), words.get("key"), words.get("model"), words.get("by")];
  return {
    days: PERIODS.includes(days) ? days : USUAL_DAYS,
    key,
    model,
    by: Object.hasOwn(KINDS, by) ? by : key === null ? "key" : "model",
  };
}

/** The router's address for a choice; `more` is what else it is asked, such as a limit. */
export function asked({ days, key, model }, nowMs, more) {
  const from = new Date(nowMs - (days - 1) * DAY_S * 1000).toISOString().slice(0, 10);
  return `usage${searched({ from, key, model, ...more })}`;
}

/** Columns with a number for each day from the first to the last one; `at` in unix seconds. */
export function daily({ from, to, usage }) {
  const first = secondsOf(from);
  const count = (secondsOf(to) - first) / DAY_S + 1;
  const columns = Object.fromEntries(TOKENS.map((name) => [name, new Float64Array(count)]));
  for (const row of usage) {
    const place = (secondsOf(row.day) - first) / DAY_S;
    for (const name of TOKENS) columns[name][place] = row[name];
  }
  return { at: Float64Array.from({ length: count }, (_, place) => first + place * DAY_S), ...columns };
}

export const secondsOf = (day) => Date.parse(day) / 1000;

/** One row of all. */
export function together(rows) {
  const sum = Object.fromEntries(COUNTED.map((name) => [name, 0]));
  for (const row of rows) for (const name of COUNTED) sum[name] += row[name];
  return figured(sum);
}

/** A row with what follows from its counts; null where there is nothing to divide. */
export function figured(row) {
  const { computed_tokens: computed, cached_tokens: cached, first_tokens: answers } = row;
  const prompt = computed + cached;
  return {
    ...row,
    prompt_tokens: prompt,
    tokens: prompt + row.generated_tokens,
    errors: row.client_errors + row.server_errors,
    cached_share: prompt > 0 ? cached / prompt : null,
    first_token_mean_s: answers > 0 ? row.first_token_s / answers : null,
  };
}

const names = new Intl.Collator("en", { numeric: true });

/** Rows in the order of a column; those without a value last. */
export function ordered(rows, by, descending) {
  const sign = descending ? -1 : 1;
  return [...rows].sort((one, other) => {
    const [mine, others] = [one[by], other[by]];
    if (mine === null || others === null) return (mine === null) - (others === null);
    return sign * (typeof mine === "string" ? names.compare(mine, others) : mine - others);
  });
}
