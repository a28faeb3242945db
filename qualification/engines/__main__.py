"""Print the table of predictions: `python -m qualification.engines [ROW...]`."""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.trace.formats import read_log
from qualification.engines.engine import Engine, SGLang, ready
from qualification.engines.judge import HEADING, Tally, drive, explain_wrong, judge
from qualification.engines.printing import check, show
from qualification.engines.published import Published, published
from qualification.engines.results import Result, keep, kept
from qualification.engines.rows import ROWS, Row
from qualification.engines.traffic import requests
from tests.chaos.routers import router


@contextmanager
def engine_of(row: Row, folder: Path) -> Iterator[tuple[Engine, Published]]:
    """The row's engine and its events, from when it is ready until it has been ended."""
    running = (SGLang if row.sglang else Engine)(
        folder / "hits.jsonl",
        row.environment,
        row.options_with(folder),
        block_size=row.block_size,
        blocks=row.blocks,
        algorithm=row.algorithm,
        ranks=row.ranks,
        model=row.model,
    )
    with ready(running), published(running) as events:
        yield running, events


def run(row: Row, running: Engine, events: Published, count: int, seed: int) -> Tally:
    """Send the row's requests to the engine through a router, and compare."""
    named = f"url={running.url},engine={running.kind}"
    model = () if row.is_asked else ("--model-dir", f"m={running.folder / 'model'}")
    options = ("--replica", named, *model, f"--set=decisions={count}")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "requests.jsonl"
        with router(*options, "--request-log", log, *row.router) as front:
            sent = asyncio.run(drive(front.url, requests(seed, row.change), count, row.clients))
            found = {sent.names.get(name, name): one for name, one in running.found().items()}
            tally = judge(count, front.decisions(count), found, sent.errors)
        explain_wrong(tally, read_log(log), found, events)
        return tally


def by_engine(names: Iterable[str]) -> list[list[str]]:
    """Rows that may share an engine, in the order of the first of each."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        groups.setdefault(ROWS[name].engine, []).append(name)
    return list(groups.values())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m qualification.engines", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"which rows; by default all of: {', '.join(ROWS)}")
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="of each row (default: 1000)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the conversations (default: 1)")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="keep results there, and run only rows that it lacks"
    )
    args = parser.parse_args()
    check(parser, args.rows, ROWS, "row")
    print(f"{'':24} {HEADING}", flush=True)
    bad = 0
    done = kept(args.results)
    wanted = [name for name in args.rows or ROWS if name not in done]
    for shared in by_engine(wanted):
        rows = {name: ROWS[name] for name in shared}
        try:
            with (
                tempfile.TemporaryDirectory() as folder,
                engine_of(next(iter(rows.values())), Path(folder)) as (running, events),
            ):
                for name, row in rows.items():
                    began_s = time.monotonic()
                    tally = run(row, running, events, args.requests, args.seed)
                    took_s = time.monotonic() - began_s
                    keep(args.results, Result(name, args.requests, args.seed, took_s, tally))
                    show(f"{name:24} {tally.line}   ({took_s:.0f} s)", tally)
                    bad += tally.unmatched + tally.unexplained
        except (RuntimeError, AssertionError) as error:  # its engine did not start, or has ended
            bad += 1
            print(f"{', '.join(rows)}: {error}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
