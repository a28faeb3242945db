"""The price of a prompt against a model that looks at every token, and the neighbours that a replica may read from."""

import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.cost import Candidate, Question, uncached_tokens, weigh
from router.placement.elsewhere import MAX_NEIGHBOURS, add_pulls
from router.placement.policy import POLICIES, choose
from router.placement.prices import LEAST_PULLED_TOKENS, OWN_SOURCES, PULL, PULL_S, TOKENS_PER_S

RATE = 8000.0
TOKENS = 1500
SLOTS = range(5)
extents = st.dictionaries(st.sampled_from(SLOTS), st.integers(1, TOKENS))
rates = st.dictionaries(st.sampled_from([*OWN_SOURCES, PULL]), st.sampled_from([0.0, 4000.0, 9000.0, 60_000.0, 1e8]))
candidates_of = st.tuples(
    *(
        st.builds(
            Candidate,
            name=st.just(f"r{slot}"),
            slot=st.just(slot),
            all_in_flight=st.integers(0, 3),
            unavailable=st.sampled_from([None, None, "draining"]),
            load_tokens_per_s=rates,
            kv_read=st.sampled_from(["", f"tcp://10.0.0.{slot}:5000"]),
            kv_layout=st.sampled_from(["", "one", "one", "other"]),
        )
        for slot in SLOTS
    )
)


@st.composite
def questions(draw: st.DrawFn) -> Question:
    gpu, cpu, disk = (draw(extents) for _ in range(3))
    host = {slot: max(cpu.get(slot, 0), gpu.get(slot, 0)) for slot in cpu}
    below = {"CPU": host, "STORAGE": {slot: max(disk[slot], gpu.get(slot, 0), host.get(slot, 0)) for slot in disk}}
    tried = draw(st.frozensets(st.sampled_from([f"r{slot}" for slot in SLOTS]), max_size=1))
    return Question(TOKENS, gpu, below, readable=draw(extents), tried=tried)


def price_of(source: str, reported: Mapping[str, float]) -> float:
    return min(1.0, RATE / (reported.get(source) or TOKENS_PER_S[source]))


def token_by_token(question: Question, candidate: Candidate, pulled: float) -> float:
    """The cheapest way to come by each token."""
    reach = {source: question.below[source].get(candidate.slot, 0) for source in question.below} | {PULL: pulled}
    total = 0.0
    for token in range(int(question.matched.get(candidate.slot, 0)), question.tokens):
        ways = [price_of(source, candidate.load_tokens_per_s) for source, reached in reach.items() if token < reached]
        total += min(1.0, *ways, 1.0)
    return max(1.0, total + (PULL_S * RATE if pulled else 0))


@given(questions(), candidates_of)
def test_every_token_comes_from_the_cheapest_source_that_has_it(
    question: Question, candidates: tuple[Candidate, ...]
) -> None:
    add_pulls(question, candidates, [RATE] * len(candidates))
    for candidate in candidates:
        pull = question.pulls.get(candidate.slot)
        expected = token_by_token(question, candidate, 0 if pull is None else pull.tokens)
        assert uncached_tokens(question, candidate, RATE) == pytest.approx(expected)
        assert expected <= token_by_token(question, candidate, 0)


@given(questions(), candidates_of)
def test_nobody_reads_from_a_replica_that_cannot_be_read(question: Question, candidates: tuple[Candidate, ...]) -> None:
    add_pulls(question, candidates, [RATE] * len(candidates))
    by_name = {one.name: one for one in candidates}
    for slot, pull in question.pulls.items():
        reader = candidates[slot]
        assert reader.kv_read and reader.kv_layout
        assert 1 <= len(pull.neighbours) <= MAX_NEIGHBOURS
        assert pull.tokens == pull.neighbours[0].tokens >= pull.neighbours[-1].tokens
        in_memory = max(question.matched.get(slot, 0), question.below["CPU"].get(slot, 0))
        for neighbour in pull.neighbours:
            source = by_name[neighbour.name]
            assert source is not reader and source.unavailable is None and source.name not in question.tried
            assert neighbour.endpoint == source.kv_read != "" and source.kv_layout == reader.kv_layout
            assert in_memory + LEAST_PULLED_TOKENS <= neighbour.tokens == question.readable[source.slot]


@given(questions(), candidates_of, st.sampled_from([*OWN_SOURCES, PULL]), st.floats(1, 100))
def test_a_cheaper_source_never_makes_a_replica_dearer(
    question: Question, candidates: tuple[Candidate, ...], source: str, faster: float
) -> None:
    def costs() -> list[float]:
        add_pulls(question, candidates, [RATE] * len(candidates))
        return weigh(question, candidates, [RATE] * len(candidates), [None] * len(candidates))

    before = costs()
    for one in candidates:
        before_rate = one.load_tokens_per_s.get(source) or TOKENS_PER_S[source]
        one.load_tokens_per_s = {**one.load_tokens_per_s, source: before_rate * faster}
    assert all(after <= cost + 1e-9 for after, cost in zip(costs(), before, strict=True))


@given(st.sampled_from(sorted(POLICIES)), questions(), candidates_of)
def test_the_portions_of_a_prompt_are_all_of_it(
    policy: str, question: Question, candidates: tuple[Candidate, ...]
) -> None:
    decision = choose(policy, question, candidates, random.Random(0))
    for index, verdict in enumerate(list(decision.verdicts())):
        assert sum(portion.tokens for portion in verdict.portions) == TOKENS
        assert verdict.portions[-1].source == "COMPUTE" and verdict.portions[-1].tokens >= 1
        assert verdict.ttft_s is not None
        seconds = sum(portion.seconds for portion in verdict.portions)
        assert seconds == pytest.approx(verdict.ttft_s - decision.ahead(index) / decision.rates[index], abs=1 / RATE)
        pulled = [portion for portion in verdict.portions if portion.source == PULL]
        assert bool(pulled) == (verdict.name in {f"r{slot}" for slot in question.pulls})
    if decision.chosen is not None and decision.neighbours:
        assert decision.chosen.name not in {neighbour.name for neighbour in decision.neighbours}
