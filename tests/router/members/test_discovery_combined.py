"""Several sources of replicas as one."""

import asyncio

import pytest

from router.members.discovery.desired import Backoff, CombinedDiscovery, Source, StaticReplicas, Tell
from router.members.spec import Desired, parse_replica
from tests.router.loopback import until


def wanted(**ports: int) -> Desired:
    return {name: parse_replica(f"http://h:{port},name={name}") for name, port in ports.items()}


def test_waits_grow_and_are_never_the_same_for_all() -> None:
    backoff = Backoff(first_s=1.0, most_s=8.0)
    waits = [backoff.next_s() for _ in range(2000)]
    for wait_s, longest_s in zip(waits, [1.0, 2.0, 4.0, 8.0, 8.0], strict=False):
        assert longest_s / 2 <= wait_s <= longest_s
    assert max(waits) <= 8.0
    backoff.reset()
    assert backoff.next_s() <= 1.0


class Told(Source):
    """A source with a test's replicas."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.says: asyncio.Queue[Desired] = asyncio.Queue()
        self.closed = False

    async def run(self, tell: Tell) -> None:
        try:
            while True:
                tell(await self.says.get())
        finally:
            self.closed = True


async def test_several_sources_make_one_set_and_the_first_wins(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Told("first"), Told("second")
    static = StaticReplicas([parse_replica("http://h:9,name=s")])
    together = CombinedDiscovery([static, first, second])
    applied: list[Desired] = []
    task = asyncio.create_task(together.run(applied.append))
    await until(lambda: applied == [wanted(s=9)], "the list is there at once")
    complete = [together.complete]
    second.says.put_nowait(wanted(a=2, b=2))
    await until(lambda: applied[-1] == wanted(s=9, a=2, b=2), "the second counts alone")
    first.says.put_nowait(wanted(a=1))
    await until(lambda: applied[-1] == wanted(s=9, a=1, b=2), "the first wins")
    assert [*complete, together.complete] == [False, True]
    assert "Two sources name the replica a; using the one at http://h:1" in caplog.text
    first.says.put_nowait({})
    await until(lambda: applied[-1] == wanted(s=9, a=2, b=2), "the second counts again")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert first.closed and second.closed


async def test_nothing_is_applied_that_changes_nothing() -> None:
    source = Told("source")
    together = CombinedDiscovery([source])
    applied: list[Desired] = []
    task = asyncio.create_task(together.run(applied.append))
    for said in ({}, {}, wanted(a=1), wanted(a=1), wanted(b=1)):
        source.says.put_nowait(said)
    await until(lambda: applied and applied[-1] == wanted(b=1), "all is said")
    assert applied == [{}, wanted(a=1), wanted(b=1)]  # that there is none is news, too
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_cannot_be_applied_does_not_end_what_comes_after(caplog: pytest.LogCaptureFixture) -> None:
    source = Told("source")
    applied: list[Desired] = []

    def apply(said: Desired) -> None:
        if "a" in said:
            raise RuntimeError("it cannot be")
        applied.append(said)

    task = asyncio.create_task(CombinedDiscovery([source]).run(apply))
    source.says.put_nowait(wanted(a=1))
    source.says.put_nowait(wanted(b=1))
    await until(lambda: applied == [wanted(b=1)], "the next is heard")
    assert "it cannot be" in caplog.text
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
