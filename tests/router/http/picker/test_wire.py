"""Protobuf messages of a gateway as our own, and replies as protobuf."""

from typing import Any

import pytest

from router.http.picker import wire
from router.http.picker.stream import (
    Message,
    Mutation,
    Reply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
)
from router.http.picker.wire import MAX_BESIDE_BYTES, ProcessingRequest, ProcessingResponse

SUBSET, KEY = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"


def read(message: Any) -> Message:
    return wire.read(message.SerializeToString())


def request(**fields: object) -> ProcessingRequest:
    return ProcessingRequest(**fields)


def headers(*pairs: tuple[str, bytes], end: bool = False) -> dict[str, object]:
    listed = [{"key": name, "raw_value": value} for name, value in pairs]
    return {"headers": {"headers": listed}, "end_of_stream": end}


def with_metadata(message: ProcessingRequest, namespace: str, fields: dict[str, object]) -> ProcessingRequest:
    entry = message.metadata_context.filter_metadata.add(key=namespace)
    entry.value.update(fields)
    return message


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["10.0.0.1:80", "10.0.0.2:80"], {"10.0.0.1:80", "10.0.0.2:80"}),
        ("10.0.0.1:80, 10.0.0.2:80,", {"10.0.0.1:80", "10.0.0.2:80"}),
        (["10.0.0.1:80,10.0.0.2:80", 7, None, []], {"10.0.0.1:80", "10.0.0.2:80"}),
        ([], set()),
        ("", set()),
        (7, set()),
        (None, set()),
        ({"a": "10.0.0.1:80"}, set()),
    ],
)
def test_a_subset_is_a_list_or_text(value: object, expected: set[str]) -> None:
    hinted = read(with_metadata(request(request_headers=headers()), SUBSET, {KEY: value}))
    assert isinstance(hinted, RequestHeaders) and hinted.subset == frozenset(expected)
    without = read(with_metadata(request(request_headers=headers()), SUBSET, {"other": value}))
    assert isinstance(without, RequestHeaders) and without.subset is None


@pytest.mark.parametrize("status", [b"", b"20", b"2000", b"abc", b"-12", b"600", b"099", b"\xb2\xb2\xb2"])
def test_an_answer_without_a_status_is_refused(status: bytes) -> None:
    with pytest.raises(ValueError, match="must be a number of three digits"):
        read(request(response_headers=headers((":status", status))))


@pytest.mark.parametrize("pair", [("a", b"b\r\nc: d"), ("a", b"\0")])
def test_a_header_that_would_become_two_is_refused(pair: tuple[str, bytes]) -> None:
    with pytest.raises(ValueError, match="line break"):
        read(request(request_headers=headers(pair)))


@pytest.mark.parametrize("name", ["", "a\nb", "x-data-parallel-rank: 3", "a b", "\u212a", ":", "::path"])
def test_a_header_without_a_proper_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a header"):
        read(request(request_headers=headers((name, b"x"))))


def test_too_many_headers_or_trailers_are_refused() -> None:
    many = headers(*((f"x-{number}", b"") for number in range(5000)))
    for message in (request(request_headers=many), request(request_trailers={"trailers": many["headers"]})):
        with pytest.raises(ValueError, match="5,000 headers; at most 1,000"):
            read(message)


def test_trailers_are_known_by_their_names() -> None:
    listed = headers(("A", b"1"), ("b", b""), ("a", b"2"))["headers"]
    assert read(request(request_trailers={"trailers": listed})) == RequestTrailers((b"a", b"b"))


def test_only_a_body_makes_a_message_large() -> None:
    body = bytes(MAX_BESIDE_BYTES + 1)
    assert read(request(request_body={"body": body})) == RequestBody(body)
    assert read(request(response_body={"body": body, "end_of_stream": True})) == ResponseBody(body, True)
    for large in (
        request(request_headers=headers(("a", body.replace(b"\0", b"x")))),
        with_metadata(request(request_body={"body": body}), "any", {"any": body.decode()}),
        request(request_headers={"headers": {"headers": [{}] * (MAX_BESIDE_BYTES // 2)}}),
    ):
        with pytest.raises(ValueError, match="more than 262,144 bytes beside a body"):
            read(large)


FIELDS = [
    b"\x22\x00",
    b"\x08\x01",
    b"\x09" + bytes(8),
    b"\x0d" + bytes(4),
    b"\x0b",
    b"\xff" * 16,
]  # an empty body first


@pytest.mark.parametrize("field", FIELDS)
def test_a_large_message_of_small_fields_is_refused_before_it_is_decoded(field: bytes) -> None:
    with pytest.raises(ValueError, match="bytes beside a body"):
        wire.read(field * (MAX_BESIDE_BYTES + 1))


@pytest.mark.parametrize("size", [b"\xff" * 5, b"\xff" * 4 + b"\x07", b"\xff\xff\xff\x7f", b"\xff" * 9 + b"\1"])
def test_a_body_that_claims_more_bytes_than_came_is_not_decoded(size: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be decoded"):
        wire.read(b"\x22" + size + b"\x12\x00" * MAX_BESIDE_BYTES)


def test_a_reply_with_a_choice() -> None:
    mutation = Mutation([(b"a", b"1"), (b"a", b"2")], [b"b"])
    written = ProcessingResponse.FromString(wire.written(Reply("request_headers", mutation, "10.0.0.1:80")))
    common = written.request_headers.response
    actions = [(one.header.key, one.header.raw_value, one.append_action) for one in common.header_mutation.set_headers]
    assert actions == [("a", b"1", wire.OVERWRITE), ("a", b"2", wire.APPEND)]
    assert list(common.header_mutation.remove_headers) == ["b"]
    assert common.clear_route_cache
    found = dict(written.dynamic_metadata["envoy.lb"])
    assert found == {"x-gateway-destination-endpoint": "10.0.0.1:80"}
