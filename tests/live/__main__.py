"""Print the table of predictions: `python -m tests.live [ROW...]`."""

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path

from tests.chaos.routers import router
from tests.live.engine import Engine, SGLang, ready
from tests.live.judge import HEADING, Tally, drive, judge
from tests.live.printing import check, show
from tests.live.rows import ROWS, Row
from tests.live.traffic import requests


def engine_of(row: Row, folder: Path) -> AbstractContextManager[Engine]:
    """The row's engine, from when it is ready until it has been ended."""
    running = (SGLang if row.sglang else Engine)(
        folder / "hits.jsonl",
        row.environment,
        row.options_with(folder),
        block_size=row.block_size,
        blocks=row.blocks,
        algorithm=row.algorithm,
        ranks=row.ranks,
    )
    return ready(running)


def run(row: Row, running: Engine, count: int, seed: int, *, typed: bool = False) -> Tally:
    """Send the row's requests to the engine through a router, and compare."""
    named = f"url={running.url},engine={running.kind}"
    if typed:
        named += f",events={running.events},replay={running.replay}"
    options = ("--replica", named, "--model-dir", f"m={running.folder / 'model'}", "--decisions", count)
    with router(*options, *row.router) as front:
        failed = asyncio.run(drive(front.url, requests(seed, row.change), count, row.clients))
        return judge(count, front.decisions(count), running.hits(), failed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.live", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"which rows; by default all of: {', '.join(ROWS)}")
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="of each row (default: 1000)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the conversations (default: 1)")
    parser.add_argument("--typed", action="store_true", help="tell the router the sockets, instead of letting it ask")
    args = parser.parse_args()
    check(parser, args.rows, ROWS, "row")
    print(f"{'':20} {HEADING}", flush=True)
    wrong = 0
    names = sorted(args.rows or ROWS, key=lambda name: [*map(repr, ROWS[name].engine)])
    for _, shared in groupby(names, key=lambda name: ROWS[name].engine):
        rows = {name: ROWS[name] for name in shared}
        try:
            with tempfile.TemporaryDirectory() as folder, engine_of(next(iter(rows.values())), Path(folder)) as running:
                for name, row in rows.items():
                    began_s = time.monotonic()
                    tally = run(row, running, args.requests, args.seed, typed=args.typed)
                    show(f"{name:20} {tally.line}   ({time.monotonic() - began_s:.0f} s)", tally)
                    wrong += tally.unmatched + tally.exact - tally.equal
        except (RuntimeError, AssertionError) as error:  # its engine did not start, or has ended
            wrong += 1
            print(f"{', '.join(rows)}: {error}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
