/** What the router has told, for all pages: the newest frame, and the last half hour. */

import { Ring } from "./ring.js";

const POINTS = 360;
const HUES = 12;
const MAX_NAMES = 5000;

export class State {
  constructor() {
    this.hello = null;
    this.fleet = null;
    this.points = new Ring(POINTS);
    this.connection = { state: "connecting", why: "", since: Date.now() };
    this._hues = new Map();
    this._listeners = new Set();
  }

  /** `listener(what)` hears of hello, points, fleet and connection; the answer ends that. */
  subscribe(listener) {
    this._listeners.add(listener);
    return () => this._listeners.delete(listener);
  }

  take(frame) {
    const role = this.hello?.role;
    this.hello = frame.router;
    this.fleet = frame;
    const names = frame.replicas.map((row) => row.name);
    const inOrder = (one, other) => one.localeCompare(other, "en", { numeric: true });
    for (const name of names.sort(inOrder)) this.hue(name);
    if (this.hello.role !== role) this._tell("hello");
    this._tell("fleet");
  }

  past(columns) {
    this.points.load(columns);
    this._tell("points");
  }

  connect(state, why) {
    if (this.connection.state === state && this.connection.why === why) return;
    const since = this.connection.state === state ? this.connection.since : Date.now();
    this.connection = { state, why, since };
    this._tell("connection");
  }

  /** The names of models, at most 100. */
  get models() {
    return this.fleet?.models ?? [];
  }

  get isAdmin() {
    return this.hello?.role === "admin";
  }

  /** Of a replica, always the same colour: a custom property's value. */
  hue(name) {
    let number = this._hues.get(name);
    if (number === undefined) {
      if (this._hues.size >= MAX_NAMES) this._hues.clear();
      number = this._hues.size % HUES;
      this._hues.set(name, number);
    }
    return `var(--hue-${number})`;
  }

  _tell(what) {
    for (const listener of [...this._listeners]) listener(what);
  }
}
