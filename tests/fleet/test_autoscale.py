"""The autoscaler in virtual time, over replicas that do their prefill at a fixed speed and take a while to start."""

from collections import deque
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest

from events.native import Load
from fleet.control.autoscale import STALE_S, STARTS_S, Autoscaler, demand_of
from fleet.host.report import Report
from fleet.plan import Autoscale

RATE = 1000.0  # prefill tokens a second, of one replica
LOOK_S = 0.5
WINDOW_S = 10.0
PLAN = Autoscale(min=1, max=8)
UNIX_S = 1_700_000_000.0


def report(
    queued: float = 0, name: str = "m-0", /, *, measured_s: float = 0.0, done_per_s: float = 0.0, **load: float
) -> Report:
    told = {"prefill_tokens_per_s": RATE, "queued_prefill_tokens": int(queued)} | load
    return Report(
        name=name,
        host="h",
        life="ready",
        load=Load(**told),  # type: ignore[arg-type]
        prompt_tokens_per_s=done_per_s,
        measured_at=UNIX_S + measured_s,
    )


class Fleet:
    """One queue for `wanted` replicas; added ones take this long to start."""

    def __init__(self, plan: Autoscale = PLAN, wanted: int = 1, starts_s: float = 4.0) -> None:
        self.scaler = Autoscaler(plan)
        self.wanted = self.ready = wanted
        self.starts_s = starts_s
        self.now_s = 0.0
        self.queued = 0.0
        self.changes: list[tuple[float, int]] = []
        self.whys: list[str] = []
        self.longest_wait_s = 0.0
        self._coming: deque[float] = deque()  # when each is ready
        self._done: deque[float] = deque(maxlen=int(WINDOW_S / LOOK_S))

    def run(self, for_s: float, tokens_per_s: Callable[[float], float]) -> None:
        end_s = self.now_s + for_s
        while self.now_s < end_s:
            self._work(tokens_per_s(self.now_s))
            self._look()

    def _work(self, tokens_per_s: float) -> None:
        self.now_s += LOOK_S
        self.queued += tokens_per_s * LOOK_S
        done = min(self.queued, RATE * self.ready * LOOK_S)
        self.queued -= done
        self._done.append(done)
        self.longest_wait_s = max(self.longest_wait_s, self.queued / (RATE * self.ready))
        while self._coming and self._coming[0] <= self.now_s:
            self._coming.popleft()
            self.ready += 1

    def _look(self) -> None:
        done_per_s = sum(self._done) / WINDOW_S / self.ready
        share = self.queued / self.ready
        reports = [report(share, measured_s=self.now_s, done_per_s=done_per_s)] * self.ready
        wanted = self.scaler.look(self.wanted, reports, self.now_s)
        if wanted == self.wanted:
            return
        self.changes.append((self.now_s, wanted))
        self.whys.append(self.scaler.why)
        self._coming.extend([self.now_s + self.starts_s] * (wanted - self.wanted))
        for _ in range(self.wanted - wanted):
            if self._coming:
                self._coming.pop()
            else:
                self.ready -= 1
        self.wanted = wanted

    @property
    def counts(self) -> list[int]:
        return [count for _, count in self.changes]


# ---- scenarios


def test_a_step_is_met_within_seconds_and_the_fleet_shrinks_when_it_is_over() -> None:
    fleet = Fleet()
    fleet.run(60, lambda _: 0.5 * RATE)
    assert fleet.changes == []
    fleet.run(60, lambda _: 3.5 * RATE)
    began_s, first = fleet.changes[0]
    assert began_s - 60 < PLAN.up_after_s + 2 and first == 2
    assert 4 <= fleet.wanted <= 8
    assert fleet.queued / (RATE * fleet.ready) <= PLAN.ttft_target_s, "the queue did not shrink again"
    grown = len(fleet.changes)
    fleet.run(900, lambda _: 0.3 * RATE)
    assert fleet.wanted == 1
    falling = fleet.changes[grown:]
    assert [count for _, count in falling] == list(range(falling[0][1], 0, -1)), "scaled down by more than one"
    gaps_s = [later - earlier for (earlier, _), (later, _) in pairwise(falling)]
    assert all(gap_s >= PLAN.down_after_s for gap_s in gaps_s)


def test_a_burst_that_is_over_soon_changes_nothing() -> None:
    fleet = Fleet(wanted=2)
    fleet.run(600, lambda now_s: 10 * RATE if now_s % 60 < 0.5 else 0.5 * RATE)
    assert fleet.changes == []
    assert fleet.longest_wait_s > PLAN.ttft_target_s, "the burst caused no queue"


