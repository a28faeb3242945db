"""`python -m tests.world --seed N` prints what happens in one world, and what does not hold in it."""

import sys
import time

import click

from tests.world.world import World


@click.command()
@click.option("--seed", required=True, type=int)
@click.option("--quiet", is_flag=True, help="Only what does not hold.")
def main(seed: int, quiet: bool) -> None:
    began_s = time.monotonic()
    world = World(seed).run()
    if not quiet:
        print("\n".join(world.timeline))
    took_s = time.monotonic() - began_s
    print(
        f"seed {seed}: {len(world.audit.asked)} requests in {world.loop.elapsed_s:.0f} s, in {took_s:.1f} s",
        file=sys.stderr,
    )
    for failure in world.audit.failures:
        print(f"seed {seed}: {failure}", file=sys.stderr)
    sys.exit(bool(world.audit.failures))


if __name__ == "__main__":
    main()
