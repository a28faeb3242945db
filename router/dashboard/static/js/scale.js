/** Where values lie on an axis, and which of them have a label. */

const STEPS = [1, 2, 2.5, 5, 10];
const DAY_S = 86_400;
const TIMES_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21_600, ...[1, 2, 7, 14].map((days) => days * DAY_S)];

/** Round values from 0 to at least `top`, about `count` of them. */
export function ticks(top, count, leastStep = 0) {
  if (!(top > 0)) return [0, 1];
  const rough = Math.max(top / count, leastStep);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * STEPS.find((each) => each * power >= rough * 0.999);
  const values = [];
  for (let place = 0; (place - 1) * step < top * 0.999; place++) values.push(place * step);
  return values;
}

/** Moments at round distances within a span of unix seconds. */
export function timeTicks(from, to, count) {
  const step = TIMES_S.find((each) => (to - from) / each <= count) ?? TIMES_S.at(-1);
  const values = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) values.push(at);
  return values;
}

export const linear = (from, to, low, high) => {
  const span = to - from || 1;
  return (value) => low + ((value - from) / span) * (high - low);
};
