import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.cost import ALIKE_RATES, BUSY_TOKENS, INFINITE, PROVEN_TOKENS, Candidate, Question, obstacles
from router.placement.effects import MAX_LATER_S, PATIENCE
from router.placement.load import ReplicaLoad
from router.placement.policy import POLICIES, Ring, choose
from router.placement.prices import TOKENS_PER_S

RATE = 8000.0


def replica(slot: int, **known: Any) -> Candidate:
    return Candidate(f"r{slot}", slot, **({"prefill_tokens_per_s": RATE, "assigned_tokens": PROVEN_TOKENS} | known))


def question(tokens: int = 4000, matched: dict[int, float] | None = None, **known: Any) -> Question:
    matched = matched or {}
    return Question(tokens, matched, **known)


def chosen(policy: str, asked: Question, candidates: list[Candidate], ring: Ring | None = None, seed: int = 0) -> str:
    decision = choose(policy, asked, candidates, random.Random(seed), ring)
    assert decision.chosen is not None
    return decision.chosen.name


# ---- the order in which a replica computes


def test_what_computes_little_goes_before_what_computes_much_and_came_shortly_before() -> None:
    long, short = (choose("cost", question(tokens), [replica(0)], random.Random(0)) for tokens in (16_000, 800))
    assert long.later_s == pytest.approx(PATIENCE * 16_000 / RATE)
    assert short.later_s == pytest.approx(PATIENCE * 800 / RATE)
    warm = choose("cost", question(16_000, {0: 15_200}), [replica(0)], random.Random(0))
    assert warm.later_s == short.later_s


def test_overtaking_is_bounded() -> None:
    assert choose("cost", question(10**7), [replica(0)], random.Random(0)).later_s == MAX_LATER_S


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"cost"}))
def test_other_policies_leave_the_order_to_arrival(policy: str) -> None:
    assert choose(policy, question(), [replica(0)], random.Random(0), Ring(["r0"])).later_s == 0


# ---- cost


def test_the_warm_replica_wins_while_its_queue_is_short() -> None:
    candidates = [replica(0), replica(1, queued_tokens=3000.0)]
    assert chosen("cost", question(matched={1: 2000}), candidates) == "r1"  # saves 2 * 2,000


def test_a_long_queue_outweighs_the_warm_prefix() -> None:
    candidates = [replica(0), replica(1, queued_tokens=5000.0)]
    assert chosen("cost", question(matched={1: 2000}), candidates) == "r0"


def test_lower_media_are_cheaper_than_computing_but_not_free() -> None:
    candidates = [replica(0), replica(1), replica(2)]
    asked = question(matched={2: 3000}, below={"CPU": {1: 3000, 2: 3000}})
    cold, lower, gpu = choose("cost", asked, candidates, random.Random(0)).costs
    assert gpu < lower < cold
    assert cold - lower == pytest.approx((1 - RATE / TOKENS_PER_S["CPU"]) * (cold - gpu))


def test_a_faster_replica_is_worth_a_longer_queue() -> None:
    candidates = [replica(0, queued_tokens=4000.0), replica(1, queued_tokens=6000.0, prefill_tokens_per_s=3 * RATE)]
    assert chosen("cost", question(), candidates) == "r1"


def test_a_rate_that_is_not_known_yet_is_taken_for_the_mean_of_the_others() -> None:
    candidates = [replica(0, prefill_tokens_per_s=2000.0), replica(1, prefill_tokens_per_s=0.0), replica(2)]
    slow, unknown, fast = choose("cost", question(), candidates, random.Random(0)).costs
    assert fast < unknown < slow


def test_a_rate_of_a_few_samples_is_taken_for_the_mean_of_all() -> None:
    """Else it would stay one of a few samples while others are idle."""
    rates = {0: 2000.0, 1: 8000.0, 2: 8000.0}
    few = [replica(slot, prefill_tokens_per_s=rate, assigned_tokens=1000) for slot, rate in rates.items()]
    assert len(set(choose("cost", question(), few, random.Random(0)).costs)) == 1
    few[0].assigned_tokens = PROVEN_TOKENS
    slow, *others = choose("cost", question(), few, random.Random(0)).costs
    assert slow > others[0] == others[1]


def test_a_running_answer_costs_what_it_delays() -> None:
    warm = replica(0, running=3, answer_delay_s=0.5)
    for cold in (replica(1, answer_delay_s=0.5), replica(1)):  # one that is new has the price of the others
        decision = choose("cost", question(4000, {0: 2000}), [warm, cold], random.Random(0))
        assert decision.question.busy_tokens == pytest.approx(BUSY_TOKENS + 0.5 * RATE)
        assert decision.chosen is cold
    warm.answer_delay_s = cold.answer_delay_s = 0.01
    assert choose("cost", question(4000, {0: 2000}), [warm, cold], random.Random(0)).chosen is warm


