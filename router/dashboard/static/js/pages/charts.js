/** Series over the last half hour. */

import { Chart } from "../chart.js";
import { el } from "../dom.js";
import { compact, perSecond, seconds, share } from "../format.js";

const SPANS = [
  [300, "5 minutes"],
  [900, "15 minutes"],
  [1800, "30 minutes"],
];

const CHARTS = [
  {
    title: "Time to first token",
    format: seconds,
    series: [
      { name: "ttft_p50_s", label: "p50", hue: "var(--hue-0)" },
      { name: "ttft_p90_s", label: "p90", hue: "var(--hue-6)" },
      { name: "ttft_p99_s", label: "p99", hue: "var(--hue-7)" },
    ],
  },
  {
    title: "Hit rate",
    about: "share of prompt tokens",
    format: share,
    top: 1,
    series: [
      { name: "hit_reported", label: "reported", hue: "var(--hue-1)" },
      { name: "hit_predicted", label: "predicted", hue: "var(--hue-0)", dashed: true },
    ],
  },
  {
    title: "Requests",
    about: "answered in a second",
    format: perSecond,
    series: [
      { name: "requests_per_s", label: "requests", hue: "var(--hue-2)" },
      { name: "errors_per_s", label: "errors", hue: "var(--hue-7)" },
    ],
  },
  {
    title: "Prompt tokens",
    about: "routed in a second",
    format: perSecond,
    series: [{ name: "prompt_tokens_per_s", label: "tokens", hue: "var(--hue-4)" }],
  },
  {
    title: "Requests under way",
    format: compact,
    counts: true,
    series: [
      { name: "in_flight", label: "in flight", hue: "var(--hue-0)" },
      { name: "waiting", label: "waiting", hue: "var(--hue-5)" },
    ],
  },
  {
    title: "Queue",
    about: "prompt tokens to compute",
    format: compact,
    counts: true,
    series: [{ name: "queued_tokens", label: "queued tokens", hue: "var(--hue-5)" }],
  },
];

export function open({ view, state }) {
  const drawn = CHARTS.map((options) => new Chart(options));
  let spanS = SPANS.at(-1)[0];

  const show = () => {
    const at = state.points.values("at");
    const first = firstWithin(at, spanS);
    for (const chart of drawn) chart.show(at.slice(first), (name) => state.points.values(name).slice(first));
  };
  const choice = el(
    "select",
    {
      on: {
        change: (event) => {
          spanS = Number(event.target.value);
          show();
        },
      },
    },
    SPANS.map(([value, text]) => el("option", { value, selected: value === spanS }, text)),
  );
  view.append(
    el(
      "div",
      { class: "page-head" },
      el("h1", {}, "Charts"),
      el("p", {}, "A point is five seconds. Point at a chart, or use the arrow keys on it."),
      el("label", { class: "end small" }, "Last ", choice),
    ),
    el(
      "div",
      { class: "columns even live-figures" },
      drawn.map((chart) => chart.node),
    ),
  );
  show();
  const unsubscribe = state.subscribe((what) => what === "points" && show());
  return {
    close() {
      unsubscribe();
      for (const chart of drawn) chart.close();
    },
  };
}

function firstWithin(at, spanS) {
  const from = (at.at(-1) ?? 0) - spanS;
  const found = at.findIndex((moment) => moment >= from);
  return found < 0 ? 0 : found;
}
