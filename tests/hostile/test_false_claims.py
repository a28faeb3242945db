"""Replicas that claim cached blocks which they do not have."""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import reduce
from operator import xor
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from api.native import unpack_ids
from events.cache.pool import Digest
from events.messages import AllBlocksCleared, BlockRemoved
from events.native import Load
from router.members.predictions import DISBELIEVED, TRUSTED, Accuracy
from tests.hostile.lying import Liar, batch, stored
from tests.router.loopback import until
from tests.router.scripted import CHAT, Call, Client, Scripted, Served, chat, connect, served

SIZE = 16
PROMPT = chat("x" * 2000)
LOAD = Load(prefill_tokens_per_s=8000.0, free_blocks=500)

shares = st.floats(0, 1)


def trust_after(shares: list[float], blocks: int = 100) -> float:
    accuracy = Accuracy()
    for share in shares:
        accuracy.claimed(blocks, round(share * blocks))
    return accuracy.trust


@given(st.lists(shares, max_size=60))
def test_trust_is_a_fraction_lost_by_lies_and_won_back_by_truth(history: list[float]) -> None:
    assert 0 <= trust_after(history) <= 1
    assert trust_after([*history, *[0.0] * 30]) == 0
    assert trust_after([*history, *[1.0] * 30]) == 1
    assert trust_after([*history, 0.0]) <= trust_after(history)
    assert trust_after([*history, 1.0]) >= trust_after(history)


@given(st.lists(st.floats(TRUSTED, 1), max_size=100), st.integers(1, 3), st.data())
def test_mostly_true_claims_are_trusted_in_full(history: list[float], misses: int, data: st.DataObject) -> None:
    """Blocks that are evicted on the way are missed now and then, also some times in a row."""
    whole = [1.0] * 30
    assert trust_after(history, 1000) == 1
    place = data.draw(st.integers(0, len(whole)))
    assert trust_after(whole[:place] + [0.0] * misses + whole[place:]) == 1


@given(st.floats(0, 1))
def test_excessive_claims_gain_nothing_in_the_end(share: float) -> None:
    trust = trust_after([share] * 200, 10_000)
    if share < TRUSTED - 0.01:
        assert trust == pytest.approx(share, abs=0.01) or (share < DISBELIEVED + 0.01 and trust == 0)


def test_an_answer_that_nothing_was_claimed_of_teaches_nothing() -> None:
    accuracy = Accuracy()
    for _ in range(100):
        accuracy.claimed(0, 0)
    assert accuracy.trust == 1


def test_reading_the_cache_again_wins_no_trust() -> None:
    accuracy = Accuracy()
    for _ in range(100):
        accuracy.claimed(10, 0)
        accuracy.compare(10, 0)
    accuracy.forget()
    assert accuracy.trust == 0


# ---- a whole router