def test_noise_in_what_answers_delay_moves_none_of_them() -> None:
    candidates = [replica(slot, answer_delay_s=0.1 * (slot + 1)) for slot in range(3)]
    for _ in range(30):
        candidates[int(chosen("cost", question(1), candidates)[1:])].running += 1
    assert [one.running for one in candidates] == [10, 10, 10]


def test_a_replica_that_comes_back_is_dearer() -> None:
    assert chosen("cost", question(), [replica(0, slowness=5.0), replica(1, queued_tokens=4000.0)]) == "r1"


def test_equal_replicas_are_drawn_by_lot_and_the_emptiest_first() -> None:
    unknown = {chosen("cost", question(), [replica(0), replica(1)], seed=seed) for seed in range(20)}
    assert unknown == {"r0", "r1"}
    known = [replica(0, empty_tokens=1000.0), replica(1, empty_tokens=5000.0)]
    assert {chosen("cost", question(), known, seed=seed) for seed in range(20)} == {"r1"}


def test_near_equal_queues_are_drawn_by_lot() -> None:
    candidates = [replica(0, queued_tokens=100_000.0), replica(1, queued_tokens=102_000.0)]
    assert {chosen("cost", question(), candidates, seed=seed) for seed in range(20)} == {"r0", "r1"}


def test_one_cached_block_decides_between_idle_replicas() -> None:
    asked = question(8000, {1: 16})
    assert {chosen("cost", asked, [replica(0), replica(1)], seed=seed) for seed in range(20)} == {"r1"}


@pytest.mark.parametrize("empty", [None, 400_000.0])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_sequential_cold_prompts_spread(empty: float | None, seed: int, noise: float) -> None:
    rng = random.Random(seed)
    candidates = [
        replica(slot, empty_tokens=empty, prefill_tokens_per_s=RATE * rng.uniform(1 - noise, 1)) for slot in range(4)
    ]
    counts: Counter[str] = Counter()
    for _ in range(100):
        name = choose("cost", question(), candidates, rng).chosen
        assert name is not None
        counts[name.name] += 1
        name.assigned_tokens += 4000
        if name.empty_tokens is not None:
            name.empty_tokens -= 4000
    assert max(counts.values()) <= 35


def test_measured_rates_that_differ_by_noise_are_evened_out_in_groups() -> None:
    rates = [16000.0, 15000.0, 8000.0, 7000.0]
    candidates = [replica(slot, prefill_tokens_per_s=rate) for slot, rate in enumerate(rates)]
    assert min(rates[:2]) / max(rates[:2]) > ALIKE_RATES
    a, b, c, d = choose("cost", question(), candidates, random.Random(0)).costs
    assert a == b and c == d and a < c


def shared_prefix_run(policy: str, requests: int, gap_s: float) -> Counter[str]:
    """All prompts share 2,000 of 4,000 tokens; each replica prefills one after the other and keeps what it saw."""
    rng = random.Random(7)
    candidates = [replica(slot) for slot in range(4)]
    loads = {candidate.name: ReplicaLoad(candidate) for candidate in candidates}
    done_s = {candidate.name: 0.0 for candidate in candidates}
    running: list[tuple[float, str, int]] = []
    warm: dict[int, float] = {}
    counts: Counter[str] = Counter()
    for number in range(requests):
        now_s = number * gap_s
        for ended_s, name, request_id in sorted(one for one in running if one[0] <= now_s):
            loads[name].begun(request_id, ended_s)
            loads[name].ended(request_id, ended_s)
            running.remove((ended_s, name, request_id))
        pick = choose(policy, question(4000, warm), candidates, rng).chosen
        assert pick is not None
        uncached = 4000 - int(warm.get(pick.slot, 0))
        warm = warm | {pick.slot: 2000}
        loads[pick.name].sent(number, uncached, now_s)
        done_s[pick.name] = max(now_s, done_s[pick.name]) + uncached / RATE
        running.append((done_s[pick.name], pick.name, number))
        counts[pick.name] += 1
    return counts


def test_a_shared_system_prompt_does_not_pull_all_traffic_to_one_replica() -> None:
    counts = shared_prefix_run("cost", 400, gap_s=0.08)  # 0.78 of what four warm replicas can do
    assert len(counts) == 4 and max(counts.values()) < 160


def test_a_shared_system_prompt_under_longest_prefix_does_pull_it() -> None:
    assert len(shared_prefix_run("prefix", 400, gap_s=0.08)) == 1  # the negative control


# ---- filters


