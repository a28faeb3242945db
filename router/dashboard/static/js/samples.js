/** Prompts to begin with: pairs that begin alike, one of them long, and one that begins like none. */

import { ask } from "./http.js";

const SHOP =
  "You are a support agent of Example Shop. Answer in two sentences, name the order, and say what happens next. " +
  "Never promise a refund before the order was looked up. If the parcel is late, say when it was handed over, who " +
  "carries it, and how the customer can follow it. Be kind, and do not repeat the question. Order 1 of last week: one " +
  "lamp, blue, one chair, broken on arrival; the customer wants another one, and has sent three photographs.";
const REVIEW =
  "You are a code reviewer. Say what is wrong with the patch, quote the line, and suggest a better one. Begin with what " +
  "would break, then what is slow, and leave taste to the end. One paragraph for each finding. If there is nothing to " +
  "say, say so. Names are part of the code: mind them.";

const GUIDE = "dashboard/lighthouse.txt"; // some 4,000 tokens; `warmroute demo` asks about it, too
const guide = async () => `Answer from this guide, in one sentence:\n\n${await (await ask("GET", GUIDE)).text()}`;

/** `system()` is a text, or resolves to one. */
export const SAMPLES = [
  { title: "Ask a long guide", system: guide, message: "How many steps does the tower have?" },
  { title: "Ask it again", system: guide, message: "What was the goat called?" },
  { title: "A customer asks", system: () => SHOP, message: "Where is my parcel?" },
  { title: "Another customer asks", system: () => SHOP, message: "Can I have the chair in green?" },
  { title: "A patch to review", system: () => REVIEW, message: "for (let i = 0; i <= rows.length; i++) draw(rows[i]);" },
];
