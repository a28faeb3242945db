"""The loop of a world: time jumps, chance is the seed's, and what never ends or is left over is found."""

import asyncio
import random
import time

import pytest

from tests.world.loop import EPOCH_S, Deadlock, Livelock, WorldLoop, run
from tests.world.network import Network


def loop_of(seed: int = 1) -> WorldLoop:
    loop = WorldLoop(random.Random(seed))
    Network(loop, str(seed))
    return loop


def test_an_hour_passes_in_a_moment() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1800.0):
                await asyncio.Event().wait()
        await asyncio.sleep(1800.0)
        assert time.time() == pytest.approx(EPOCH_S + 3600.0)
        return loop.elapsed_s

    began_s, loop = time.monotonic(), loop_of()
    assert run(main(), loop) == pytest.approx(3600.0)
    assert time.monotonic() - began_s < 60.0
    assert abs(time.time() - EPOCH_S) > 3600.0 or time.time() < EPOCH_S  # the wall's own clock is back


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


def test_a_timer_is_never_early_and_hardly_late() -> None:
    async def main() -> None:
        for delay_s in (0.0, 1e-9, 0.1, 1 / 3):
            due_s = loop.time() + delay_s
            await asyncio.sleep(delay_s)
            assert delay_s == 0.0 or due_s <= loop.time() + 1e-9 <= due_s + 1.01e-4

    loop = loop_of()
    run(main(), loop)


def test_what_was_called_soon_keeps_its_order() -> None:
    called: list[int] = []

    async def main() -> None:
        for number in range(100):
            loop.call_soon(called.append, number)
        await asyncio.sleep(0)

    loop = loop_of()
    run(main(), loop)
    assert called == [*range(100)]


def test_work_for_a_thread_is_done_a_little_later() -> None:
    async def main() -> None:
        assert await asyncio.to_thread(sum, [1, 2]) == 3
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)

    run(main(), loop_of())


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


def test_another_process_is_refused() -> None:
    async def main() -> None:
        await asyncio.create_subprocess_exec("true")

    with pytest.raises(NotImplementedError, match="another process"):
        run(main(), loop_of())