def test_replicas_that_cannot_take_it_are_left_out_and_say_why() -> None:
    candidates = [
        replica(0, unavailable="draining"),
        replica(1, limit=2, all_in_flight=2),
        replica(2, max_model_len=1000),
        replica(3),
        replica(4, queued_tokens=90_000.0),
    ]
    decision = choose("cost", question(tried=frozenset({"r3"})), candidates, random.Random(0))
    assert decision.chosen is candidates[4]
    assert [verdict.why for verdict in list(decision.verdicts())] == [
        "draining",
        "full: 2 requests in flight, its limit is 2",
        "too long: 4,000 tokens, its max_model_len is 1,000",
        "has failed this request before",
        "chosen: lowest cost",
    ]
    assert decision.costs[:4] == [float("inf")] * 4


def test_no_prompt_is_too_long_by_an_estimate() -> None:
    assert chosen("cost", question(exact=False), [replica(0, max_model_len=1000)]) == "r0"


@pytest.mark.parametrize("policy", POLICIES)
def test_an_unplaced_decision_gives_the_reason(policy: str) -> None:
    full, down = {"limit": 1, "all_in_flight": 1}, {"unavailable": "silent for 2.0 s"}

    def nobody(*known: dict[str, Any], **asked: Any) -> str | None:
        candidates = [replica(slot, **one) for slot, one in enumerate(known)]
        decision = choose(policy, question(**asked), candidates, random.Random(0), Ring("r0"))
        assert decision.chosen is None and decision.refusal()
        assert all(verdict.cost is None for verdict in list(decision.verdicts()))
        return decision.rejection

    assert nobody(full, full) == "full"
    assert nobody(full, down) == "full"
    assert nobody(full, {"max_model_len": 100}) == "full"
    assert nobody({"max_model_len": 100}, {"max_model_len": 100, **full}) == "too_long"
    assert nobody({"max_model_len": 100}, down) == "unavailable"
    assert nobody(down, down) == "unavailable"
    assert nobody({}, down, tried=frozenset({"r0"})) == "tried"
    assert nobody() == "unavailable"


# ---- words


def test_verdicts_say_what_made_the_difference() -> None:
    candidates = [replica(0), replica(1, queued_tokens=14_000.0), replica(2), replica(3, slowness=3.0), replica(4)]
    asked = question(matched={0: 3800, 1: 3800, 2: 600, 3: 3800, 4: 3800}, below={"CPU": {2: 700}})
    candidates[4].running = 50
    decision = choose("cost", asked, candidates, random.Random(0))
    verdicts = list(decision.verdicts())
    assert [verdict.why for verdict in verdicts] == [
        "chosen: lowest cost",
        "queue 14,000 tokens longer",
        "would compute 3,100 tokens more",
        "slow start: counts 3.0 times",
        "50 more requests running",
    ]
    assert (verdicts[2].matched_tokens, verdicts[2].lower_tokens) == (600, 700)
    assert decision.ttft_s == verdicts[0].ttft_s == pytest.approx(200 / RATE)
    assert verdicts[1].ttft_s == pytest.approx(14_200 / RATE)


def test_a_slower_replica_and_an_equal_one_are_distinguished() -> None:
    candidates = [replica(0), replica(1, prefill_tokens_per_s=RATE / 4), replica(2)]
    decision = choose("cost", question(), candidates, random.Random(0))
    words = {verdict.name: verdict.why for verdict in list(decision.verdicts()) if not verdict.why.startswith("chosen")}
    assert words.pop("r1") == "prefills 75% slower"
    assert list(words.values()) == [f"as good; the lot fell on {decision.chosen.name if decision.chosen else None}"]


# ---- the other policies


def test_prefix_takes_the_longest_and_of_those_the_cheapest() -> None:
    candidates = [replica(0, queued_tokens=90_000.0), replica(1, queued_tokens=80_000.0), replica(2)]
    assert chosen("prefix", question(matched={0: 2000, 1: 2000, 2: 1000}), candidates) == "r1"


def test_least_loaded_does_not_look_at_the_cache() -> None:
    candidates = [replica(0, queued_tokens=500.0), replica(1)]
    assert chosen("least-loaded", question(matched={0: 3999}), candidates) == "r1"


def test_round_robin_takes_turns_among_those_that_can() -> None:
    candidates = [replica(0), replica(1, unavailable="draining"), replica(2)]
    assert [chosen("round-robin", question(turn=turn), candidates) for turn in range(4)] == ["r0", "r2", "r0", "r2"]


def test_random_reaches_everyone() -> None:
    candidates = [replica(0, queued_tokens=90_000.0), replica(1), replica(2, unavailable="draining")]
    assert {chosen("random", question(), candidates, seed=seed) for seed in range(30)} == {"r0", "r1"}


