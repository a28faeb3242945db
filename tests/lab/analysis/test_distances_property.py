"""Stack distances against a list of blocks for every size of cache, and against the engine's own pool."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lab.analysis.accesses import accesses_of
from lab.analysis.curve import curve_of, hits_by_capacity, smaller_before
from lab.trace.requests import Trace
from replica.cache.block_pool import BlockPool
from replica.cache.chain import Chain
from tests.lab.analysis.trees import BLOCK_TOKENS, found_by_a_list, full_blocks, traces


def found_by_the_pool(trace: Trace, capacity: int) -> int:
    """One request at a time, as the engine does it: match, take, store, release."""
    pool = BlockPool(capacity, BLOCK_TOKENS, events=False)
    found = 0
    for at, request in enumerate(trace.requests):
        tokens = [token for block in full_blocks(request) for token in [block] * BLOCK_TOKENS]
        tokens += [10**6 + at] * (request.input_tokens - len(tokens))
        chain = Chain(tokens, BLOCK_TOKENS, "model")
        match = pool.match(chain)
        blocks = pool.take(match.blocks, len(request.blocks) - len(match.blocks))
        assert blocks is not None
        chain.named, chain.identity = len(match.blocks), match.identity
        pool.store(chain, blocks, len(full_blocks(request)))
        pool.release(blocks)
        found += len(match.blocks)
    return found


@given(traces())
def test_every_size_of_cache_finds_what_a_list_of_recent_blocks_does(trace: Trace) -> None:
    hits = hits_by_capacity(accesses_of(trace))
    assert hits.tolist() == [found_by_a_list(trace, capacity) for capacity in range(len(hits))]
    assert found_by_a_list(trace, len(hits) + 5) == hits[-1]


@given(traces(st.integers(1, BLOCK_TOKENS - 1)))
def test_the_curve_is_that_of_the_engines_pool(trace: Trace) -> None:
    curve = curve_of(accesses_of(trace))
    longest = max(len(request.blocks) for request in trace.requests)
    for capacity in range(longest, curve.most_blocks + 2):
        found = found_by_the_pool(trace, capacity) * BLOCK_TOKENS
        assert curve.hit_rate(capacity) == found / trace.input_tokens, capacity


@given(traces())
def test_where_some_prompts_fill_their_last_block_the_pool_is_within_one_block(trace: Trace) -> None:
    """All but those that end with a block that is cached: the pool keeps a second copy of it for a while."""
    seen: set[int] = set()
    kept = []
    for request in trace.requests:
        full = full_blocks(request)
        if request.input_tokens % BLOCK_TOKENS or full[-1] not in seen:
            kept.append(request)
            seen.update(full)
    trace = Trace(trace.name, trace.block_tokens, kept)
    curve = curve_of(accesses_of(trace))
    for capacity in range(max(len(request.blocks) for request in kept), curve.most_blocks + 2):
        found = found_by_the_pool(trace, capacity) * BLOCK_TOKENS / trace.input_tokens
        assert curve.hit_rate(capacity) <= found <= curve.hit_rate(capacity + 1)


@given(st.lists(st.tuples(st.integers(-1, 6), st.integers(0, 9)), max_size=40))
def test_smaller_elements_to_the_left_are_added_up(elements: list[tuple[int, int]]) -> None:
    values = np.array([value for value, _ in elements], np.int64)
    weights = np.array([weight for _, weight in elements], np.int64)
    expected = [
        sum(weight for before, weight in elements[:at] if before <= value) for at, (value, _) in enumerate(elements)
    ]
    assert smaller_before(values, weights).tolist() == expected
