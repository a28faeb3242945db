/** What prompts share, and which replicas hold it. */

import { el, say } from "../dom.js";
import { age, plural } from "../format.js";
import { get } from "../http.js";
import { showFailure } from "../parts.js";
import { Poll } from "../poll.js";
import { PrefixTree } from "../prefix-tree.js";

const LIMIT = 200;
const EVERY_S = 4;

export function open({ view, state }) {
  const about = el("p");
  const problem = el("div");
  const tree = new PrefixTree({ title: "What prompts share", noun: "prompt", hue: (name) => state.hue(name) });
  view.append(el("div", { class: "page-head" }, el("h1", {}, "Prefix tree"), about), problem, tree.node, tree.detail);

  const read = async (signal) => {
    const answer = await get(`prefixes?limit=${LIMIT}`, { signal });
    showFailure(problem, null);
    say(about, aboutPrompts(answer));
    tree.show(answer, `All of the last ${plural(answer.prompts, "prompt")}`);
  };
  const poll = new Poll(EVERY_S, read, (error) => showFailure(problem, error));
  return {
    close() {
      poll.close();
      tree.close();
    },
  };
}

function aboutPrompts({ prompts, span_s: spanS, texts }) {
  const hidden = texts ? "" : " Their words are not kept: clients have keys, or the router was told so.";
  return `Of the last ${plural(prompts, "prompt")}, in ${age(spanS)}. Click a bar to look closer.${hidden}`;
}