def test_a_session_stays_until_its_replica_is_loaded_beyond_the_bound() -> None:
    candidates = [replica(slot) for slot in range(4)]
    ring = Ring(candidate.name for candidate in candidates)
    asked = question(session="me", matched={})
    first, second = list(ring.walk("me"))[:2]
    by_name = {candidate.name: candidate for candidate in candidates}
    for candidate in candidates:
        candidate.all_in_flight = 10
    assert chosen("session", asked, candidates, ring) == first
    by_name[first].all_in_flight = 14  # of 45 with this one: more than 1.25 * 45 / 4
    assert chosen("session", asked, candidates, ring) == first
    by_name[first].all_in_flight = 15
    assert chosen("session", asked, candidates, ring) == second
    by_name[first].all_in_flight, by_name[first].unavailable = 0, "draining"
    assert chosen("session", asked, candidates, ring) == second


def test_without_a_session_cost_decides() -> None:
    candidates = [replica(0, queued_tokens=9000.0), replica(1)]
    assert chosen("session", question(), candidates, Ring(["r0", "r1"])) == "r1"


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="policy is 'best'; use one of cost, "):
        choose("best", question(), [replica(0)], random.Random(0))


# ---- any questions


def numbered(candidates: list[Candidate]) -> list[Candidate]:
    for slot, candidate in enumerate(candidates):
        candidate.name, candidate.slot = f"r{slot}", slot
    return candidates


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        name=st.just(""),
        slot=st.just(0),
        queued_tokens=st.integers(0, 5000).map(float),
        running=st.integers(0, 9),
        all_in_flight=st.integers(0, 5),
        limit=st.integers(0, 6),
        prefill_tokens_per_s=st.sampled_from([0.0, 4000.0, 8000.0, 8100.0]),
        empty_tokens=st.none() | st.integers(0, 9).map(float),
        slowness=st.sampled_from([1.0, 3.0]),
        unavailable=st.sampled_from([None, None, "draining"]),
        max_model_len=st.none() | st.integers(1, 9000),
        answer_delay_s=st.sampled_from([0.0, 0.1, 2.0]),
        may_try_anyway=st.booleans(),
    ),
    max_size=6,
).map(numbered)
PLACES = st.dictionaries(st.integers(0, 5), st.integers(0, 9000).map(float))


def asked(
    tokens: int, matched: dict[int, float], more: dict[int, float], tried: set[int], session: str | None, anyway: bool
) -> Question:
    matched = {slot: min(held, tokens) for slot, held in matched.items()}
    held = {slot: min(tokens, matched.get(slot, 0) + more.get(slot, 0)) for slot in matched | more}
    names = frozenset(f"r{number}" for number in tried)
    return Question(tokens, matched, {"CPU": held}, session, names, anyway=anyway)


QUESTIONS = st.builds(
    asked,
    st.integers(1, 9000),
    PLACES,
    PLACES,
    st.sets(st.integers(0, 5), max_size=2),
    st.none() | st.just("me"),
    st.booleans(),
)


@given(st.sampled_from(sorted(POLICIES)), QUESTIONS, CANDIDATES, st.integers(0, 99))
def test_a_choice_is_one_that_can_take_it_and_every_replica_has_a_reason(
    policy: str, question: Question, candidates: list[Candidate], seed: int
) -> None:
    ring = Ring(candidate.name for candidate in candidates)
    decision = choose(policy, question, candidates, random.Random(seed), ring)
    found = obstacles(candidates, question.tokens, question.tried, question.anyway)
    able = [candidate for candidate, obstacle in zip(candidates, found, strict=True) if obstacle is None]
    assert [cost < INFINITE for cost in decision.costs] == [candidate in able for candidate in candidates]
    assert (decision.chosen in able) if able else (decision.chosen is None)
    assert (decision.rejection is None) == bool(able)
    verdicts = list(decision.verdicts())
    assert [verdict.why.startswith("chosen") for verdict in verdicts] == [
        candidate is decision.chosen for candidate in candidates
    ]
    assert all(verdict.why and (verdict.ttft_s or 0) > 0 for verdict in verdicts)
    assert able or decision.refusal()


@given(QUESTIONS, CANDIDATES.filter(bool), st.data())
def test_more_running_answers_make_no_replica_cheaper_and_their_price_decides_nothing_without_any(
    question: Question, candidates: list[Candidate], data: st.DataObject
) -> None:
    before = choose("cost", question, candidates, random.Random(0)).costs
    busier = data.draw(st.integers(0, len(candidates) - 1))
    candidates[busier].running += data.draw(st.integers(1, 50))
    after = choose("cost", question, candidates, random.Random(0)).costs
    assert after[busier] >= before[busier]
    assert after[:busier] + after[busier + 1 :] == before[:busier] + before[busier + 1 :]
    for one in candidates:
        one.running = one.all_in_flight = 0
    priced = choose("cost", question, candidates, random.Random(0))
    for one in candidates:
        one.answer_delay_s = 0.0
    unpriced = choose("cost", question, candidates, random.Random(0))
    assert (priced.chosen, priced.costs) == (unpriced.chosen, unpriced.costs)
