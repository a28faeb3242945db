"""Counts, block sizes and orders of small traces, checked by hand."""

from msgspec.structs import replace

from lab.analysis.accesses import accesses_of, sharing_of
from lab.analysis.curve import curve_of, segments_of
from lab.trace.formats import beginnings_named
from lab.trace.requests import Trace, TraceRequest
from tests.lab.traffic import conversations


def trace(*blocks: tuple[int, ...], rest: int = 1) -> Trace:
    """Blocks of 4 tokens, and `rest` more in each prompt."""
    made = [
        TraceRequest(float(at), len(each) * 4 + rest, 1, (*each, *((-1 - at,) if rest else ())))
        for at, each in enumerate(blocks)
    ]
    return Trace("small", 4, made)


def test_blocks_are_counted_by_their_uses() -> None:
    found = sharing_of(accesses_of(trace((1, 2, 3), (1, 2, 4), (9,), (1, 2, 3, 5))))
    assert (found.requests, found.input_tokens, found.blocks) == (4, 48, 11)
    assert (found.unique_blocks, found.shared_blocks, found.reusable_blocks) == (6, 3, 5)
    assert (found.saved_tokens, found.hit_rate) == (20, 20 / 48)
    assert (found.shared_prefix_tokens, found.sharing_requests, found.longest_blocks) == (5.0, 2, 5)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    found = sharing_of(accesses_of(trace((1, 2), (1, 2), rest=0)))
    assert (found.blocks, found.reusable_blocks, found.saved_tokens) == (4, 2, 4)


def test_a_prompt_shorter_than_a_block_has_none() -> None:
    short = Trace("t", 4, [TraceRequest(0.0, 3, 1, (1,))])
    found = sharing_of(accesses_of(short))
    assert (found.blocks, found.hit_rate) == (0, 0.0)
    assert curve_of(accesses_of(short)).hit_rate(1000) == 0.0
    assert curve_of(accesses_of(short)).needed(0.9) == 1


def test_numbers_that_do_not_name_what_is_before_them_are_named_again() -> None:
    """5 after 1 is not 5 after 2, and 7 twice in one prompt are two blocks."""
    given = trace((1, 5), (2, 5), (1, 5), (7, 7))
    accesses = accesses_of(replace(given, requests=beginnings_named(given.requests)))
    assert accesses.unique == 6
    assert sharing_of(accesses).reusable_blocks == 2


def test_keys_of_any_size_are_numbers() -> None:
    accesses = accesses_of(trace((2**64 - 1, -(2**64)), (2**64 - 1, 3)))
    assert accesses.numbers.tolist() == [0, 1, 0, 2]


def test_two_conversations_by_turns_need_both_in_the_cache() -> None:
    curve = curve_of(accesses_of(trace((1, 2), (8, 9), (1, 2, 3), (8, 9, 10))))
    assert curve.hits.tolist() == [0, 0, 0, 1, 3, 4, 4]
    assert curve.begun_blocks == 1, "where the unfinished end of a prompt is computed"
    assert [curve.needed(share) for share in (0.25, 0.5, 0.75, 1.0)] == [4, 5, 5, 6]
    assert curve.hit_rate(6) == curve.hit_rate(curve.most_blocks) == 16 / 44
    assert curve.hit_rate(3) == curve.hit_rate(0) == 0.0


def test_the_cost_is_one_of_segments_and_not_of_blocks() -> None:
    accesses = accesses_of(conversations(2000, block_tokens=64))
    assert len(segments_of(accesses).lengths) * 20 < len(accesses.numbers)
