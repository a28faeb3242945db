"""Makes a failing world small: it leaves out requests and faults for as long as the same promise breaks."""

import re

from tests.world.world import World

_NUMBERS = re.compile(r"[0-9][0-9.]*")


def shrunk(seed: int) -> World:
    """Return the world with nothing in it that its failure does not need."""
    world = World(seed).run()
    wanted, left_out = kinds(world), set[str]()
    size = len(world.parts)
    while wanted and size >= 1:
        parts = world.parts
        for at in range(0, len(parts), size):
            smaller = World(seed, left_out=left_out | set(parts[at : at + size])).run()
            if wanted & kinds(smaller):
                left_out |= set(parts[at : at + size])
                world = smaller
        size //= 2
    return world


def kinds(world: World) -> set[str]:
    """The world's failures without what differs between two of a kind."""
    return {_NUMBERS.sub("", failure) for failure in world.audit.failures}
