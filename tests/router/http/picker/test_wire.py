"""Protobuf messages of a gateway as our own, and replies as protobuf."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.picker import wire
from router.http.picker.stream import (
    Message,
    Mode,
    Mutation,
    Refusal,
    Reply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)
from router.http.picker.wire import CLASSES, MAX_BESIDE_BYTES, MESSAGES, ProcessingRequest

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


def test_the_first_message_tells_the_modes() -> None:
    told = request(request_headers=headers((":path", b"/")), protocol_config={"request_body_mode": 2})
    assert read(told) == RequestHeaders([(b":path", b"/")], False, Mode.BUFFERED, Mode.NONE)
    untold = read(request(request_headers=headers(("A", b"b"), end=True)))
    assert untold == RequestHeaders([(b"a", b"b")], True, Mode.FULL_DUPLEX_STREAMED, Mode.FULL_DUPLEX_STREAMED)


def test_other_messages() -> None:
    assert read(request(request_body={"body": b"x", "end_of_stream": True})) == RequestBody(b"x", True)
    assert read(request(request_trailers={})) == RequestTrailers()
    assert read(request(response_body={"body": b"x"})) == ResponseBody(b"x")
    assert read(request(response_trailers={})) == ResponseTrailers()
    answer = read(request(response_headers=headers((":status", b"200"), ("a", b"b"))))
    assert answer == ResponseHeaders(200, [(b"a", b"b")])


def test_the_endpoint_that_was_served() -> None:
    answer = request(response_headers=headers((":status", b"200")))
    told = {"x-gateway-destination-endpoint-served": "10.0.0.1:80", "other": 1}
    told_by = read(with_metadata(with_metadata(answer, "other", {}), "envoy.lb", told))
    assert isinstance(told_by, ResponseHeaders) and told_by.served == "10.0.0.1:80"


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


def test_no_more_headers_are_read_than_a_refusal_takes() -> None:
    many = read(request(request_headers=headers(*((f"x-{number}", b"") for number in range(5000)))))
    assert isinstance(many, RequestHeaders) and len(many.headers) == wire.MAX_READ
    with pytest.raises(ValueError, match="5,000 trailers; at most 1,000"):
        read(request(request_trailers={"trailers": headers(*((f"x-{n}", b"") for n in range(5000)))["headers"]}))


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


@pytest.mark.parametrize(
    ("field", "why"),
    [
        (b"\x22\x00", "bytes beside a body"),  # an empty body, again and again
        (b"\x08\x01", "bytes beside a body"),
        (b"\x09" + bytes(8), "bytes beside a body"),
        (b"\x0d" + bytes(4), "bytes beside a body"),
        (b"\x0b", "wire type 3"),
        (b"\xff" * 16, "number without an end"),
    ],
)
def test_a_large_message_of_small_fields_is_refused_before_it_is_decoded(field: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        wire.read(field * (MAX_BESIDE_BYTES + 1))


@given(st.lists(st.sampled_from([b"\x22\x03abc", b"\x08\x01", b"\x22", b"\xff", b"\x09", bytes(9)]), max_size=40))
def test_sizes_of_any_bytes_are_read_or_refused(pieces: list[bytes]) -> None:
    with suppress(ValueError):
        wire.read(b"".join(pieces) + bytes(MAX_BESIDE_BYTES))


def test_an_empty_message_is_refused() -> None:
    with pytest.raises(ValueError, match="neither headers nor a body"):
        read(request())


def test_a_reply_with_a_choice() -> None:
    mutation = Mutation([(b"a", b"1"), (b"a", b"2")], [b"b"])
    written = wire.written(Reply("request_headers", mutation, "10.0.0.1:80"))
    common = written.request_headers.response
    actions = [(one.header.key, one.header.raw_value, one.append_action) for one in common.header_mutation.set_headers]
    assert actions == [("a", b"1", wire.OVERWRITE), ("a", b"2", wire.APPEND)]
    assert list(common.header_mutation.remove_headers) == ["b"]
    assert common.clear_route_cache
    found = dict(written.dynamic_metadata["envoy.lb"])
    assert found == {"x-gateway-destination-endpoint": "10.0.0.1:80"}


def test_replies_that_change_nothing_are_there_all_the_same() -> None:
    for about in ("request_headers", "response_headers", "request_body", "response_body", "request_trailers"):
        assert [field.name for field, _ in wire.written(Reply(about)).ListFields()] == [about]


def test_a_reply_may_remove_trailers() -> None:
    written = wire.written(Reply("request_trailers", Mutation((), (b"a", b"b"))))
    assert list(written.request_trailers.header_mutation.remove_headers) == ["a", "b"]


def test_a_refusal_is_an_answer() -> None:
    immediate = wire.written(Refusal(503, [(b"retry-after", b"1")], b"{}")).immediate_response
    assert (immediate.status.code, immediate.body) == (503, b"{}")
    assert [one.header.key for one in immediate.headers.set_headers] == ["retry-after"]


def test_fields_are_numbered_once() -> None:
    for name, fields in MESSAGES.items():
        numbers = [number for number, _ in fields.values()]
        assert len(numbers) == len(set(numbers)), name
        assert set(CLASSES[name].DESCRIPTOR.fields_by_name) == set(fields)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    with suppress(ValueError):
        wire.read(raw)
