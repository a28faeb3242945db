"""`python -m tests.world --seed N` prints what happens in one world; without a seed it looks for one that fails."""

import random
import sys
import time
from itertools import count, takewhile

import click

from tests.world.world import World

MOST_TOLD = 10  # failures of one world


@click.command()
@click.option("--seed", type=int, help="Only this world, with all that happens in it.")
@click.option("--seconds", default=60, show_default=True, help="Look for so long at worlds that nobody has seen.")
def main(seed: int | None, seconds: int) -> None:
    """Exit with 1 if something does not hold."""
    if seed is not None:
        sys.exit(look(seed, tells=True))
    ends_s, first = time.monotonic() + seconds, random.SystemRandom().randrange(10**9)
    print(f"from seed {first} on", file=sys.stderr)
    failed = [number for number in takewhile(lambda _: time.monotonic() < ends_s, count(first)) if look(number)]
    if failed:
        print(f"add to tests/world/failed_seeds.txt: {failed}", file=sys.stderr)
    sys.exit(bool(failed))


def look(seed: int, *, tells: bool = False) -> bool:
    """Return whether something does not hold in this world."""
    began_s = time.monotonic()
    world = World(seed).run()
    if tells:
        print("\n".join(world.timeline))
    asked, lasted_s, took_s = len(world.audit.asked), world.loop.elapsed_s, time.monotonic() - began_s
    print(f"seed {seed}: {asked} requests in {lasted_s:.0f} s, which took {took_s:.1f} s", file=sys.stderr)
    for failure in world.audit.failures[:MOST_TOLD]:
        print(f"seed {seed}: {failure}", file=sys.stderr)
    return bool(world.audit.failures)


if __name__ == "__main__":
    main()
