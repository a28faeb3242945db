"""Print predictions through the router beside those through Envoy and its picker.

Several workers get the same requests, first from one client, then from several. Before each row all caches are cleared.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx2

from lab.trace.formats import read_log
from qualification.engines.engine import MODEL, Engine, ready
from qualification.engines.judge import HEADING, Tally, drive, explain_wrong, judge
from qualification.engines.printing import show
from qualification.engines.published import Published, published
from qualification.engines.traffic import chat, requests
from tests.chaos.envoy import as_documented, duplex, gateway, port_of_picker
from tests.chaos.routers import router

WORKERS, CLIENTS = 4, 4
SHORT = {"model": MODEL, "prompt": "a", "max_tokens": 1}
WAYS = {"router": None, "Envoy and picker": as_documented, "the same, FULL_DUPLEX_STREAMED": duplex}


class Worker(NamedTuple):
    engine: Engine
    events: Published


def started(folder: Path, stack: ExitStack, count: int = WORKERS) -> list[Worker]:
    workers = []
    for number in range(count):  # one after the other: at once, all may take too long on a busy machine
        engine = stack.enter_context(ready(Engine(folder / f"w{number}.jsonl", {}, ())))
        workers.append(Worker(engine, stack.enter_context(published(engine))))
    return workers


def run(workers: Sequence[Worker], way: str, count: int, clients: int, seed: int = 1) -> Tally:
    """Send requests one way, and compare every prediction with the finding of the engine that answered."""
    for worker in workers:
        httpx2.post(f"{worker.engine.url}{worker.engine.reset_path}", timeout=60).raise_for_status()
        # It publishes that with its next step.
        httpx2.post(f"{worker.engine.url}/v1/completions", json=SHORT, timeout=60).raise_for_status()
    named = [f"name=w{number},url={worker.engine.url},engine=vllm" for number, worker in enumerate(workers)]
    options = [option for name in named for option in ("--replica", name)]
    model = ("--model-dir", f"{MODEL}={workers[0].engine.folder / 'model'}")
    change = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "requests.jsonl"
        more = (f"--set=decisions={count}", "--request-log", log, "--picker-listen", "127.0.0.1:0")
        with ExitStack() as stack:
            front = stack.enter_context(router(*options, *model, *more, within_s=60))
            url = front.url
            if change is not None:
                url = stack.enter_context(gateway(port_of_picker(front), change)).url
            sent = asyncio.run(drive(url, requests(seed, chat), count, clients))
            logged = {name: one for worker in workers for name, one in worker.engine.found().items()}
            found = {sent.names.get(name, name): one for name, one in logged.items()}
            tally = judge(count, front.decisions(count), found, sent.errors)
        lines = list(read_log(log))
    for number, worker in enumerate(workers):
        explain_wrong(tally, (line for line in lines if line.replica == f"w{number}"), found, worker.events)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m qualification.engines.behind", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="of each row (default: 1000)")
    args = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        workers = started(Path(folder), stack)
        print(f"{'':42} {HEADING}", flush=True)
        for clients in (1, CLIENTS):
            for way in WAYS:
                tally = run(workers, way, args.requests, clients)
                bad += tally.unmatched + tally.unexplained
                show(f"{f'{way}, clients: {clients}':42} {tally.line}", tally)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
