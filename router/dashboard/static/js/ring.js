/** The last so many points of a series. */

export class Ring {
  constructor(capacity) {
    this._capacity = capacity;
    this._points = [];
  }

  push(point) {
    this._points = [...this._points, point].slice(-this._capacity);
  }

  /** Columns as the router sends them, oldest first. */
  load(columns) {
    const names = Object.keys(columns).filter((name) => Array.isArray(columns[name]));
    const points = columns.at.map((_, place) => Object.fromEntries(names.map((name) => [name, columns[name][place]])));
    this._points = points.slice(-this._capacity);
  }

  /** Oldest first; NaN where nothing is known. */
  values(name) {
    return Float64Array.from(this._points, (point) => point[name] ?? NaN);
  }
}
