"""Small traces whose prompts are paths of a tree, and the results of the simplest cache on them."""

from collections.abc import Sequence
from typing import TypeAlias

from hypothesis import strategies as st

from lab.trace.requests import Trace, TraceRequest

BLOCK_TOKENS = 4

Path: TypeAlias = tuple[int, ...]  # which branch is taken after each block

paths = st.lists(st.integers(0, 1), max_size=6).map(tuple)
rests = st.integers(0, BLOCK_TOKENS - 1)  # tokens after the last full block


def trace_of(prompts: Sequence[tuple[Path, int]]) -> Trace:
    """Trace of paths, each with its tokens after the last full block; an empty prompt gets one token."""
    numbers: dict[Path, int] = {}
    requests = []
    for at, (path, rest) in enumerate(prompts):
        full = [numbers.setdefault(path[: depth + 1], 100 + 7 * len(numbers)) for depth in range(len(path))]
        rest = rest or int(not path)
        begun = (-1 - at,) if rest else ()
        requests.append(TraceRequest(float(at), len(path) * BLOCK_TOKENS + rest, 1, (*full, *begun)))
    return Trace("tree", BLOCK_TOKENS, requests)


def traces(rests: st.SearchStrategy[int] = rests, most: int = 14) -> st.SearchStrategy[Trace]:
    return st.lists(st.tuples(paths, rests), min_size=1, max_size=most).map(trace_of)


def full_blocks(request: TraceRequest) -> Sequence[int]:
    return request.blocks[: request.input_tokens // BLOCK_TOKENS]


def found_by_a_list(trace: Trace, capacity: int) -> int:
    """Blocks found in a list of the `capacity` blocks used last, a prompt's first block counting as its latest use."""
    recent: list[int] = []
    found = 0
    for request in trace.requests:
        blocks, cached = full_blocks(request), set(recent[:capacity])
        run = 0
        while run < (request.input_tokens - 1) // BLOCK_TOKENS and blocks[run] in cached:
            run += 1
        found += run
        recent = [*blocks, *(block for block in recent if block not in blocks)]
    return found
