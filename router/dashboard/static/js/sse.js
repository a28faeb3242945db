/** Server-sent events out of a fetched body: EventSource could send no key. */

const LONGEST = 16 * 1024 * 1024; // characters of one event; the router sends far less

/** Yields `{event, data}` of each; ends with the body. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest = (rest + value).replaceAll("\r\n", "\n"); // proxies may write them so
      if (rest.length > LONGEST) throw new Error("an event of the feed does not end");
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const found = parsed(rest.slice(0, end));
        rest = rest.slice(end + 2);
        if (found !== null) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(text) {
  let event = "message";
  const data = [];
  for (const line of text.split("\n")) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  return data.length === 0 ? null : { event, data: data.join("\n") };
}
