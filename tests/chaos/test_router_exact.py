"""The router's index under load, losses and a killed replica: at every quiet point it equals the replicas' caches.

WARMROUTE_EXACT_S sets the total seconds of load (6 by default), WARMROUTE_EXACT_REQUESTS the number of requests
that are sent one at a time to check their predictions (120 by default).
"""

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
import pytest

from events.cache.resolver import Resolver
from events.source import Source
from events.stream.foreign_stream import ForeignStream
from events.stream.native_stream import NativeStream
from events.stream.states import StreamConfig
from events.stream.stream import Stream
from events.subscriber import Subscriber
from events.tool.verify import Witness
from events.view import CacheView
from router.process.front import Front
from tests.chaos.crowd import Crowd
from tests.chaos.replicas import until
from tests.chaos.routers import Fleet, fleet, front, http_client, port_of
from tests.chaos.test_stream_chaos import Peer
from tests.replica.serving import MODEL

LOAD_S = float(os.environ.get("WARMROUTE_EXACT_S", "6"))
REQUESTS = int(os.environ.get("WARMROUTE_EXACT_REQUESTS", "120"))
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(LOAD_S + REQUESTS / 4 + 120),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

REPLICAS = 4
LOSSY, KILLED = 0, 1
LOSS = 0.1
ROUND_S = 3.0  # of load between two quiet points
CLIENTS = 24
TALKS = 8
OBJECTIVE = 0.999
GPU = "GPU"
SETTLE_S = 0.05  # nothing has come for so long: on a busy machine a replica may send its last batch that late
SMALL = (
    *("--num-blocks", 400, "--max-model-len", 2048, "--max-num-seqs", 32),
    *("--set=simulated_prefill_tokens_per_s=400_000", "--set=simulated_decode_tokens_per_s=2000"),
    *("--set=simulated_batch_slowdown=0", "--set=simulated_step_overhead=0"),
)


# ---- the replicas' own events


class Truth:
    """Follows every replica beside the router, by sockets that lose nothing."""

    def __init__(self, replicas: Fleet, subscriber: Subscriber) -> None:
        self._fleet = replicas
        self._subscriber = subscriber
        self.witnesses = [self._witness(number) for number in range(len(replicas))]

    def _source(self, number: int, name: str) -> Source:
        loaded = self._fleet[number].load()
        return Source(name, **loaded["endpoints"], topic=loaded["topic"], model=MODEL)

    def _witness(self, number: int) -> Witness:
        source = self._source(number, f"r{number}")
        witness = Witness(source.name, *parts())
        self._subscriber.add(source, witness)
        return witness

    async def heard_all(self) -> None:
        """Each replica's digest was compared twice more: at the last batch that it has sent, if it sends nothing."""
        compared = [witness.compared for witness in self.witnesses]
        grown = lambda: all(  # noqa: E731
            one.compared > before + 1 for one, before in zip(self.witnesses, compared, strict=True)
        )
        await until(grown, "every replica has said twice what it holds")
        for witness in self.witnesses:
            assert (witness.inexact, witness.differed) == (None, 0), witness.wrong

    async def blocks(self, number: int) -> set[int]:
        """The replica's whole cache from a new snapshot, not from the followed events."""
        source = msgspec.structs.replace(self._source(number, f"r{number} anew"), status=None)
        view = CacheView(source.name, *parts())
        self._subscriber.add(source, view)
        await until(lambda: view.inexact is None, "the snapshot has come")
        self._subscriber.remove(source.name)
        assert view.resolver.digest() == self.witnesses[number].resolver.digest()
        return view.resolver.keys(GPU)


def parts() -> tuple[Stream, Resolver]:
    return NativeStream(), Resolver(MODEL, native=True)


# ---- a router between losses and load


