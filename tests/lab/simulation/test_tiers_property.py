"""Replicas with memory below their caches never use a block that is not there, whatever they are told of neighbours."""

from collections.abc import Sequence
from functools import partial
from typing import Literal, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.messages import BlockRemoved, BlockStored, KnownEvent
from lab.replay import Agenda
from lab.simulation.engine import EngineReplica
from lab.simulation.job import Job, jobs_of
from lab.simulation.replica import FifoReplica, SimulatedReplica, readable_blocks
from lab.simulation.settings import Settings
from lab.trace.requests import Trace, TraceRequest
from replica.cache.chain import Chain
from replica.cache.lower import DISK, HOST
from replica.cache.moves import PULLED
from replica.messages import KVSource
from tests.lab.simulation.test_fleet_property import BLOCK, traces

Model: TypeAlias = Literal["fifo", "engine"]

REPLICAS = 2
GPU = "GPU"


class Replicas:
    """Replicas without a router, and what each medium holds by their events."""

    def __init__(self, settings: Settings, jobs: Sequence[Job], chosen: Sequence[int]) -> None:
        self.agenda = Agenda()
        self.held: list[dict[str, set[int]]] = [{GPU: set(), HOST: set(), DISK: set()} for _ in range(REPLICAS)]
        self.came_back: list[list[int]] = [[] for _ in range(REPLICAS)]  # new in a cache, and in the memory below
        self.readings: list[int] = []
        self.left = len(jobs)
        kind: type[FifoReplica | EngineReplica] = EngineReplica if settings.model == "engine" else FifoReplica
        self.replicas: list[SimulatedReplica] = [
            kind(number, settings, BLOCK, self.agenda, self) for number in range(REPLICAS)
        ]
        for job, replica in zip(jobs, chosen, strict=True):
            job.replica = replica
            self.agenda.at(job.request.at_s, partial(self.replicas[replica].submit, job))

    def finish(self) -> None:
        while self.left:
            assert self.agenda.step(), f"{self.left} requests wait for ever"

    # ---- what they say

    def published(self, replica: int, events: Sequence[KnownEvent]) -> None:
        held = self.held[replica]
        for event in events:
            assert isinstance(event, BlockStored | BlockRemoved)
            medium, keys = held[event.medium or GPU], [int(key) for key in event.block_hashes]
            if isinstance(event, BlockRemoved):
                assert medium.issuperset(keys), "a block is removed that is not there"
                medium.difference_update(keys)
                continue
            assert medium.isdisjoint(keys), "a block is stored twice"
            medium.update(keys)
            if medium is held[GPU]:
                self.came_back[replica] += [key for key in keys if key in held[HOST] | held[DISK]]

    def begun(self, job: Job) -> None:
        self.replicas[job.replica].pool.check()

    def ended(self, job: Job) -> None:
        del job
        self.left -= 1

    def read(self, endpoint: str, chain: Chain) -> int:
        number = int(endpoint)
        found = readable_blocks(self.replicas[number].pool, chain)
        assert self.held[number][GPU] | self.held[number][HOST] >= set(chain.keys[:found]), "it is not there"
        self.readings.append(found)
        return found


@st.composite
def runs(draw: st.DrawFn, model: Model) -> tuple[Settings, list[Job], list[int]]:
    trace = draw(traces())
    if model == "engine":  # each token of an answer is a step
        trace = Trace("t", BLOCK, [one._replace(output_tokens=1 + one.output_tokens // 20) for one in trace.requests])
    settings = Settings(
        model=model,
        capacity_tokens=draw(st.integers(6 if model == "fifo" else 60, 70)) * BLOCK,
        host_tokens=draw(st.integers(0, 30)) * BLOCK,
        disk_tokens=draw(st.integers(0, 60)) * BLOCK,
        prefill_tokens_per_s=10.37,
        decode_tokens_per_s=41.93,
        load_tokens_per_s=draw(st.sampled_from([5.0, 30.1, 1000.7])),
        disk_tokens_per_s=20.3,
        pull_tokens_per_s=50.9,
    )
    jobs = list(jobs_of(trace, 1 if model == "fifo" else BLOCK))
    chosen = [draw(st.integers(0, REPLICAS - 1)) for _ in jobs]
    for job, replica in zip(jobs, chosen, strict=True):
        if draw(st.booleans()):  # true or not
            job.sources = [KVSource(str(1 - replica), draw(st.integers(0, job.request.input_tokens)))]
    return settings, jobs, chosen


@pytest.mark.parametrize("model", ["fifo", "engine"])
@given(data=st.data())
def test_what_is_brought_was_there_and_everybody_is_answered(model: Model, data: st.DataObject) -> None:
    settings, jobs, chosen = data.draw(runs(model))
    replicas = Replicas(settings, jobs, chosen)
    replicas.finish()
    brought: dict[str, int] = {HOST: 0, DISK: 0, PULLED: 0}
    for job in jobs:
        assert 1 <= job.uncached_tokens <= job.request.input_tokens
        for source, tokens in job.brought_tokens.items():
            brought[source] += tokens // BLOCK
    assert brought[HOST] + brought[DISK] <= sum(map(len, replicas.came_back))
    assert brought[PULLED] <= sum(replicas.readings)
    if settings.load_tokens_per_s < settings.prefill_tokens_per_s:
        assert not brought[HOST], "it would have been computed sooner"
    for replica, held in zip(replicas.replicas, replicas.held, strict=True):
        assert replica.pool.resident() == held[GPU]
        for tier in replica.pool.lower.tiers if replica.pool.lower is not None else ():
            assert tier.resident() == held[tier.medium]


def test_a_neighbour_is_read_as_it_is_and_not_as_it_was() -> None:
    """Its cache has lost the prompt's end since somebody looked."""
    requests = [
        TraceRequest(at_s, 100 * BLOCK, 1, tuple(range(first, first + 100)))
        for at_s, first in ((0, 0), (9, 200), (30, 0))
    ]
    for model in ("fifo", "engine"):
        settings = Settings(model=model, capacity_tokens=150 * BLOCK, pull_tokens_per_s=160_000.0)
        jobs = list(jobs_of(Trace("t", BLOCK, requests), 1 if model == "fifo" else BLOCK))
        jobs[2].sources = [KVSource("0", 99 * BLOCK)]
        replicas = Replicas(settings, jobs, [0, 0, 1])
        replicas.finish()
        [found] = replicas.readings
        assert 0 < found < 99
        assert jobs[2].brought_tokens == {PULLED: found * BLOCK}
        assert jobs[2].uncached_tokens == (100 - found) * BLOCK
