"""The loop of a world: time jumps, chance is the seed's, and what never ends or is left over is found."""

import asyncio
import random

import pytest

from tests.world.loop import Deadlock, Livelock, WorldLoop, run
from tests.world.network import Network


def loop_of(seed: int = 1) -> WorldLoop:
    loop = WorldLoop(random.Random(seed))
    Network(loop, str(seed))
    return loop


def order(seed: int) -> list[int]:
    """The order of timers that are due at the same moment."""
    fired: list[int] = []

    async def main() -> None:
        for number in range(8):
            loop.call_later(1.0, fired.append, number)
        await asyncio.sleep(2.0)

    loop = loop_of(seed)
    run(main(), loop)
    return fired


def test_the_seed_alone_orders_what_is_due_at_once() -> None:
    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(10)}) == 10


def test_a_callback_that_comes_again_and_again_is_found() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Livelock, match="50,000 passes"):
        run(main(), loop_of())


def test_a_wait_that_nothing_can_end_is_found() -> None:
    async def main() -> None:
        await asyncio.sleep(3.0)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"after 3\.0"):
        run(main(), loop_of())


@pytest.mark.parametrize("what", ["task", "timer"])
def test_what_is_left_at_the_end_is_found(what: str) -> None:
    kept: list[object] = []

    async def main() -> None:
        if what == "task":
            kept.append(asyncio.create_task(asyncio.sleep(60.0)))
        else:
            loop.call_later(60.0, kept.clear)

    loop = loop_of()
    with pytest.raises(AssertionError, match=what):
        run(main(), loop)
