import random

from hypothesis import given
from hypothesis import strategies as st

from router.placement.cost import INFINITE, obstacles
from router.placement.policy import POLICIES, Candidate, Question, Ring, choose

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
        may_try_anyway=st.booleans(),
    ),
    max_size=6,
)
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
    for slot, candidate in enumerate(candidates):
        candidate.name, candidate.slot = f"r{slot}", slot
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