class World:
    def __init__(self, replicas: Fleet, running: Front, truth: Truth, lossy: Peer) -> None:
        self.fleet = replicas
        self.front = running
        self.router = running.router
        self.truth = truth
        self.lossy = lossy
        self.crowd = Crowd(port_of(running), CLIENTS, seed=1)
        self.chance = random.Random(1)
        self.quiet_points = 0
        self.largest = 0  # index, in blocks

    async def load(self, for_s: float) -> None:
        async with http_client(f"http://127.0.0.1:{port_of(self.front)}") as http, asyncio.TaskGroup() as group:
            group.create_task(self.crowd.run(for_s))
            end_s = asyncio.get_running_loop().time() + for_s
            for number in range(TALKS):
                group.create_task(self._talk(http, number, end_s))

    async def _talk(self, http: Any, number: int, end_s: float) -> None:
        """Several turns, the answers in the next prompt; then another talk."""
        chance = random.Random(f"{number} {self.quiet_points}")
        while asyncio.get_running_loop().time() < end_s:
            messages: list[dict[str, str]] = []
            for turn in range(chance.randint(2, 5)):
                messages.append({"role": "user", "content": f"Turn {turn} of {chance.random()}. " * 3})
                asked = {"model": MODEL, "messages": messages, "max_tokens": 40, "ignore_eos": True}
                answer = await http.post("/v1/chat/completions", json=asked)
                assert answer.status_code in (200, 429), answer.text
                if answer.status_code == 200:
                    messages.append(answer.json()["choices"][0]["message"])

    def follows(self) -> bool:
        states = [self.router.feeds.state(f"r{number}") for number in range(REPLICAS)]
        return all(state is not None and state.connected for state in states) and all(
            witness.inexact is None for witness in self.truth.witnesses
        )

    def agrees(self) -> bool:
        """Return True if no request is open and the router has every event that the replicas sent."""
        states = [self.router.feeds.state(f"r{number}") for number in range(REPLICAS)]
        return not self.router.lifecycle.open_requests and all(
            state is not None and state.exact and state.seq == witness.stream.last_seq
            for state, witness in zip(states, self.truth.witnesses, strict=True)
        )

    async def quiet_point(self) -> None:
        """Block by block."""
        await until(lambda: not self.router.lifecycle.open_requests, "every request has ended")
        await self.truth.heard_all()
        await until(self.agrees, "the router has all events")
        self.router.placement.index.check()
        for number in range(REPLICAS):
            truth, held = await self.truth.blocks(number), self.indexed(number)
            assert held == truth, f"r{number}: {len(held - truth)} surplus blocks, {len(truth - held)} missing"
            self.largest = max(self.largest, len(truth))
        self.quiet_points += 1

    def indexed(self, number: int) -> set[int]:
        index, slot = self.router.placement.index, self.router.members.by_name[f"r{number}"].slot
        held = index.pools[GPU, 0].of(slot)
        assert index.blocks(slot).get(GPU, 0) == len(held)
        return set(held)

    async def settled(self) -> None:
        """No event is in flight; one that was lost is until its repair."""
        seen: list[int] = []
        while not (self.agrees() and seen == (now := [one.stream.last_seq for one in self.truth.witnesses])):
            seen = [one.stream.last_seq for one in self.truth.witnesses]
            await asyncio.sleep(SETTLE_S)
        assert now == seen

    async def one_at_a_time(self, requests: int) -> tuple[int, int]:
        """Numbers of requests with a correct prediction of cached blocks, and of requests with a hit."""
        right = warm = 0
        before = self.router.history.decisions[-1] if self.router.history.decisions else None
        async with http_client(f"http://127.0.0.1:{port_of(self.front)}") as http:
            for _ in range(requests):
                await self.settled()
                asked = self._something()
                answer = await http.post("/v1/completions", json=asked)
                assert answer.status_code == 200, answer.text
                await until(lambda: self.router.history.decisions[-1] is not before, "the decision is remembered")  # noqa: B023
                record, before = self.router.history.decisions[-1].record(), self.router.history.decisions[-1]
                assert record.predicted_cached_tokens is not None and record.reported_cached_tokens is not None
                right += record.predicted_cached_tokens == record.reported_cached_tokens // 16 * 16
                warm += record.reported_cached_tokens >= 16
        return right, warm

    def _something(self) -> dict[str, Any]:
        chance = self.chance
        prompt = f"Story {chance.randrange(8)}: " * 20 + f"chapter {chance.randrange(4)} " * chance.randrange(30)
        asked: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": chance.randint(1, 40), "n": 1}
        if chance.random() < 0.3:
            asked["cache_salt"] = "alice"
        return asked

    async def replica_is_killed_under_load(self, for_s: float) -> None:
        loading = asyncio.create_task(self.load(for_s))
        await asyncio.sleep(for_s / 3)
        await asyncio.to_thread(self.fleet.kill, KILLED)
        await asyncio.to_thread(self.fleet.start, KILLED)
        await loading
        back = self.router.members.by_name[f"r{KILLED}"].candidate
        await until(lambda: back.unavailable is None, "the replica that was killed takes requests again")


