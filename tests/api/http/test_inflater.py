"""Compressed bodies: the same bytes in any pieces, bounded slices, and no doubt about where a body ends."""

import gzip
import zlib
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import ApiError
from api.http.bodies import SLICE_BYTES, Inflater, inflated, inflater_for

BODY = b'{"model":"m","prompt":"hi"}'
PACKED = gzip.compress(BODY, mtime=0)  # tests are named by it
MEGABYTE = 1024 * 1024


def slices(*pieces: bytes) -> list[bytes]:
    inflater, taken = Inflater(), []
    for piece in pieces:
        inflater.feed(piece)
        while inflater.waiting_bytes:
            taken.append(inflater.take())
    inflater.finish()
    return taken


@given(st.binary(max_size=3000), st.integers(1, 9), st.lists(st.integers(0, 3000), max_size=5))
def test_a_body_is_the_same_in_any_pieces(body: bytes, level: int, cuts: list[int]) -> None:
    packed = gzip.compress(body, level)
    ends = [0, *sorted(min(cut, len(packed)) for cut in cuts), len(packed)]
    pieces = [packed[start:end] for start, end in pairwise(ends)]
    assert b"".join(slices(*pieces)) == body


def test_no_slice_is_larger_than_the_limit() -> None:
    bomb = gzip.compress(bytes(64 * MEGABYTE))
    assert len(bomb) < 80 * 1024
    taken = slices(bomb)
    assert sum(map(len, taken)) == 64 * MEGABYTE
    assert max(map(len, taken)) <= SLICE_BYTES


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (PACKED[:-1], "cut short"),
        (b"", "cut short"),
        (PACKED + b"x", "more bytes follow"),
        (PACKED + PACKED, "more bytes follow"),
        (BODY, "cannot be inflated"),
        (zlib.compress(BODY), "cannot be inflated"),
        (PACKED[:-8] + bytes(8), "cannot be inflated"),
    ],
)
def test_what_is_no_whole_gzip_stream_is_refused(packed: bytes, why: str) -> None:
    for pieces in ([packed], [packed[at : at + 1] for at in range(len(packed))]):
        with pytest.raises(ApiError, match=why) as caught:
            slices(*pieces)
        assert caught.value.status == 400


@pytest.mark.parametrize("coding", [b"br", b"deflate", b"gzip, gzip", b"zstd"])
def test_other_codings_are_refused_by_name(coding: bytes) -> None:
    with pytest.raises(ApiError, match="send gzip, or the body as it is") as caught:
        inflater_for([(b"content-encoding", coding)])
    assert (caught.value.status, caught.value.headers) == (415, {"Accept-Encoding": "gzip"})
    assert f'"{coding.decode()}"' in caught.value.message


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ([], BODY),
        ([(b"content-encoding", b"identity")], BODY),
        ([(b"content-encoding", b"GZIP")], PACKED),
        ([(b"content-encoding", b"x-gzip")], PACKED),
    ],
)
async def test_pieces_are_as_they_were_before(headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield body[:5]
        yield body[5:]

    assert b"".join([piece async for piece in inflated(headers, pieces())]) == BODY
