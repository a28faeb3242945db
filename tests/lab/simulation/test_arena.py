"""Other projects' rules do what their sources say: cases from their tests and formulas, and whole runs."""

from collections import Counter
from collections.abc import Sequence
from math import isnan
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from lab.simulation.arena.rules import RULES, Asked, DualMap, Seen, dynamo, lmetric, ray_serve, sglang, vllm_router
from lab.simulation.arena.tournament import Run, as_json, runs_of, standings
from lab.simulation.comparison import Outcome, ideal, outcome_of
from lab.simulation.fleet import simulated
from lab.simulation.settings import Settings
from lab.trace.requests import Trace, TraceRequest, at_rate
from tests.lab.traffic import conversations

SETTINGS = Settings(replicas=4, capacity_tokens=300_000)
CHATS = at_rate(conversations(150), 0.9 * 4 * SETTINGS.prefill_tokens_per_s)


def asked(blocks: Sequence[int] = range(10), **more: Any) -> Asked:
    return Asked(tokens=len(blocks) * 16, blocks=blocks, block_tokens=16, chance=Random(0), **more)


def replicas(*each: dict[str, Any]) -> list[Seen]:
    return [Seen(number, **known) for number, known in enumerate(each)]


def tree(blocks: Sequence[int], turn: int = 0) -> Counter[int]:
    """Blocks with the turn of their last use, or the number of requests that use them."""
    return Counter(dict.fromkeys(blocks, turn))


# ---- one rule each


@pytest.mark.parametrize(("in_flight", "chosen"), [(0, 0), (8, 0), (10, 1), (20, 1)])
def test_lmetric_multiplies_new_tokens_by_requests(in_flight: int, chosen: int) -> None:
    """sglang's lmetric.rs: a cached prefix is used at low load, and left with 20 requests there."""
    seen = replicas({"expected": 144, "in_flight": in_flight}, {})
    assert lmetric(asked(), seen) == chosen
    assert lmetric(asked(), replicas({"pending_tokens": 1}, {})) == 0
    assert lmetric(asked(), replicas({"pending_tokens": 1}, {}), counts_queue=True) == 1


@pytest.mark.parametrize(("matched", "chosen"), [(10, 0), (4, 0), (3, 1)])
def test_sglang_follows_a_match_over_its_threshold(matched: int, chosen: int) -> None:
    """Its test_cache_aware_with_balanced_load; the command's threshold is 0.3, and 3 of 10 blocks are not more."""
    assert sglang(asked(), replicas({"tree": tree(range(matched)), "in_flight": 9}, {})) == chosen


@pytest.mark.parametrize(("loads", "chosen"), [((64, 0), 0), ((65, 0), 1), ((200, 135), 0), ((200, 133), 1)])
def test_sglang_leaves_a_match_when_loads_differ_by_both_thresholds(loads: tuple[int, int], chosen: int) -> None:
    """Its test_cache_aware_with_imbalanced_load, with the command's thresholds of 64 and 1.5."""
    seen = replicas({"tree": tree(range(10)), "in_flight": loads[0]}, {"in_flight": loads[1]})
    assert sglang(asked(), seen) == chosen


def test_sglang_breaks_ties_by_the_last_use_and_by_requests_so_far() -> None:
    assert sglang(asked(), replicas({"tree": tree(range(9), 1)}, {"tree": tree(range(9), 2)})) == 1
    assert sglang(asked(), replicas({"sent": 2}, {"sent": 1})) == 1


def test_vllm_router_keeps_a_session_until_loads_differ() -> None:
    seen = replicas({"tree": tree(range(10))}, {"in_flight": 3})
    assert vllm_router(asked(), seen) == 0
    assert vllm_router(asked(session="s", last=1), seen) == 1
    assert vllm_router(asked(session="s", last=1), replicas({}, {"in_flight": 65})) == 0


def test_vllm_router_hashes_a_session_or_else_the_whole_request() -> None:
    choose, seen = RULES["vllm-router-hash"](), replicas(*[{}] * 4)
    assert len({choose(asked(range(number), session="s"), seen) for number in range(1, 30)}) == 1
    assert {choose(asked(range(number)), seen) for number in range(1, 30)} == {0, 1, 2, 3}


def test_dynamo_adds_blocks_to_prefill_and_blocks_in_use() -> None:
    """The example of its documentation: 8 + 10, 5 + 5 and 2 + 9; each has the request's 10 blocks besides."""
    in_use = [range(100, 100 + blocks) for blocks in (10, 5, 9)]
    seen = replicas(*({"cached": 16 * (2 + 3 * at), "live": tree(used, 1)} for at, used in enumerate(in_use)))
    assert dynamo(asked(), seen) == 1
    seen[1].pending_tokens = 17
    assert dynamo(asked(), seen) == 2
    seen[0].live = seen[2].live = tree(range(10), 1)  # blocks of the request itself count once
    seen[0].cached = seen[2].cached + 1
    assert dynamo(asked(), seen) == 0


@pytest.mark.parametrize(
    ("known", "chosen"),
    [
        ([{"waiting": 10}, {"waiting": 5}, {"waiting": 0}], 2),  # queue_test.go: 0, 0.5 and 1
        ([{"kv_used": 0.8}, {"kv_used": 0.5}, {"kv_used": 0.2}], 2),
        ([{"expected": 160, "waiting": 2}, {"waiting": 1}, {}], 0),  # 3 for the prefix against 2 for the queue
        ([{"expected": 80, "waiting": 2}, {"waiting": 1}, {}], 2),  # 1.5 against 2
    ],
)
def test_llm_d_adds_weighted_scores(known: list[dict[str, Any]], chosen: int) -> None:
    choose, seen = RULES["llm-d"](), replicas(*known)
    for one in seen:
        one.expected = one.expected or 1  # no request is cold
    assert choose(asked(), seen) == chosen


