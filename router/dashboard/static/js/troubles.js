/** What happened to event streams while the page was open: seen by comparing counters from frame to frame. */

const KEPT = 30;
const COUNTERS = [
  ["gaps", "gap"],
  ["repairs", "repair"],
  ["restarts", "restart"],
  ["digest_mismatches", "mismatch"],
  ["lost_batches", "lost"],
];

export const WORDS = {
  gap: ["gap", "warn", "events were missed"],
  repair: ["repaired", "good", "what was missed has been asked for again"],
  restart: ["restart", "info", "the replica began anew with an empty cache"],
  mismatch: ["mismatch", "bad", "the replica's digest differed from the index; its cache is read anew"],
  lost: ["lost", "bad", "batches could not be had any more"],
  reconnect: ["reconnected", "info", "the connection was made anew"],
  down: ["down", "bad", "it takes no requests"],
  up: ["up", "good", "it takes requests again"],
  draining: ["draining", "warn", "it gets no new requests"],
};

export class Troubles {
  constructor() {
    this.found = []; // newest first, never more than KEPT
    this._before = new Map();
  }

  /** Of a frame of the feed. */
  look(fleet) {
    const rows = new Map();
    for (const row of fleet.replicas) {
      const before = this._before.get(row.name);
      if (before !== undefined) this._compare(before, row, fleet.at);
      rows.set(row.name, row);
    }
    this._before = rows;
  }

  _compare(before, row, at) {
    for (const [counter, kind] of COUNTERS) {
      const count = (row[counter] ?? 0) - (before[counter] ?? 0);
      if (count > 0) this._note({ at, replica: row.name, kind, count });
    }
    if (row.status !== before.status) this._note({ at, replica: row.name, kind: row.status, count: 1 });
  }

  _note(trouble) {
    this.found.unshift(trouble);
    this.found.length = Math.min(this.found.length, KEPT);
  }
}
