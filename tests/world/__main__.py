"""`python -m tests.world --seed N` prints what happens in one world; without a seed it looks for one that fails.

`--shrink` leaves out of a failing world what its failure does not need. `--coverage` writes a table of decision 0073.
"""

import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import count, takewhile

import click

from router.proxy.retries import TABLE
from tests.docs.parts import Part
from tests.world.shrink import shrunk
from tests.world.world import World

COLUMNS = "repeatable", "effects", "sent"

MAX_TOLD = 10  # failures of one world
PART = Part("decisions/0073-planted-bugs-measure-a-world.md", "cells")
COVERED = range(1_000, 1_100)  # always the same worlds


@click.command()
@click.option("--seed", type=int, help="Only this world, with all that happens in it.")
@click.option("--shrink", is_flag=True, help="Of this world only what its failure needs.")
@click.option("--coverage", is_flag=True, help=f"Count cells of the table of retries in {len(COVERED)} worlds.")
@click.option("--seconds", default=60, show_default=True, help="Look for so long at worlds that nobody has seen.")
def main(seed: int | None, shrink: bool, coverage: bool, seconds: int) -> None:
    """Exit with 1 if something does not hold."""
    if seed is not None:
        world = look(seed, shrunk if shrink else whole)
        print("\n".join(world.timeline))
        sys.exit(bool(world.audit.failures))
    if coverage:
        PART.write(table(Counter(cell for number in COVERED for cell in look(number).audit.reached)))
        return
    ends_s, first = time.monotonic() + seconds, random.SystemRandom().randrange(10**9)
    print(f"from seed {first} on", file=sys.stderr)
    seeds = takewhile(lambda _: time.monotonic() < ends_s, count(first))
    failed = [number for number in seeds if look(number).audit.failures]
    if failed:
        print(f"add to tests/world/failed_seeds.txt: {failed}", file=sys.stderr)
    sys.exit(bool(failed))


def whole(seed: int) -> World:
    return World(seed).run()


def look(seed: int, make: Callable[[int], World] = whole) -> World:
    """Tell on standard error whether something does not hold in this world."""
    began_s = time.monotonic()
    world = make(seed)
    asked, lasted_s, took_s = len(world.audit.asked), world.loop.elapsed_s, time.monotonic() - began_s
    print(f"seed {seed}: {asked} requests in {lasted_s:.0f} s, which took {took_s:.1f} s", file=sys.stderr)
    for failure in world.audit.failures[:MAX_TOLD]:
        print(f"seed {seed}: {failure}", file=sys.stderr)
    return world


def table(reached: Counter[tuple[str, str]]) -> str:
    """The table of retries, with the number of worlds that have reached each cell."""
    rows: list[tuple[str, ...]] = [("what happens", "repeatable", "effects unknown", "bytes sent"), ("---",) * 4]
    rows += [(row.what, *(str(reached[row.what, column]) for column in COLUMNS)) for row in TABLE]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    main()
