"""Changing a trace's pace or block size changes nothing else."""

import pytest

from api.process.settings import Unusable
from lab.trace.requests import Trace, TraceRequest, at_rate, coarsened, jittered
from tests.lab.traffic import conversations

TRACE = conversations(200)


def test_coarse_blocks_are_as_many_as_their_size_says_and_share_what_was_shared_whole() -> None:
    requests = [TraceRequest(0.0, 70, 1, (1, 2, 3, 4, 5)), TraceRequest(1.0, 64, 1, (1, 2, 3, 9))]
    coarse = coarsened(Trace("t", 16, requests), 2)
    assert coarse.block_tokens == 32
    first, second = (request.blocks for request in coarse.requests)
    assert len(first) == 3 and len(second) == 2
    assert first[0] == second[0] and first[1] != second[1]


def test_requests_that_all_come_at_once_have_no_pace() -> None:
    with pytest.raises(Unusable, match="at once"):
        at_rate(Trace("t", 16, [TraceRequest(0.0, 5, 1, (1,))]), 1.0)


def test_jitter_delays_by_no_more_than_it_says_and_the_same_for_the_same_seed() -> None:
    moved = jittered(TRACE, 0.5, seed=1)
    assert moved.requests == jittered(TRACE, 0.5, seed=1).requests != jittered(TRACE, 0.5, seed=2).requests
    assert [request.at_s for request in moved.requests] == sorted(request.at_s for request in moved.requests)
    was = {request.blocks: request.at_s for request in TRACE.requests}
    assert all(0 <= request.at_s - was[request.blocks] <= 0.5 for request in moved.requests)
