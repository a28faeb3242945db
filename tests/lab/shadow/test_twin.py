"""The watched requests in virtual time, twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lab.shadow.placing import Record
from lab.shadow.replicas import Followed
from lab.shadow.twin import SEEDS, Side, Speeds, Twin, cases_of, fitted_pace, trace_of, twin_of
from tests.lab.shadow.records import BLOCK, record

SPEEDS = Speeds(
    capacity_tokens=64 * BLOCK,
    prefill_tokens_per_s=1000.0,
    pace_tokens_per_s=1000.0,
    decode_tokens_per_s=100.0,
    output_tokens=4,
)
SPREAD_S = 10.0  # between requests: no queue


def followed(*names: str, model: str = "m") -> list[Followed]:
    return [Followed(name, (model,), True, None, 0, 0.0) for name in names]


def twin(records: list[Record], *replicas: str) -> Twin:
    cases, _ = cases_of(records, followed(*replicas), SPEEDS)
    return twin_of(cases, "cost")


def at(number: int, keys: list[int], replica: str | None, **more: object) -> Record:
    return record(keys, ts=1e9 + number * SPREAD_S, request_id=str(number), replica=replica, **more)


def test_a_shared_prefix_that_went_everywhere_would_have_been_computed_once() -> None:
    shared = list(range(1, 11))
    records = [at(number, [*shared, 100 + number], "ab"[number % 2]) for number in range(6)]
    found = twin(records, "a", "b")
    tokens, rest = 11 * BLOCK + 1, BLOCK + 1
    assert found.served.computed_tokens == 2 * tokens + 4 * rest
    assert [run.computed_tokens for run in found.placed] == [tokens + 5 * rest] * SEEDS
    assert found.served.tokens == 6 * tokens
    assert found.served.ttft_mean_s == pytest.approx(found.served.computed_tokens / 6 / 1000)
    assert found.mean.hit_share == pytest.approx(found.placed[0].hit_share)


def test_where_a_request_went_is_not_made_up() -> None:
    known = [at(number, [1, 2, 3, 100 + number], "a") for number in range(4)]
    unknown = [at(number, [1, 2, 3, 200 + number], place) for number, place in enumerate((None, "gone"))]
    found = twin([*known, *unknown], "a", "b")
    assert found == twin(known, "a", "b")
    assert found.served.computed_tokens == found.placed[0].computed_tokens, "warmroute gains nothing over itself"
    assert twin(unknown, "a", "b").served == Side()


def test_requests_that_cannot_be_simulated_are_counted() -> None:
    too_long = at(1, list(range(100)), "a")
    other_size = at(2, [7], "a", block_tokens=2 * BLOCK)
    elsewhere = at(3, [8], "a", model="other")
    records = [at(0, [1], "a"), at(4, [2], "a"), too_long, other_size, elsewhere]
    [case], left_out = cases_of(records, followed("a"), SPEEDS)
    assert ([record.request_id for record in case.records], left_out) == (["0", "4"], 3)
    assert cases_of([], followed("a"), SPEEDS) == ([], 0)
    assert twin_of([], "cost").mean == Side()


@pytest.mark.parametrize("times", [0.2, 0.9, 7.0])
def test_the_pace_is_fitted_to_the_measured_times(times: float) -> None:
    records = [at(number, [1 + number // 3, 100 + number], "a") for number in range(9)]
    cases, _ = cases_of(records, followed("a"), SPEEDS)
    measured_s = twin_of(cases, "cost").served.ttft_mean_s * times
    assert fitted_pace(cases, 1000.0, measured_s) == pytest.approx(1000.0 / times, rel=0.01)


def test_prompts_without_tokens_are_simulated_by_their_bytes() -> None:
    records = [at(number, [1, 2, 3], "ab"[number % 2], block_tokens=0, tokens=200, exact=False) for number in range(4)]
    found = twin(records, "a", "b")
    assert found.served.requests == 4
    assert found.placed[0].computed_tokens < found.served.computed_tokens


def test_the_pace_is_fitted_with_larger_blocks_that_still_fit_into_the_cache() -> None:
    speeds = replace(SPEEDS, capacity_tokens=1000 * BLOCK)
    records = [at(number, [*range(1, 900), 1000 + number], "a") for number in range(5)]
    [case], _ = cases_of(records, followed("a"), speeds)
    measured_s = twin_of([case], "cost").served.ttft_mean_s
    assert fitted_pace([case], 2000.0, measured_s) == pytest.approx(1000.0, rel=0.05)
    [full], _ = cases_of([at(0, list(range(999)), "a")], followed("a"), speeds)
    assert fitted_pace([full], 1000.0, 999 * BLOCK / 1000) == pytest.approx(1000.0, rel=0.05)


def test_a_trace_says_where_each_request_went() -> None:
    trace = trace_of([at(0, [1], "b"), at(1, [1], "a"), at(2, [1], "b")], ["a", "b"], BLOCK, 4)
    assert [request.replica for request in trace.requests] == [1, 0, 1]
    assert [request.at_s for request in trace.requests] == [0.0, SPREAD_S, 2 * SPREAD_S]
    assert len({request.blocks[-1] for request in trace.requests}) == 3, "a block that is not full is nobody else's"


# Every replica that a request may have gone to, prompts from a small tree: what is computed twice is computed wrongly.
@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=4), st.sampled_from(["a", "b", None])), max_size=12))
def test_both_runs_have_the_same_requests_and_compute_each_at_least_in_part(
    asked: list[tuple[list[int], str | None]],
) -> None:
    paths: dict[tuple[int, ...], int] = {}
    records = []
    for number, (path, replica) in enumerate(asked):
        keys = [paths.setdefault(tuple(path[: end + 1]), 1 + len(paths)) for end in range(len(path))]
        records.append(at(number, keys, replica))
    found = twin(records, "a", "b")
    records = [one for one in records if one.replica is not None]
    assert {side.requests for side in (found.served, *found.placed)} == {len(records)}
    assert {side.tokens for side in (found.served, *found.placed)} == {sum(one.tokens for one in records)}
    for side in (found.served, *found.placed):
        assert len(records) <= side.computed_tokens <= side.tokens
