/** The last so many of a series: columns of numbers that never grow. */

export class Ring {
  constructor(capacity, names = []) {
    this._capacity = capacity;
    this._begin(names);
  }

  _begin(names) {
    this._columns = Object.fromEntries(names.map((name) => [name, new Float64Array(this._capacity)]));
    this._next = this.length = 0;
  }

  push(point) {
    for (const [name, column] of Object.entries(this._columns)) column[this._next] = point[name] ?? NaN;
    this._next = (this._next + 1) % this._capacity;
    this.length = Math.min(this.length + 1, this._capacity);
  }

  /** Columns as the router sends them, oldest first. */
  load(columns) {
    const names = Object.keys(columns).filter((name) => Array.isArray(columns[name]));
    this._begin(names);
    const count = columns.at.length;
    for (let place = Math.max(0, count - this._capacity); place < count; place++) {
      this.push(Object.fromEntries(names.map((name) => [name, columns[name][place]])));
    }
  }

  /** Oldest first; NaN where nothing is known. */
  values(name) {
    const column = this._columns[name] ?? [];
    const begin = (this._next - this.length + this._capacity) % this._capacity;
    return Float64Array.from({ length: this.length }, (_, place) => column[(begin + place) % this._capacity]);
  }
}