@contextmanager
def losing(upstream: str) -> Iterator[Peer]:
    proxy = Peer("proxy", {"upstream": upstream, "loss": 0.0, "seed": 1})
    try:
        yield proxy
    finally:
        proxy.end()


@asynccontextmanager
async def world(**config: Any) -> AsyncIterator[World]:
    with fleet(REPLICAS, *SMALL) as replicas:
        ends = replicas[LOSSY].load()["endpoints"]
        with losing(ends["events"]) as lossy:
            specs = replicas.specs
            ends["events"] = lossy.ask()["endpoint"]
            specs[LOSSY] = msgspec.structs.replace(specs[LOSSY], **ends)
            async with front(specs, slow_start_s=0.5, **config) as running, Subscriber() as subscriber:
                made = World(replicas, running, Truth(replicas, subscriber), lossy)
                await until(made.follows, "every stream is followed")
                yield made


async def play(made: World, for_s: float, requests: int) -> None:
    """The whole story; it is the same one for a router that cannot repair."""
    made.lossy.ask("loss", LOSS)
    rounds = max(1, round(for_s / 2 / ROUND_S))
    for _ in range(rounds):
        await made.load(for_s / 2 / rounds)
        await made.quiet_point()
    await made.replica_is_killed_under_load(for_s / 2)
    await made.quiet_point()
    right, warm = await made.one_at_a_time(requests)
    await made.quiet_point()
    print(f"{right} of {requests} predictions were right, {warm} prompts were warm")
    assert right >= OBJECTIVE * requests, f"{requests - right} of {requests} predictions were wrong"
    assert warm > requests / 3, "too few hits were predicted: most prompts were cold"


async def test_at_every_quiet_point_the_index_is_what_the_replicas_hold() -> None:
    async with world() as made:
        await play(made, LOAD_S, REQUESTS)
        assert made.quiet_points >= 3
        lost = made.lossy.ask()["lost"]
        state = made.router.feeds.state(f"r{LOSSY}")
        assert state is not None
        assert lost > 10 and state.gaps > 5, "too few batches were lost to test repairs"
        killed = made.router.feeds.state(f"r{KILLED}")
        assert killed is not None and killed.snapshots > 0
        # Events in flight make some predictions wrong; that is no reason to read whole caches again and again.
        assert all(member.resyncs <= 1 + LOAD_S // 60 for member in made.router.members)
        assert made.largest > 300, "no replica filled up, so nothing was evicted"
        print(f"{made.crowd.counts}; {lost} batches lost, {state.gaps} gaps, {state.repairs} repairs")
        print(f"resumed {made.router.history.counts.resumes}, retried {made.router.history.counts.retries}")


async def test_without_repairs_the_same_story_ends_with_a_wrong_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(Source, "stream", lambda _: ForeignStream(StreamConfig(can_replay=False)))
    async with world(accuracy_objective=0.0) as made:
        made.lossy.ask("loss", LOSS)
        await made.load(1.0)
        await made.truth.heard_all()
        assert made.indexed(LOSSY) != await made.truth.blocks(LOSSY)
        state = made.router.feeds.state(f"r{LOSSY}")
        assert state is not None and not state.exact