class Claimant:
    """A warmroute replica whose events and answers a test chooses."""

    def __init__(self, name: str, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.liar = Liar(context)
        self.reported = 0
        self.held: set[int] = set()  # as it claims
        self.evicts: list[int] = []  # blocks that go when a request comes, and the replica says so
        self.replica = Scripted(name, self._answer, native=True)
        source = self.liar.source
        ends = {"events": source.events, "replay": source.replay, "status": source.status, "snapshot": source.snapshot}
        self.replica.control["/load"] = (
            200,
            {
                "model": "m",
                "block_size": SIZE,
                "max_model_len": 4096,
                "tokenizer": "bytes",
                "incarnation": 1,
                "endpoints": ends,
                "pool": {"total": 1000},
            },
        )

    def say(self) -> bool:
        """Send a status that agrees with its events; always False, as a condition that is still waited for."""
        return self.liar.say(Digest(len(self.held), reduce(xor, self.held, 0)), LOAD)

    def _answer(self, call: Call) -> None:
        if self.evicts:
            self.liar.publish(batch(BlockRemoved([*self.evicts], "GPU")))
            self.held.difference_update(self.evicts)
        call.begin_frames("application/json", x_warmroute_cached_tokens=str(self.reported))
        call.frame(b"{}", 1)
        call.end()


class Scene:
    """A router with two replicas; the first one lies."""

    def __init__(self, running: Served, client: Client, one: Claimant, other: Claimant) -> None:
        self.running, self.client, self.one, self.other = running, client, one, other
        self.honest_status = False  # statuses agree with events

    def trust(self) -> float:
        return float(self.running.member("one").trust)

    def honesty(self) -> float:
        return self.running.front.dashboard.statuses.one(self.running.member("one")).honesty

    async def ask(self, times: int) -> int:
        """Send `times` equal prompts; return the number that the first replica got."""
        before = len(self.one.replica.calls)
        for _ in range(times):
            for claimant in (self.one, self.other):
                claimant.say() if self.honest_status else claimant.liar.say(load=LOAD)
            assert (await self.client.post(CHAT, PROMPT)).status == 200
            await until(lambda: self.running.router.lifecycle.open_requests == 0, "it is over")
            await until(self._is_known, "the choice knows")
            self.running.router.placement.index.optimistic.expire(math.inf)
        return len(self.one.replica.calls) - before

    def _is_known(self) -> bool:
        member = self.running.member("one")
        return member.trust in (0.0, member.accuracy.trust)

    async def claim(self, claimant: Claimant) -> int:
        """It says that it holds the prompt; how many blocks that is."""
        keys = self.running.router.history.recent.all()[-1].keys
        native, _ = (self.one.replica.calls + self.other.replica.calls)[0].native
        tokens = unpack_ids(native.prompts[0])
        claimant.held.update(keys)
        claimant.liar.publish(batch(stored(keys, None, tokens[: len(keys) * SIZE], block_size=SIZE)))
        await self.applied(claimant)
        return len(keys)

    async def applied(self, claimant: Claimant) -> None:
        member = self.running.member(claimant.replica.name)
        await until(lambda: member.feed_state.seq == claimant.liar.seq, "it is applied")


@asynccontextmanager
async def scene(**config: Any) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        one, other = Claimant("one", context), Claimant("other", context)
        for claimant in (one, other):
            stack.enter_context(closing(claimant.liar))
        usual: dict[str, Any] = {"policy": "cost", "health_interval_s": 0.2, "ready": False}
        running = await stack.enter_async_context(served(one.replica, other.replica, **usual, **config))
        for claimant in (one, other):
            await claimant.liar.answer_snapshot()
        members = running.router.members
        await until(lambda: all(one.feed_state.exact for one in members), "they are followed")
        claimants = (one, other)

        def well() -> bool:
            for claimant in claimants:
                claimant.liar.say(load=LOAD)
            return all(one.candidate.unavailable is None for one in members)

        await until(well, "they take requests")
        client = await stack.enter_async_context(connect(running.port))
        yield Scene(running, client, one, other)


async def test_a_false_claim_attracts_no_more_than_a_cold_replica() -> None:
    async with scene() as it:
        await it.ask(1)
        blocks = await it.claim(it.one)
        assert await it.ask(3) == 3  # believed at first
        await it.ask(60)
        assert it.trust() == 0
        assert await it.ask(20) <= 14
        assert it.running.router.placement.index.match(it.running.router.history.recent.all()[-1].keys, 0b11).gpu == {
            0: blocks
        }


async def test_an_honest_replica_whose_blocks_go_before_requests_come_is_called_no_liar() -> None:
    async with scene() as it:
        await it.ask(1)
        await it.claim(it.one)
        it.honest_status = True
        it.one.evicts = list(it.running.router.history.recent.all()[-1].keys)
        for _ in range(20):
            await it.ask(1)
            await it.applied(it.one)
            await it.claim(it.one)
        accuracy = it.running.member("one").accuracy
        await until(lambda: it.one.say() or accuracy.explained >= 10, "they are judged")
        assert it.trust() < 1, "it gets fewer requests"
        assert it.honesty() == 1 and accuracy.different == 0


async def test_correct_answers_regain_trust() -> None:
    async with scene() as it:
        await it.ask(1)
        blocks = await it.claim(it.one)
        await it.ask(60)
        assert it.trust() == 0
        it.one.reported = blocks * SIZE
        await until_async(lambda: it.ask(5), lambda: it.trust() == 1)
        assert await it.ask(5) == 5


async def test_honest_claims_are_counted_in_full() -> None:
    async with scene() as it:
        await it.ask(1)
        blocks = await it.claim(it.one)
        it.one.reported = blocks * SIZE
        assert await it.ask(20) == 20
        assert it.trust() == 1 and not it.running.router.placement.doubted


async def test_more_claims_than_its_pool_attract_no_requests_and_are_named() -> None:
    async with scene() as it:
        await it.ask(1)
        await it.claim(it.one)
        it.one.liar.publish(batch(stored([5 + number for number in range(1500)], 1, [], block_size=SIZE)))
        await it.applied(it.one)
        await until(lambda: it.trust() == 0, "its claims do not count")
        assert await it.ask(20) <= 14
        status = (await it.client.get("/replicas", host="localhost")).json
        [shown] = [one for one in status["replicas"] if one["name"] == "one"]
        assert shown["trust"] == 0 and shown["state"] != "exact"
        assert "more than the 1,000 blocks" in shown["events"]["overclaim"]
        it.one.liar.publish(batch(AllBlocksCleared()))
        await it.applied(it.one)  # and so its cache is known again
        await until(lambda: it.one.liar.say() or not it.running.member("one").overclaims, "it has begun anew")


async def until_async(step: Callable[[], Any], condition: Callable[[], bool]) -> None:
    for _ in range(100):
        if condition():
            return
        await step()
    assert condition()