def test_llm_d_gives_cold_requests_to_each_replica_in_turn() -> None:
    choose, seen = RULES["llm-d"](), replicas({}, {}, {})
    turns = [choose(asked(), seen) for _ in range(6)]
    assert sorted(turns[:3]) == [0, 1, 2] and turns[3:] == turns[:3]


def test_ray_serve_takes_the_shortest_queue_of_the_best_matches_or_of_the_smallest_trees() -> None:
    matching = {"tree": tree(range(1))}
    assert ray_serve(asked(), replicas({**matching, "in_flight": 9}, {**matching, "in_flight": 8}, {})) == 1
    other = {"tree": tree(range(100, 105))}
    assert ray_serve(asked(), replicas(other, {"in_flight": 9}, {"in_flight": 8})) == 2


def test_dualmap_has_two_candidates_for_a_prefix_and_leaves_the_late_one() -> None:
    seen = replicas(*[{}] * 8)
    chosen = {DualMap()(asked([7, number])._replace(chance=Random(number)), seen) for number in range(20)}
    first, second = sorted(chosen)
    seen[first].cached = 16
    assert DualMap()(asked([7, 8]), seen) == first
    seen[first].pending_tokens = 20_001  # half of 5 s at 8,000 tokens/s
    assert DualMap()(asked([7, 8]), seen) == second


def test_dualmap_hashes_more_of_a_hot_prefix() -> None:
    choose, seen = DualMap(), replicas(*[{}] * 8)
    assert len({choose(asked([7, number]), seen) for number in range(20)}) <= 2
    assert len({choose(asked([7, number]), seen) for number in range(40)}) > 4


# ---- whole runs


@pytest.mark.parametrize("policy", RULES)
def test_each_rule_serves_every_request_and_hits_no_more_than_an_endless_cache(policy: str) -> None:
    jobs = simulated(CHATS, SETTINGS, policy, 0)
    found, best = (outcome_of(each, 4, SETTINGS.prefill_tokens_per_s) for each in (jobs, ideal(CHATS, SETTINGS)))
    assert found.hit_rate <= best.hit_rate and not found.refused
    again = simulated(CHATS, SETTINGS, policy, 0)
    assert [(job.replica, job.first_s) for job in again] == [(job.replica, job.first_s) for job in jobs]


@pytest.mark.parametrize(("policy", "returns"), [("sglang", True), ("dynamo", False)])
def test_an_own_tree_remembers_what_events_say_is_gone(policy: str, returns: bool) -> None:
    """The first prompt comes again when a longer one has evicted it and still runs there."""
    two = replace(SETTINGS, replicas=2, capacity_tokens=200 * 16)
    prompts = [
        (0.0, range(100), 320),
        (5.0, range(200, 350), 4000),
        (10.0, range(400, 600), 4000),
        (30.0, range(100), 1),
    ]
    requests = [TraceRequest(at_s, 16 * len(blocks), output, tuple(blocks)) for at_s, blocks, output in prompts]
    first, second, third, again = (job.replica for job in simulated(Trace("t", 16, requests), two, policy, 0))
    assert (second != first, third == first, again == first) == (True, True, returns)


def test_a_full_replica_is_not_chosen_and_requests_wait_for_room() -> None:
    one = replace(SETTINGS, replicas=2, replica_limit=1)
    requests = [TraceRequest(0.0, 1600, 40, tuple(range(100))) for _ in range(4)]
    jobs = simulated(Trace("t", 16, requests), one, "vllm-router-hash", 0)
    assert sorted(job.replica for job in jobs[:2]) == [0, 1]
    assert all(job.first_s > 1 for job in jobs[2:])


# ---- standings


def test_standings_count_the_way_from_round_robin_to_the_bound() -> None:
    outcome = Outcome(
        hit_rate=0.5,
        ttft_mean_s=1,
        ttft_p50_s=1,
        ttft_p90_s=1,
        ttft_p99_s=1,
        token_imbalance=1,
        request_imbalance=1,
        utilization=1,
    )
    runs = runs_of([4], [0.6, 0.9], ["sglang"])
    means = {"round-robin": (10.0, 20.0), "cost": (4.0, 4.0), "cost-in-order": (9.0, 9.0)}
    means |= {"sglang": (5.0, 3.0), "pooled": (5.0, 4.0)}
    assert [run.policy for run in runs[:5]] == list(means)
    found = {run: replace(outcome, ttft_mean_s=means[run.policy][run.load == 0.9]) for run in runs}
    told = standings(found, is_closed_loop=False)
    assert as_json(CHATS, SETTINGS, found, told)["runs"][1]["ttft_mean_s"] == 4.0
    assert told["sglang"].closed == pytest.approx((1 + 17 / 16) / 2) and told["sglang"].least_closed == 1.0
    assert (told["round-robin"].closed, told["pooled"].closed) == (0.0, 1.0)
    assert (told["sglang"].ahead, told["pooled"].ahead, told["cost"].ahead) == (1, 0, 0)
    assert told["cost"].ttft_mean_s == pytest.approx(4.0)
    alike = standings({Run(4, 1, name): outcome for name in means}, is_closed_loop=False)
    assert isnan(alike["cost"].closed)
