"""A choice among computing, loading, reading from a neighbour, and going there."""

import random
from typing import Any

import pytest

from events.native import Load
from router.placement.cost import PROVEN_TOKENS, Candidate, Question
from router.placement.decision import Decision
from router.placement.load import ReplicaLoad
from router.placement.policy import choose
from router.placement.prices import LEAST_PULLED_TOKENS, PULL_S, TOKENS_PER_S

RATE = 8000.0
TOKENS = 9000
HELD = 8192.0


def replica(slot: int, **known: Any) -> Candidate:
    read = {"kv_read": f"tcp://10.0.0.{slot}:5000", "kv_layout": "layout"}
    return Candidate(
        f"r{slot}", slot, **({"prefill_tokens_per_s": RATE, "assigned_tokens": PROVEN_TOKENS} | read | known)
    )


def decide(*candidates: Candidate, held: float = HELD, **known: Any) -> Decision:
    """The first replica holds most of the prompt in its GPU memory, confirmed by events."""
    question = Question(TOKENS, {0: held}, readable=known.pop("readable", {0: held}), **known)
    return choose("cost", question, candidates, random.Random(0))


def chosen(decision: Decision) -> tuple[str, list[str]]:
    assert decision.chosen is not None
    return decision.chosen.name, [neighbour.name for neighbour in decision.neighbours]


def test_a_prompt_goes_where_its_blocks_are_if_nobody_waits_there() -> None:
    assert chosen(decide(replica(0), replica(1))) == ("r0", [])


def test_a_replica_with_a_short_queue_reads_the_blocks_of_a_busy_one() -> None:
    decision = decide(replica(0, queued_tokens=20_000.0), replica(1))
    assert chosen(decision) == ("r1", ["r0"])
    assert decision.neighbours[0].endpoint == "tcp://10.0.0.0:5000" and decision.neighbours[0].tokens == 8192
    assert decision.ttft_s == pytest.approx(PULL_S + HELD / TOKENS_PER_S["PULL"] + (TOKENS - HELD) / RATE)


def test_a_slow_network_leaves_computing() -> None:
    candidates = replica(0, queued_tokens=40_000.0), replica(1, load_tokens_per_s={"PULL": RATE / 2})
    assert chosen(decide(*candidates)) == ("r1", [])


@pytest.mark.parametrize(
    "known",
    [
        {"kv_read": ""},
        {"kv_layout": ""},
        {"kv_layout": "other"},
        {"unavailable": "draining"},
        {"unavailable": "down", "may_try_anyway": True},
    ],
)
def test_a_replica_that_cannot_be_read_is_no_source(known: dict[str, Any]) -> None:
    assert chosen(decide(replica(0, queued_tokens=40_000.0, **known), replica(1))) == ("r1", [])


def test_a_replica_that_cannot_read_is_offered_nothing() -> None:
    assert chosen(decide(replica(0, queued_tokens=40_000.0), replica(1, kv_read=""))) == ("r1", [])


def test_a_replica_that_has_failed_the_request_is_no_source() -> None:
    assert chosen(decide(replica(0), replica(1), tried=frozenset({"r0"}))) == ("r1", [])


def test_nobody_reads_a_few_blocks() -> None:
    busy = replica(0, queued_tokens=40_000.0)
    fewest = float(LEAST_PULLED_TOKENS)
    assert chosen(decide(busy, replica(1), held=fewest)) == ("r1", ["r0"])
    assert chosen(decide(busy, replica(1), held=fewest - 1)) == ("r1", [])
    more = {0: HELD, 1: HELD - fewest + 1}
    question = Question(TOKENS, more, readable=more)
    assert chosen(choose("cost", question, [busy, replica(1)], random.Random(0))) == ("r1", [])


def test_the_fixed_cost_outweighs_a_short_read_on_a_fast_replica() -> None:
    fast = replica(1, prefill_tokens_per_s=60_000.0, load_tokens_per_s={"PULL": 1e6})
    assert chosen(decide(replica(0, queued_tokens=4e6), fast, held=258.0)) == ("r1", [])
    assert chosen(decide(replica(0, queued_tokens=4e6), fast, held=3000.0)) == ("r1", ["r0"])


def test_two_neighbours_at_most_are_named_the_best_first() -> None:
    held = {slot: HELD + 16 * (slot % 3) for slot in range(4)}
    busy = [replica(slot, queued_tokens=40_000.0, all_in_flight=slot) for slot in range(4)]
    question = Question(TOKENS, held, readable=held)
    assert chosen(choose("cost", question, [*busy, replica(4)], random.Random(0))) == ("r4", ["r2", "r1"])


