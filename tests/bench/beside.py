"""`python -m tests.bench.beside FOLDER`: a request through this router's front, in turns with that of another checkout.

Two processes take turns of some milliseconds, so that whatever slows the machine slows both; printed is the median of
the ratios. The other may have another Python, or compiled modules.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from tests.bench.measure import heading, row

TURNS = 400
OF_TURN = 40  # requests
HERE = Path(__file__).parents[2]
WORKER = """
import logging, sys, time
import uvloop
from tests.bench import front as it

async def main():
    logging.disable(logging.WARNING)
    characters, stream, limited = (int(each) for each in sys.argv[1:])
    answer = it.STREAM if stream else [it.PLAIN]
    front = it.FrontOnWires(**({"keys": (it.LIMITED,)} if limited else {}))
    made, start = [], 0
    for line in sys.stdin:
        if not made:
            made = it.bodies(characters, bool(stream), start)
            start += it.REQUESTS
        asked, made = made[: int(line)], made[int(line) :]
        began = time.process_time_ns()
        for body in asked:
            front.ask(body, answer)
        print(time.process_time_ns() - began, flush=True)
    await front.close()

uvloop.run(main())
"""
CASES = (
    ("800 characters, one answer", (800, 0, 0)),
    ("the same with limits", (800, 0, 1)),
    ("16,000 characters, 16 events", (16_000, 1, 0)),
)


def started(python: str, folder: Path, arguments: tuple[int, ...]) -> "subprocess.Popen[str]":
    command = [python, "-c", WORKER, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def took_us(process: "subprocess.Popen[str]") -> float:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{OF_TURN}\n")
    process.stdin.flush()
    return int(process.stdout.readline()) / 1000 / OF_TURN


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.beside", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the other checkout")
    parser.add_argument("--python", default=sys.executable, help="the other's interpreter (default: this one)")
    parser.add_argument("--turns", type=int, default=TURNS)
    args = parser.parse_args()
    heading(f"a request through the front, here and in the other checkout, {args.turns} turns of {OF_TURN}")
    for name, arguments in CASES:
        other = args.python, args.folder.resolve()
        with started(sys.executable, HERE, arguments) as here, started(*other, arguments) as there:
            for process in (here, there):
                took_us(process)  # warm up
            pairs = [(took_us(here), took_us(there)) for _ in range(args.turns)]
            for process in (here, there):
                assert process.stdin is not None
                process.stdin.close()
        row(name, [one for one, _ in pairs], "us")
        row(f"{name}, the other", [other for _, other in pairs], "us")
        print(f"| {name}: ratio | **{statistics.median(one / other for one, other in pairs):.3f}** |  |", flush=True)


if __name__ == "__main__":
    main()
