import struct
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import ApiError
from api.native import Frame, FrameReader, KvSource, Native, encode_frame, envelope, pack_ids, unpack_ids, unwrap

TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=20)
FRAMES = st.lists(st.tuples(st.integers(0, 127), TOKEN_IDS, st.binary(max_size=50)), max_size=8)


@given(prompt=TOKEN_IDS, resumed=TOKEN_IDS, body=st.binary(max_size=100))
def test_a_wrapped_request_comes_out_as_it_went_in(prompt: list[int], resumed: list[int], body: bytes) -> None:
    native = Native(
        prompts=[pack_ids(prompt)],
        resume_token_ids=[pack_ids(resumed), b""],
        response_id="cmpl-1",
        created=1,
        seed=-(2**63),
        priority=-1.5,
        cache_salt="tenant",
        kv_sources=[KvSource("tcp://10.0.0.1:5000", 4096), KvSource("tcp://[fd00::1]:5000", 16)],
    )
    assert unwrap(envelope(native) + body) == (native, body)
    assert unpack_ids(native.prompts[0]) == prompt


@given(body=st.binary(max_size=60) | st.binary(max_size=40).map(lambda header: struct.pack("<I", len(header)) + header))
def test_any_bytes_are_unwrapped_or_refused(body: bytes) -> None:
    with suppress(ApiError):
        native, rest = unwrap(body)
        assert unwrap(envelope(native) + rest) == (native, rest)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"prompts": [b"\0" * 5]}, "prompts[0] has 5 bytes"),
        ({"resume_token_ids": [b"", b"\0"]}, "resume_token_ids[1] has 1 bytes"),
        ({"priority": float("nan")}, "priority is nan"),
        ({"priority": float("inf")}, "priority is inf"),
        ({"seed": 2**63}, "seed"),
        ({"kv_sources": [{"endpoint": "tcp://a:1", "tokens": 1}] * 3}, "kv_sources"),
        ({"kv_sources": [{"endpoint": "tcp://a:1", "tokens": 0}]}, "tokens"),
        ({"kv_sources": [{"endpoint": "tcp://a:1", "tokens": 2**31}]}, "tokens"),
        ({"kv_sources": [{"endpoint": "ipc:///run/a", "tokens": 1}]}, "endpoint"),
        ({"kv_sources": [{"endpoint": "tcp://a:1\n", "tokens": 1}]}, "endpoint"),
        ({"kv_sources": [{"endpoint": "x\ntcp://a:1", "tokens": 1}]}, "endpoint"),
        ({"kv_sources": [{"endpoint": "tcp://" + "a" * 256 + ":1", "tokens": 1}]}, "endpoint"),
        ({"kv_sources": [{"endpoint": "tcp://a:1"}]}, "tokens"),
        ({"prompts": [[1]]}, "prompts"),
        ([], "expected `object`"),
    ],
)
def test_a_malformed_header_is_refused(header: object, says: str) -> None:
    encoded = msgspec.msgpack.encode(header)
    with pytest.raises(ApiError, check=lambda error: error.status == 400 and says.lower() in error.message.lower()):
        unwrap(struct.pack("<I", len(encoded)) + encoded + b"{}")


def test_a_header_that_ends_behind_the_body_is_refused() -> None:
    with pytest.raises(ApiError, match="ends at byte 104; the body has 6"):
        unwrap(struct.pack("<I", 100) + b"ab")


def test_a_nested_header_is_refused() -> None:
    deep = b"\x81\xa7prompts" + b"\x91" * 100_000
    with pytest.raises(ApiError):
        unwrap(struct.pack("<I", len(deep)) + deep)


@given(frames=FRAMES, size=st.integers(1, 40))
def test_frames_survive_any_cut(frames: list[tuple[int, list[int], bytes]], size: int) -> None:
    stream = b"".join(encode_frame(*frame) for frame in frames)
    reader = FrameReader()
    read = [frame for start in range(0, len(stream), size) for frame in reader.feed(stream[start : start + size])]
    assert [(frame.index, frame.token_ids, frame.payload) for frame in read] == frames
    assert reader.pending_bytes == 0


def test_a_frame_that_is_cut_short_shows() -> None:
    reader = FrameReader()
    assert reader.feed(encode_frame(0, [1], b"payload")[:-1]) == []
    assert reader.pending_bytes == 22
    assert reader.feed(b"d") == [Frame(0, pack_ids([1]), b"payload")]


def test_a_frame_beyond_the_limit_is_refused_at_its_head() -> None:
    with pytest.raises(ValueError, match="a frame of 1012 bytes; at most 100"):
        FrameReader(max_frame_bytes=100).feed(struct.pack("<III", 0, 0, 1000))


def test_a_frame_is_laid_out_as_documented() -> None:
    head = b"\x01\0\0\0" + b"\x02\0\0\0" + b"\x03\0\0\0"
    assert encode_frame(1, [7, 2**32 - 1], b"abc") == head + b"\x07\0\0\0\xff\xff\xff\xff" + b"abc"