def test_a_sawtooth_load_does_not_make_the_count_flap() -> None:
    """Each tooth of two minutes has more than two replicas can do, and less than one: at most a handful of changes."""
    fleet = Fleet(wanted=2)
    fleet.run(3600, lambda now_s: 3.5 * RATE * (now_s % 120) / 120)
    assert len(fleet.changes) <= 8, fleet.changes
    assert all(earlier < 1800 for earlier, count in fleet.changes if count < 2), fleet.changes


def test_what_is_missed_soon_after_it_was_taken_away_is_kept_for_longer_the_next_time() -> None:
    """A load whose trough is a little longer than `down_after_s`, for ever."""
    fleet = Fleet(wanted=2)
    period_s = 2 * PLAN.down_after_s + 40
    fleet.run(20 * period_s, lambda now_s: 0.1 * RATE if now_s % period_s < period_s / 2 else 1.6 * RATE)
    early = [change for change in fleet.changes if change[0] < 10 * period_s]
    late = [change for change in fleet.changes if change[0] >= 10 * period_s]
    assert len(early) >= 2, "no replica was ever removed"
    assert late == [], fleet.changes


@pytest.mark.parametrize("starts_s", [4.0, 30.0, 55.0])
def test_the_same_queue_is_not_answered_twice_while_replicas_start(starts_s: float) -> None:
    fleet = Fleet(wanted=2, starts_s=starts_s)
    fleet.queued = 1000 * RATE
    fleet.run(starts_s + 2 * PLAN.up_after_s - 2 * LOOK_S, lambda _: 0.0)
    assert fleet.ready == 4 and fleet.counts == [4], "new replicas get time to take effect"
    fleet.run(5 * LOOK_S, lambda _: 0.0)
    assert fleet.counts == [4, 8]


def test_replicas_that_never_start_do_not_keep_others_away_for_ever() -> None:
    scaler = Autoscaler(PLAN)
    counts, wanted = [], 2
    for tick in range(int(STARTS_S * PLAN.up_after_s * 3 / LOOK_S)):
        now_s = tick * LOOK_S
        wanted = scaler.look(wanted, [report(5000, measured_s=now_s)] * 2, now_s)
        counts.append(wanted)
    assert sorted(set(counts)) == [2, 4, 8]
    first, second = counts.index(4) * LOOK_S, counts.index(8) * LOOK_S
    assert second - first >= STARTS_S * PLAN.up_after_s


def test_it_takes_a_break_in_the_queue_as_its_end() -> None:
    fleet = Fleet(wanted=1)
    for _ in range(50):
        fleet.queued = 3 * RATE
        fleet.run(3, lambda _: 0.9 * RATE)
        fleet.queued = 0.0
        fleet.run(LOOK_S, lambda _: 0.9 * RATE)
    assert fleet.changes == []


@pytest.mark.parametrize(("queued", "expected"), [(400, 2), (200, 1)])
def test_none_is_taken_away_if_the_others_would_be_near_the_target(queued: int, expected: int) -> None:
    """With one less a prompt would wait 0.8 or 0.4 s."""
    assert look_on(Autoscaler(PLAN), lambda now_s: [report(queued, measured_s=now_s)] * 2, for_s=90)[-1] == expected


def test_with_the_memory_in_use_none_is_taken_away() -> None:
    full = Report(
        name="m-0", host="h", total_blocks=100, load=Load(free_blocks=40, prefill_tokens_per_s=RATE), measured_at=1.0
    )
    assert demand_of([full] * 4).busy(4) == pytest.approx(0.6)
    assert demand_of([full] * 4).busy(3) == pytest.approx(0.8)


def memory(free: int, waiting: int = 50) -> Callable[[float], list[Report]]:
    """Two replicas with fully cached prompts, so that hardly a token is queued."""
    load = Load(running=8, waiting=waiting, queued_prefill_tokens=40, prefill_tokens_per_s=RATE, free_blocks=free)
    one = Report(name="m-0", host="h", life="ready", total_blocks=1000, load=load)
    return lambda now_s: [msgspec.structs.replace(one, measured_at=UNIX_S + now_s)] * 2


def test_requests_that_wait_for_memory_are_met_though_they_have_few_tokens_to_compute() -> None:
    scaler = Autoscaler(PLAN)
    assert look_on(scaler, memory(free=20), for_s=PLAN.up_after_s) == [2] * 11
    scaler = Autoscaler(PLAN)
    assert look_on(scaler, memory(free=20), for_s=PLAN.up_after_s + LOOK_S)[-1] == 3
    assert scaler.why == "every replica has a queue, and 98% of the KV memory is in use"


