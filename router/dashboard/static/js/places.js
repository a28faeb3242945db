/** Which page an address names, and the address of each: all behind the #. */

export const overview = "#/";
export const charts = "#/charts";
export const requests = "#/requests";
export const sessions = "#/sessions";
export const playground = "#/playground";
export const replica = (name) => `#/replica/${encodeURIComponent(name)}`;
export const tree = (holder = null) => `#/tree${searched({ holder })}`;
export const usage = (choice = {}) => `#/usage${searched(choice)}`;
export const request = (id) => `#/request/${encodeURIComponent(id)}`;

/** What is chosen, as the end of an address; nothing of what is empty. */
export function searched(choice) {
  const words = new URLSearchParams(Object.entries(choice).filter(([, value]) => value !== null)).toString();
  return words === "" ? "" : `?${words}`;
}

/** The page's name, what it is asked for, and what is chosen there. */
export function place(hash) {
  const [path, ...choice] = hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  try {
    return { name, argument: decodeURIComponent(rest.join("/")), choice: new URLSearchParams(choice.join("?")) };
  } catch {
    return { name: "unknown", argument: "", choice: new URLSearchParams() };
  }
}
