/** For addresses that name no page. */

import { el } from "../dom.js";
import { overview } from "../places.js";

export function open({ view }) {
  view.append(
    el("h1", {}, "There is no such page"),
    el("p", {}, "Go back to the ", el("a", { href: overview }, "overview"), "."),
  );
  return { close() {} };
}
