"""A trace that is too short says so, and says what would be enough."""

from msgspec.structs import replace

from lab.trace.requests import FEW_REQUESTS, WIDE, Trace, TraceRequest, estimated, found_tokens, too_short
from tests.lab.traffic import agents, conversations, unshared


def beginning(trace: Trace, requests: int) -> Trace:
    return replace(trace, requests=trace.requests[:requests])


def test_a_cache_without_end_finds_full_blocks_but_never_the_last_token() -> None:
    asked = [(40, (1, 2, 3)), (40, (1, 2, 4)), (32, (1, 2)), (20, (1, 9)), (20, (5, 2))]
    trace = Trace("t", 16, [TraceRequest(0.0, tokens, 1, blocks) for tokens, blocks in asked])
    assert found_tokens(trace) == [0, 32, 16, 16, 0]
    assert estimated(trace).hit_rate == 64 / 152


def test_few_requests_are_too_few_even_if_all_are_alike() -> None:
    trace = unshared(FEW_REQUESTS)
    assert too_short(trace) is None
    said = too_short(beginning(trace, FEW_REQUESTS - 1))
    assert said is not None and "its 999 requests a cache could find 0.0%" in said
    assert said.endswith("at least 1,000 requests like these would be enough")


def test_requests_that_differ_much_need_more_of_them() -> None:
    trace = conversations(6000)
    short = estimated(beginning(trace, FEW_REQUESTS))
    assert short.half > WIDE and not short.is_enough
    assert FEW_REQUESTS < short.enough_requests < len(trace.requests)
    assert estimated(trace).is_enough


def test_the_interval_narrows_with_the_requests() -> None:
    trace = agents(4000)
    halves = [estimated(beginning(trace, count)).half for count in (100, 400, 4000)]
    assert halves == sorted(halves, reverse=True)
