"""Whatever replicas report: the bounds hold, more work never means fewer of them, and what stays the same rests."""

import copy
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from events.native import Load
from fleet.control.autoscale import Autoscaler
from fleet.host.report import Report
from fleet.plan import Autoscale

RATE = 1000.0
LOOK_S = 0.5

plans = st.builds(
    lambda least, more, up_after_s, down_after_s: Autoscale(
        min=least, max=least + more, up_after_s=up_after_s, down_after_s=down_after_s
    ),
    st.integers(0, 3),
    st.integers(0, 9),
    st.sampled_from([0.0, 1.0, 5.0]),
    st.sampled_from([0.0, 3.0, 20.0]),
)
reports = st.builds(
    lambda queued, waiting, rate, done, hits, free, age_s: Report(
        name="m-0",
        host="h",
        life="ready",
        load=Load(queued_prefill_tokens=queued, waiting=waiting, prefill_tokens_per_s=rate, free_blocks=free),
        prompt_tokens_per_s=done,
        hit_rate=hits,
        total_blocks=100,
        measured_at=-age_s,
    ),
    st.sampled_from([0, 0, 100, 1500, 40_000]),
    st.sampled_from([0, 0, 5]),
    st.sampled_from([0.0, RATE, 7 * RATE]),
    st.sampled_from([0.0, 300.0, RATE]),
    st.sampled_from([0.0, 0.9, 1.0]),
    st.sampled_from([0, 50, 100]),
    st.sampled_from([0.0, 0.0, 0.0, 3.0, 100.0]),
)


class Look(NamedTuple):
    after_s: float
    times: int
    reports: list[Report]


looks = st.lists(
    st.builds(Look, st.sampled_from([0.1, 0.5, 5.0]), st.integers(1, 20), st.lists(reports, max_size=5)), max_size=12
)


class Watched:
    """An autoscaler, and the clock; of each report `measured_at` is the negative of its age."""

    def __init__(self, plan: Autoscale, wanted: int) -> None:
        self.scaler = Autoscaler(plan)
        self.wanted = wanted
        self.now_s = 1000.0

    def look(self, look: Look) -> None:
        for _ in range(look.times):
            self.now_s += look.after_s
            before = self.wanted
            self.wanted = self.answer(look.reports)
            self.check(before, look.reports)

    def answer(self, said: list[Report], scaler: Autoscaler | None = None) -> int:
        now = [msgspec.structs.replace(each, measured_at=self.now_s + each.measured_at) for each in said]
        return (scaler or self.scaler).look(self.wanted, now, self.now_s)

    def check(self, before: int, said: list[Report]) -> None:
        plan = self.scaler.plan
        assert plan.min <= self.wanted <= plan.max
        if plan.min <= before <= plan.max:
            assert before - 1 <= self.wanted <= max(before, 2 * before)
            assert self.wanted == before or said, "scaled without a report"
            assert self.wanted >= min(before, 1)
        assert self.wanted == before or self.scaler.why


@given(plans, st.integers(0, 15), looks)
def test_it_stays_within_its_bounds_and_changes_in_small_steps(plan: Autoscale, wanted: int, seen: list[Look]) -> None:
    watched = Watched(plan, wanted)
    for look in seen:
        watched.look(look)


@given(plans, st.integers(0, 12), looks, st.lists(reports, min_size=1, max_size=5), st.data())
def test_more_to_do_never_gives_fewer_replicas(
    plan: Autoscale, wanted: int, seen: list[Look], said: list[Report], data: Any
) -> None:
    watched = Watched(plan, wanted)
    for look in seen:
        watched.look(look)
    watched.now_s += data.draw(st.sampled_from([0.5, 5.0, 60.0]))
    more = [busier(each, *data.draw(st.tuples(st.integers(0, 50_000), st.integers(0, 5)))) for each in said]
    assert watched.answer(more, copy.deepcopy(watched.scaler)) >= watched.answer(said, copy.deepcopy(watched.scaler))


def busier(report: Report, tokens: int, waiting: int) -> Report:
    load = report.load
    counts_requests = load.waiting and not load.queued_prefill_tokens  # as an engine that does not say more
    tokens = 0 if counts_requests else load.queued_prefill_tokens + tokens
    load = msgspec.structs.replace(load, queued_prefill_tokens=tokens, waiting=load.waiting + waiting)
    return msgspec.structs.replace(report, load=load)


@given(
    plans,
    st.integers(1, 12),
    st.integers(0, 20_000),
    st.integers(0, 12_000),
    st.booleans(),
    st.integers(0, 90),
)
def test_what_stays_the_same_brings_it_to_rest(
    plan: Autoscale, wanted: int, queued: int, done: int, waiting: bool, memory: int
) -> None:
    """The same work for the whole fleet, shared by as many replicas as are wanted."""
    watched = Watched(plan, wanted)
    counts = []
    for _ in range(1500):
        there = max(1, watched.wanted)
        load = Load(
            queued_prefill_tokens=queued // there,
            waiting=int(waiting),
            prefill_tokens_per_s=RATE,
            free_blocks=max(0, 1000 - 1000 * memory // 100 // there),
        )
        report = Report(name="m-0", host="h", load=load, prompt_tokens_per_s=done / there, total_blocks=1000)
        watched.look(Look(LOOK_S, 1, [report] * watched.wanted))
        counts.append(watched.wanted)
    assert len(set(counts[-500:])) == 1
    steps = [later - earlier for earlier, later in pairwise(counts) if later != earlier]
    assert all(step > 0 for step in steps) or all(step < 0 for step in steps), counts
