import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from replica.disk.record import GROUP_SLOTS, MAX_IDENTITY, PAGE, FileLayout, Header, Record, file_fingerprint

LAYOUT = FileLayout(block_size=2, payload_bytes=5000)
GENERATION = 77
identities = st.integers(1, MAX_IDENTITY - 1)
digests = st.binary(min_size=16, max_size=16)
exacts = st.none() | st.binary(max_size=LAYOUT.most_exact_bytes)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    identity = draw(identities)
    parent = draw(st.integers(0, identity - 1))
    tokens = draw(st.binary(min_size=8, max_size=8))
    return Header(Record(draw(st.integers(0, 2**64 - 1)), identity, parent, tokens, draw(exacts)), draw(digests))


def decoded(page: bytes, generation: int = GENERATION) -> Header | None:
    return LAYOUT.decode_header(memoryview(page), generation)


@given(header=headers())
def test_a_header_is_read_as_it_was_written(header: Header) -> None:
    page = LAYOUT.encode_header(header, GENERATION)
    assert len(page) == LAYOUT.header_bytes
    assert decoded(page) == header
    assert decoded(page, GENERATION + 1) is None


@given(header=headers(), place=st.integers(0, LAYOUT.header_bytes - 1), flipped=st.integers(1, 255))
def test_a_damaged_header_is_no_header(header: Header, place: int, flipped: int) -> None:
    page = bytearray(LAYOUT.encode_header(header, GENERATION))
    page[place] ^= flipped
    assert decoded(bytes(page)) is None


@pytest.mark.parametrize(
    ("identity", "parent"), [(0, 0), (5, 5), (5, 6), (-1, -2), (5, -1), (MAX_IDENTITY, 0), (2**63 - 1, 1)]
)
def test_a_header_with_impossible_identities_is_no_header(identity: int, parent: int) -> None:
    forged = LAYOUT.encode_header(Header(Record(1, identity, parent, bytes(8)), bytes(16)), GENERATION)
    assert decoded(forged) is None
    assert decoded(LAYOUT.encode_header(Header(Record(1, 6, 5, bytes(8)), bytes(16)), GENERATION)) is not None


@pytest.mark.parametrize("claimed", [-2, LAYOUT.most_exact_bytes + 1, 2**31 - 1, -(2**31)])
def test_a_header_that_claims_too_many_extra_keys_is_no_header(claimed: int) -> None:
    page = bytearray(LAYOUT.encode_header(Header(Record(1, 6, 5, bytes(8), b"x"), bytes(16)), GENERATION))
    place = 8 + 24 + 16
    assert int.from_bytes(page[place : place + 4], "little") == 1
    page[place : place + 4] = claimed.to_bytes(4, "little", signed=True)
    page[:8] = xxh3_64_intdigest(page[8:], GENERATION).to_bytes(8, "little")
    assert decoded(bytes(page)) is None


@pytest.mark.parametrize("record", [Record(1, 2, 0, bytes(4)), Record(1, 2, 0, bytes(8), bytes(5000))])
def test_a_record_that_does_not_fit_is_refused(record: Record) -> None:
    with pytest.raises(ValueError, match="bytes; a"):
        LAYOUT.encode_header(Header(record, bytes(16)), GENERATION)


@given(block_size=st.integers(1, 4096), payload_bytes=st.integers(1, 2**22), num_slots=st.integers(1, 3 * GROUP_SLOTS))
def test_nothing_overlaps(block_size: int, payload_bytes: int, num_slots: int) -> None:
    layout = FileLayout(block_size, payload_bytes)
    slots = range(num_slots)
    spans = [(0, PAGE)]
    spans += [(layout.header_offset(slot), layout.header_offset(slot) + layout.header_bytes) for slot in slots]
    spans += [(layout.payload_offset(slot), layout.payload_offset(slot) + payload_bytes) for slot in slots]
    spans.sort()
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    assert not any(layout.payload_offset(slot) % PAGE for slot in slots)
    assert spans[-1][1] <= layout.file_bytes(num_slots)


def test_a_head_is_read_as_it_was_written() -> None:
    head = file_fingerprint("layout", 2, 5000), GENERATION
    page = LAYOUT.encode_head(*head)
    assert len(page) == PAGE
    assert LAYOUT.generation_in(page, head[0]) == head[1]
    for other in (FileLayout(2, 5001), FileLayout(3, 5000)):
        assert other.generation_in(page, head[0]) is None
    for place in range(len(page.rstrip(b"\0"))):
        damaged = bytearray(page)
        damaged[place] ^= 1
        assert LAYOUT.generation_in(bytes(damaged), head[0]) is None
        assert LAYOUT.generation_in(page[:place], head[0]) is None
    assert LAYOUT.generation_in(os.urandom(PAGE), head[0]) is None
    assert LAYOUT.generation_in(page, bytes(16)) is None


def test_fingerprints_tell_layouts_apart() -> None:
    assert len({file_fingerprint(*parts) for parts in [("a", 16, 1), ("b", 16, 1), ("a", 32, 1), ("a", 16, 2)]}) == 4
