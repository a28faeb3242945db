/** The app: its navigation, the page that the address names, and the state of the connection. */

import { announce, el, fill, mark, say } from "./dom.js";
import { Feed } from "./feed.js";
import { age } from "./format.js";
import { askForKey, forget, key, onKey } from "./keys.js";
import * as charts from "./pages/charts.js";
import * as missing from "./pages/missing.js";
import * as overview from "./pages/overview.js";
import * as playground from "./pages/playground.js";
import * as replica from "./pages/replica.js";
import * as request from "./pages/request.js";
import * as requests from "./pages/requests.js";
import * as sessions from "./pages/sessions.js";
import * as tree from "./pages/tree.js";
import * as usage from "./pages/usage.js";
import * as places from "./places.js";
import { State } from "./state.js";
import { themed } from "./theme.js";

const NAVIGATION = [
  ["Overview", places.overview, ["", "replica"]],
  ["Charts", places.charts, ["charts"]],
  ["Prefix tree", places.tree(), ["tree"]],
  ["Requests", places.requests, ["requests", "request"]],
  ["Sessions", places.sessions, ["sessions"]],
  ["Usage", places.usage(), ["usage"]],
  ["Playground", places.playground, ["playground"]],
];
const PAGES = { "": overview, charts, tree, replica, requests, request, sessions, usage, playground };
const WORDS = { connecting: "connecting", live: "live", gone: "no connection", refused: "key wanted" };

const byId = (id) => document.getElementById(id);

class App {
  constructor() {
    this.state = new State();
    this.feed = new Feed(this.state);
    this._page = null;
    this._links = NAVIGATION.map(([title, href, names]) => ({ names, link: el("a", { href }, title) }));
  }

  start() {
    fill(
      byId("nav"),
      this._links.map(({ link }) => el("li", {}, link)),
    );
    themed(byId("theme"));
    this._keyButton();
    this.state.subscribe((what) => what === "connection" && this._connection());
    setInterval(() => this._connection(), 1000);
    window.addEventListener("hashchange", () => this._open(true));
    this._open(false);
    this.feed.start();
  }

  _open(moved) {
    const { name, argument, choice } = places.place(location.hash);
    this._page?.close();
    const view = byId("main");
    fill(view);
    this._page = (PAGES[name] ?? missing).open({ view, argument, choice, state: this.state, feed: this.feed });
    for (const { names, link } of this._links) mark(link, "aria-current", names.includes(name) ? "page" : null);
    const title = view.querySelector("h1")?.textContent ?? "";
    document.title = `${title} \u00b7 warmroute`;
    if (!moved) return;
    scrollTo(0, 0);
    view.focus({ preventScroll: true }); // so that reading begins at the new page
    announce(title);
  }

  _connection() {
    const { state, why, since } = this.state.connection;
    const lost = state === "gone" || state === "refused";
    const live = byId("live");
    say(live, WORDS[state]);
    mark(live, "data-state", state);
    document.documentElement.classList.toggle("stale", lost);
    const trying = state === "gone" ? " Trying again." : " Press \u201cKey\u201d to give one.";
    say(byId("outage-why"), lost ? `${sentence(why)}${trying}` : "");
    // Beside the alert, which would be read out anew each second.
    const old = lost && this.state.fleet !== null;
    say(byId("outage-age"), old ? `What you see is ${age((Date.now() - since) / 1000)} old.` : "");
    mark(byId("outage"), "hidden", !lost);
  }

  _keyButton() {
    const isOfUse = () => key() !== null && this.state.connection.state !== "refused";
    const show = () => say(byId("key"), isOfUse() ? "Forget key" : "Key");
    byId("key").addEventListener("click", () => {
      if (isOfUse()) forget();
      else askForKey("It is kept in this tab, and sent to this router only.", { insist: true });
    });
    onKey(show);
    this.state.subscribe((what) => what === "connection" && show());
    show();
  }
}

const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`.replace(/\.\.$/, ".");

new App().start();
