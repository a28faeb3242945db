import random
from functools import cache
from typing import Any

import pytest

from router.placement.ages import PAGE_TOKENS, CacheAges, Reuse
from router.placement.cost import BUSY_TOKENS, COMPUTE_WEIGHT, Candidate, Question
from router.placement.decision import Decision
from router.placement.effects import LOSS_WEIGHT, MAX_LOOKED_AT
from router.placement.policy import choose

RATE = 8000.0


def replica(slot: int, *waiting: tuple[float, float], **known: Any) -> Candidate:
    """`waiting`: rank and tokens of each prompt that waits there, beside one of 1,000 that is computed."""
    queued = 1000.0 + sum(tokens for _, tokens in waiting) if waiting else 0.0
    one = Candidate(f"r{slot}", slot, prefill_tokens_per_s=RATE, queued_tokens=queued, **known)
    for number, (rank_s, tokens) in enumerate([(0.0, 1000.0), *waiting] if waiting else []):
        one.queue_positions.add(number, rank_s, tokens)
    one.is_crowded = bool(waiting) or one.ages is not None
    return one


@cache
def habits() -> Reuse:
    """Prefixes younger than 10 s come back."""
    reuse = Reuse()
    for second in range(0, 1000, 9):
        reuse.used(range(100), float(second))
    return reuse


def full(slot: int, idle_s: float) -> Candidate:
    """Its cache is full of prefixes of this age."""
    ages = CacheAges(habits())
    ages.describe(PAGE_TOKENS, 100 * PAGE_TOKENS)
    ages.routed(range(100), 1000.0 - idle_s)
    return replica(slot, ages=ages)


def asked(tokens: int, candidates: list[Candidate], matched: dict[int, float] | None = None, **more: Any) -> Decision:
    held = matched or {}
    return choose("cost", Question(tokens, held, now_s=1000.0, **more), candidates, random.Random(0))


def test_a_short_prompt_does_not_wait_for_the_long_ones_it_goes_before() -> None:
    long, short = replica(0, (1010.0, 40_000.0)), replica(1, (1000.0, 10_000.0))
    decision = asked(800, [long, short])
    assert decision.chosen is long
    assert decision.ttft_s == pytest.approx((1000 + 800) / RATE)


def test_a_prompt_is_charged_for_those_that_wait_for_it() -> None:
    many, none = replica(0, *[(1010.0, 10.0)] * 50), replica(1, (1000.0, 1400.0))
    decision = asked(800, [many, none])
    assert decision.chosen is none
    assert decision.effects is not None and decision.effects.delayed == [50 * 800, 0]


def test_a_long_prompt_goes_behind_short_ones() -> None:
    decision = asked(80_000, [replica(0, (1010.0, 400.0), (1011.0, 400.0))])
    assert decision.effects is not None
    assert (decision.effects.overtaken, decision.effects.delayed) == ([0], [0])
    assert decision.ttft_s == pytest.approx((1800 + 80_000) / RATE)


def test_a_request_ahead_of_its_prefix_computes_the_prefix_itself() -> None:
    """r0 computes something, and a prompt waits there whose prefix is this one's too."""
    waiting, held = replica(0, (1012.0, 50_000.0)), replica(1)
    held.queued_tokens = 4000.0
    decision = asked(50_500, [waiting, held], {0: 50_000.0, 1: 40_000.0}, awaited={0: 50_000.0})
    assert next(decision.verdicts()).ttft_s == pytest.approx((1000 + 50_000 + 500) / RATE)
    assert decision.chosen is held


def test_the_place_in_a_queue_counts_from_when_the_request_came() -> None:
    """It has waited for 30 s elsewhere, and goes before later requests."""
    crowd = replica(0, *[(1000.0, 300.0)] * 100)
    late = asked(16_000, [crowd], came_s=970.0)
    assert late.effects is not None and late.effects.delayed == [100 * 16_000]
    assert late.ttft_s == pytest.approx((1000 + 16_000) / RATE)
    assert asked(16_000, [crowd]).ttft_s == pytest.approx((31_000 + 16_000) / RATE)


def test_unknown_losses_are_not_compared() -> None:
    unknown = replica(1, ages=CacheAges(Reuse()))
    decision = asked(20_000, [full(0, 1.0), unknown])
    assert decision.effects is not None and decision.effects.lost == [0, 0]


def test_where_many_cost_the_same_some_are_looked_at_and_the_others_taken_for_as_bad() -> None:
    many = [full(slot, 1.0) for slot in range(MAX_LOOKED_AT + 10)]
    decision = asked(20_000, many)
    assert decision.effects is not None
    lost = {tokens for tokens in decision.effects.lost if tokens is not None}
    assert len(lost) == 1 and min(decision.costs) == pytest.approx(max(decision.costs))


def test_a_prompt_overtakes_no_more_than_the_known_queue() -> None:
    one = replica(0, (1010.0, 40_000.0))
    one.queued_tokens = 500.0
    assert asked(800, [one]).ttft_s == pytest.approx(800 / RATE)


def test_a_cold_prompt_goes_where_it_evicts_unused_prefixes() -> None:
    fresh, stale = full(0, 1.0), full(1, 500.0)
    for seed in range(5):
        decision = choose("cost", Question(20_000, {}, now_s=1000.0), [fresh, stale], random.Random(seed))
        assert decision.chosen is stale
    assert decision.effects is not None
    lost, nothing = decision.effects.lost
    assert lost is not None and lost == pytest.approx(20_000, rel=0.05) and nothing == 0
    assert decision.costs[0] - decision.costs[1] == pytest.approx(LOSS_WEIGHT * lost / RATE)


def test_reasons_name_what_it_would_do_to_others() -> None:
    fresh, stale = full(0, 1.0), full(1, 500.0)
    loser = next(asked(20_000, [fresh, stale]).verdicts())
    assert loser.why == f"would drive out {loser.lost_tokens:,.0f} tokens more that come again"
    assert loser.lost_tokens == pytest.approx(20_000, rel=0.05)
    many, none = replica(0, *[(1010.0, 10.0)] * 50), replica(1, (1000.0, 1400.0))
    assert "others would wait 5.0 s longer" in next(asked(800, [many, none]).verdicts()).why


def test_a_cost_is_the_sum_of_its_parts() -> None:
    fresh, stale = full(0, 1.0), full(1, 500.0)
    lossy, free = asked(20_000, [fresh, stale]).verdicts()
    assert lossy.parts is not None and free.parts is not None
    assert lossy.parts.harm_s == pytest.approx(LOSS_WEIGHT * 20_000 / RATE, rel=0.05)
    assert (free.parts.queue_s, free.parts.harm_s) == (0, 0)
    busy = next(asked(800, [replica(0, (1000.0, 1400.0), running=4)]).verdicts())
    assert busy.parts is not None and busy.cost is not None
    assert busy.parts.compute_s == pytest.approx(COMPUTE_WEIGHT * 800 / RATE)
    assert busy.parts.queue_s == pytest.approx((1000 + 1400 + 4 * BUSY_TOKENS) / RATE)
    assert sum((busy.parts.compute_s, busy.parts.queue_s, busy.parts.harm_s)) == pytest.approx(busy.cost)


def test_an_ineligible_replica_has_no_effects() -> None:
    away = full(0, 1.0)
    away.unavailable = "draining"
    decision = asked(20_000, [away, full(1, 1.0)])
    assert decision.effects is not None and decision.effects.lost[0] == 0
    assert decision.chosen is not away
