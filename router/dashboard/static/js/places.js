/** Which page an address names, and the address of each: all behind the #. */

export const overview = "#/";
export const charts = "#/charts";
export const tree = "#/tree";
export const requests = "#/requests";
export const playground = "#/playground";
export const replica = (name) => `#/replica/${encodeURIComponent(name)}`;
export const request = (id) => `#/request/${encodeURIComponent(id)}`;

/** The page's name, and what it is asked for. */
export function place(hash) {
  const [name = "", ...rest] = hash.replace(/^#\/?/, "").split("/");
  try {
    return { name, argument: decodeURIComponent(rest.join("/")) };
  } catch {
    return { name: "unknown", argument: "" };
  }
}
