/** Numbers for people: units, and no more digits than can be told apart. */

export const NONE = "\u2013";

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const MINUTES = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });
const DATE = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeZone: "UTC" });
const DATE_OF_YEAR = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", timeZone: "UTC" });

const known = (value) => typeof value === "number" && Number.isFinite(value);

export const whole = (value) => (known(value) ? WHOLE.format(value) : NONE);

export function compact(value) {
  if (!known(value)) return NONE;
  return Math.abs(value) < 10_000 && Number.isInteger(value) ? WHOLE.format(value) : COMPACT.format(value);
}

export function share(value) {
  if (!known(value)) return NONE;
  const percent = value * 100;
  const digits = percent > 99 && percent < 100 ? 2 : percent > 0 && percent < 10 ? 1 : 0;
  return `${percent.toFixed(digits)}%`;
}

/** A duration, such as a time to first token. */
export function seconds(value) {
  if (!known(value)) return NONE;
  if (value === 0) return "0 s";
  if (value < 0.001) return `${Math.round(value * 1e6)} \u00b5s`;
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return `${WHOLE.format(value)} s`;
}

/** A sum of durations, which may be of any size. */
export const duration = (value) => (value < 120 ? seconds(value) : age(value));

/** How long ago, in whole units. */
export function age(value) {
  if (!known(value)) return NONE;
  if (value < 1) return "now";
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172_800) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86_400)} d`;
}

/** The same, said of a moment. */
export const ago = (value) => (known(value) && value < 1 ? "just now" : `${age(value)} ago`);

export function bytes(value) {
  if (!known(value)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, Math.max(0, Math.floor(Math.log10(Math.max(1, value)) / 3)));
  const scaled = value / 1000 ** power;
  return `${power && scaled < 10 ? scaled.toFixed(1) : Math.round(scaled)} ${units[power]}`;
}

export function perSecond(value) {
  if (!known(value)) return NONE;
  return `${value < 10 && value !== 0 ? value.toFixed(value < 1 ? 2 : 1) : compact(Math.round(value))}/s`;
}

const plurals = (noun) => `${noun}${/(ch|sh|s)$/.test(noun) ? "es" : "s"}`;

export const plural = (count, noun) => `${whole(count)} ${count === 1 ? noun : plurals(noun)}`;

export const clock = (unixS) => (known(unixS) ? CLOCK.format(unixS * 1000) : NONE);
export const minutes = (unixS) => MINUTES.format(unixS * 1000);
export const day = (unixS) => (known(unixS) ? DAY.format(unixS * 1000) : NONE);

/** Days of the router's calendar, which is UTC. */
export const date = (unixS) => DATE.format(unixS * 1000);
export const dateOfYear = (unixS) => DATE_OF_YEAR.format(unixS * 1000);

export const shortened = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}\u2026` : text);
