/** Decisions as lines of a table. */

import { clock, seconds, whole } from "./format.js";
import * as places from "./places.js";

/** Clients may give several requests one id. */
export const decisionKey = (one) => `${one.request_id} ${one.ts}`;

export function decisionColumns(state, short = false) {
  const columns = [
    {
      title: "When",
      head: true,
      cell: (one) => ({ text: clock(one.ts), href: places.request(one.request_id) }),
    },
    { title: "Replica", cell: (one) => replicaCell(one, state) },
    { title: "Prompt", right: true, cell: (one) => whole(one.prompt_tokens) },
    { title: "Cached", right: true, cell: cachedCell, about: "prompt tokens found cached, as the replica reports" },
    { title: "TTFT", right: true, wide: true, cell: (one) => seconds(one.ttft_s) },
    { title: "Ended", cell: endCell },
  ];
  if (short) return columns;
  return [
    ...columns.slice(0, 4),
    { title: "Predicted", right: true, wide: true, cell: (one) => whole(one.predicted_cached_tokens) },
    columns[4],
    { title: "Whole", right: true, wide: true, cell: (one) => seconds(one.duration_s) },
    columns[5],
    { title: "Model", wide: true, cell: (one) => one.model },
    { title: "Request", wide: true, cell: (one) => ({ text: one.request_id, soft: true }) },
  ];
}

function replicaCell(one, state) {
  if (one.chosen === null) return { text: "none", soft: true };
  const cell = { text: one.chosen, href: places.replica(one.chosen), hues: [state.hue(one.chosen)] };
  if (!one.prefill?.outcome) return cell;
  const { replica, outcome } = one.prefill;
  return outcome === "handed"
    ? { ...cell, text: `${replica} + ${one.chosen}`, title: `${replica} computed the prompt for ${one.chosen}` }
    : { ...cell, title: `${replica} was to compute the prompt (${outcome}); ${one.chosen} did` };
}

function cachedCell(one) {
  const cached = one.reported_cached_tokens ?? one.predicted_cached_tokens;
  if (cached === null || !one.prompt_tokens) return whole(cached);
  return { text: whole(cached), share: cached / one.prompt_tokens };
}

/** Whether it failed, as errors are counted on all pages; a client that leaves is no error. */
export const isFailed = ({ status, why }) => status >= 400 || (status > 0 && Boolean(why));

function endCell(one) {
  const again = [one.retries > 0 && `${one.retries} retried`, one.resumes > 0 && `${one.resumes} resumed`].filter(
    Boolean,
  );
  if (one.status === 0) return { text: "client left", badge: "warn", title: one.why ?? undefined };
  if (isFailed(one)) return { text: one.status < 400 ? "broke off" : String(one.status), badge: "bad", title: one.why };
  return again.length > 0 ? { text: again.join(", "), badge: "warn" } : { text: "answered", soft: true };
}
