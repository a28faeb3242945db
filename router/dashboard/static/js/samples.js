/** Prompts to begin with: two that begin alike, and one that does not. */

const SHOP =
  "You are a support agent of Example Shop. Answer in two sentences, name the order, and say what happens next. " +
  "Never promise a refund before the order was looked up. If the parcel is late, say when it was handed over, who " +
  "carries it, and how the customer can follow it. Be kind, and do not repeat the question. Order 1 of last week: one " +
  "lamp, blue, one chair, broken on arrival; the customer wants another one, and has sent three photographs.";
const REVIEW =
  "You are a code reviewer. Say what is wrong with the patch, quote the line, and suggest a better one. Begin with what " +
  "would break, then what is slow, and leave taste to the end. One paragraph for each finding. If there is nothing to " +
  "say, say so. Names are part of the code: mind them.";

export const SAMPLES = [
  { title: "A customer asks", system: SHOP, message: "Where is my parcel?" },
  { title: "Another customer asks", system: SHOP, message: "Can I have the chair in green?" },
  { title: "A patch to review", system: REVIEW, message: "for (let i = 0; i <= rows.length; i++) draw(rows[i]);" },
];