@pytest.mark.parametrize(("free", "waiting"), [(20, 0), (500, 1)])
def test_memory_that_is_full_or_a_queue_alone_is_no_reason_for_more(free: int, waiting: int) -> None:
    assert max(look_on(Autoscaler(PLAN), memory(free, waiting), for_s=30)) == 2


def test_a_target_that_nothing_can_meet_asks_for_no_more_than_there_may_be() -> None:
    hopeless = Autoscale(min=1, max=8, ttft_target_s=1e-320)
    assert look_on(Autoscaler(hopeless), lambda now_s: [report(9, measured_s=now_s)] * 2, for_s=7)[-1] == 4


# ---- what bounds it


@pytest.mark.parametrize(("wanted", "expected"), [(0, 2), (1, 2), (9, 5), (3, 3)])
def test_the_bounds_hold_at_once_and_without_any_report(wanted: int, expected: int) -> None:
    scaler = Autoscaler(Autoscale(min=2, max=5))
    assert scaler.look(wanted, [], 0.0) == expected
    assert (scaler.why == "it scales between 2 and 5 replicas") == (wanted != expected)


def test_the_last_replica_stays_even_where_none_would_be_allowed() -> None:
    fleet = Fleet(Autoscale(min=0, max=3), wanted=2)
    fleet.run(3600, lambda _: 0.0)
    assert fleet.wanted == 1


# ---- what is not known


def look_on(scaler: Autoscaler, reports: Callable[[float], list[Report]], for_s: float = 600.0) -> list[int]:
    counts = [2]
    for tick in range(int(for_s / LOOK_S)):
        counts.append(scaler.look(counts[-1], reports(tick * LOOK_S), tick * LOOK_S))
    return counts


@pytest.mark.parametrize("queued", [0, 50_000])
def test_measurements_that_come_no_more_change_nothing(queued: int) -> None:
    plan = Autoscale(min=1, max=8, up_after_s=STALE_S + 1, down_after_s=STALE_S + 1)
    assert set(look_on(Autoscaler(plan), lambda _: [report(queued)] * 2)) == {2}
    assert len(set(look_on(Autoscaler(plan), lambda now_s: [report(queued, measured_s=now_s)] * 2))) > 1


@pytest.mark.parametrize("reports", [[], [Report(name="m-0", host="h", life="ready")] * 2])
def test_replicas_that_have_measured_nothing_change_nothing(reports: list[Report]) -> None:
    assert set(look_on(Autoscaler(PLAN), lambda _: reports)) == {2}


def test_a_replica_whose_figures_are_old_keeps_the_others_from_leaving() -> None:
    old = report(0, "m-1", measured_s=-STALE_S)
    assert set(look_on(Autoscaler(PLAN), lambda now_s: [report(measured_s=now_s), old])) == {2}


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_jumps_keeps_no_fleet_from_changing(jump_s: float) -> None:
    def jumps(now_s: float) -> list[Report]:
        there_s = now_s + (jump_s if now_s > 10 else 0.0)
        return [report(measured_s=there_s), report(0, "m-1", measured_s=now_s)]

    assert look_on(Autoscaler(PLAN), jumps)[-1] == 1


def test_an_engine_that_does_not_say_how_fast_it_is_is_assumed_to_be_usual() -> None:
    scaler = Autoscaler(PLAN)
    asked = {"prefill_tokens_per_s": 0.0, "waiting": 20}
    assert look_on(scaler, lambda now_s: [report(measured_s=now_s, **asked)] * 2, for_s=7)[-1] == 4
    assert scaler.why == (
        "a new prompt would wait 2.5 s, and should 1 s at most: "
        "40,000 tokens are queued, and 16,000 are done in a second (as is assumed)"
    )


def test_a_queue_that_decoding_holds_up_is_as_long_as_it_gets_shorter_slowly() -> None:
    slow = report(500, done_per_s=100.0, waiting=3)
    assert demand_of([slow] * 2).wait_s(2) == 5.0
    idle = report(500, done_per_s=100.0)
    assert demand_of([slow, idle]).wait_s(2) == 0.5, "idle replicas: recent throughput equals the demand"
    stuck = report(500, waiting=3)
    assert demand_of([stuck]).wait_s(1) == 5.0


def test_prompts_that_were_cached_do_not_make_a_replica_busy() -> None:
    busy = Report(
        name="m-0",
        host="h",
        load=Load(prefill_tokens_per_s=RATE),
        prompt_tokens_per_s=4 * RATE,
        hit_rate=0.9,
        measured_at=1.0,
    )
    assert demand_of([busy, busy]).busy(2) == pytest.approx(0.4)