def test_own_host_memory_comes_before_a_neighbour() -> None:
    busy = replica(0, queued_tokens=40_000.0)
    decision = decide(busy, replica(1), below={"CPU": {1: 4096}})
    sources = [(portion.source, portion.tokens) for portion in list(decision.verdicts())[1].portions]
    assert sources == [("CPU", 4096), ("PULL", HELD - 4096), ("COMPUTE", TOKENS - HELD)]
    assert list(decision.verdicts())[1].portions[1].neighbours == ("r0",)


def test_the_words_tell_computing_from_bringing() -> None:
    decision = decide(replica(0), replica(1), replica(2, kv_read=""))
    words = {verdict.name: verdict.why for verdict in list(decision.verdicts())}
    assert words["r1"] == f"would bring blocks for {PULL_S + HELD / TOKENS_PER_S['PULL']:.3f} s longer"
    assert words["r2"] == "would compute 8,192 tokens more"


# ---- rates and queues


def test_a_replicas_own_rates_count() -> None:
    load = ReplicaLoad(Candidate("r", 0))
    load.reported(Load(prefill_tokens_per_s=RATE, load_tokens_per_s={"CPU": 16_000.0}), 0.0)
    decision = choose("cost", Question(4001, {}, {"CPU": {0: 4000}}), [load.candidate], random.Random(0))
    assert decision.uncached_tokens == 1 + 4000 / 2
    load.forget()
    assert (
        choose("cost", Question(4001, {}, {"CPU": {0: 4000}}), [load.candidate], random.Random(0)).uncached_tokens < 400
    )


def test_tokens_that_wait_to_be_brought_lengthen_the_queue_at_their_price() -> None:
    load = ReplicaLoad(Candidate("r", 0))
    rates = {"CPU": 80_000.0, "STORAGE": 16_000.0}
    load.reported(Load(queued_prefill_tokens=500, prefill_tokens_per_s=RATE, loading_tokens=3000), 0.0)
    assert load.candidate.queued_tokens == 500 + 3000 * RATE / TOKENS_PER_S["CPU"]
    load.reported(Load(prefill_tokens_per_s=RATE, loading_tokens=3000, load_tokens_per_s=rates), 0.0)
    assert load.candidate.queued_tokens == 3000 / 2, "it may be the slower source"
    load.reported(Load(prefill_tokens_per_s=RATE, load_tokens_per_s=rates), 0.0)
    assert load.candidate.queued_tokens == 0


# ---- a prompt that was computed for whoever generates its answer


def from_source(source: Candidate, *candidates: Candidate, **known: Any) -> Decision:
    question = Question(TOKENS, {}, source=source, tried=frozenset({source.name}), **known)
    return choose("cost", question, (source, *candidates), random.Random(0))


def test_its_blocks_are_read_where_it_was_computed_before_events_confirm_them() -> None:
    decision = from_source(replica(0, role="prefill"), replica(1, role="decode"))
    assert chosen(decision) == ("r1", ["r0"])
    assert decision.neighbours[0].tokens == TOKENS
    assert [one.neighbours for one in decision.portions if one.source == "PULL"] == [("r0",)]


def test_the_best_of_the_other_neighbours_is_named_second() -> None:
    busy = [replica(number, queued_tokens=1e6) for number in (2, 3)]
    readable = {0: 512.0, 2: 4096.0, 3: 8192.0}
    decision = from_source(replica(0, role="prefill"), replica(1, role="decode"), *busy, readable=readable)
    assert chosen(decision) == ("r1", ["r0", "r3"])


def test_it_is_named_even_where_a_rate_says_that_computing_is_as_fast() -> None:
    reader = replica(1, role="decode", load_tokens_per_s={"PULL": RATE / 2})
    assert chosen(from_source(replica(0, role="prefill"), reader)) == ("r1", ["r0"])


@pytest.mark.parametrize("known", [{"kv_layout": "other"}, {"kv_read": "", "kv_layout": ""}])
def test_replicas_that_can_read_it_are_chosen_first(known: dict[str, Any]) -> None:
    able, unable = replica(1, role="decode"), replica(2, role="decode", **known)
    assert chosen(from_source(replica(0, role="prefill"), unable, able)) == ("r1", ["r0"])
    assert chosen(from_source(replica(0, role="prefill"), unable)) == ("r2", [])


def test_a_source_that_is_gone_is_not_named() -> None:
    decision = from_source(replica(0, role="prefill", unavailable="gone"), replica(1, role="decode"))
    assert chosen(decision) == ("r1", [])
