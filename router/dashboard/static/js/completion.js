/** One chat completion, streamed: its text as it comes, and what it says of itself. */

import { ask } from "./http.js";
import { events } from "./sse.js";

/** Calls `said(text)` for each piece. What it resolves to grows while it streams, in `told`. */
export async function completed(body, { signal, began, said }) {
  const askedMs = performance.now();
  const sent = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await ask("POST", "v1/chat/completions", sent, { signal, asksForKey: true });
  const told = {
    requestId: response.headers.get("x-request-id"),
    replica: response.headers.get("x-warmroute-replica"),
    cachedTokens: numberOf(response.headers.get("x-warmroute-cached-tokens")),
    ttftS: null,
    durationS: null,
    promptTokens: null,
    outputTokens: null,
    finish: null,
  };
  began(told);
  for await (const { data } of events(response.body)) {
    if (data === "[DONE]") break;
    took(JSON.parse(data), told, askedMs, said);
  }
  told.durationS = (performance.now() - askedMs) / 1000;
  return told;
}

function took(chunk, told, askedMs, said) {
  if (chunk.error) throw new Error(chunk.error.message);
  const choice = chunk.choices?.[0];
  const text = `${choice?.delta?.reasoning_content ?? ""}${choice?.delta?.content ?? ""}`;
  if (text !== "") {
    told.ttftS ??= (performance.now() - askedMs) / 1000;
    said(text);
  }
  told.finish = choice?.finish_reason ?? told.finish;
  if (chunk.usage) {
    told.promptTokens = chunk.usage.prompt_tokens;
    told.outputTokens = chunk.usage.completion_tokens;
    told.cachedTokens = chunk.usage.prompt_tokens_details?.cached_tokens ?? told.cachedTokens;
  }
}

const numberOf = (text) => (text === null || text === "" ? null : Number(text));
