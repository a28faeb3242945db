"""Protobuf messages of a gateway as our own, and replies as protobuf."""

from contextlib import suppress

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from router.picker import wire
from router.picker.messages import (
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
from router.picker.schema import CLASSES, MESSAGES, ProcessingRequest

SUBSET, KEY = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"


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
    assert wire.read(told) == RequestHeaders([(b":path", b"/")], False, Mode.BUFFERED, Mode.NONE)
    untold = wire.read(request(request_headers=headers(("A", b"b"), end=True)))
    assert untold == RequestHeaders([(b"a", b"b")], True, Mode.FULL_DUPLEX_STREAMED, Mode.FULL_DUPLEX_STREAMED)


def test_other_messages() -> None:
    assert wire.read(request(request_body={"body": b"x", "end_of_stream": True})) == RequestBody(b"x", True)
    assert wire.read(request(request_trailers={})) == RequestTrailers()
    assert wire.read(request(response_body={"body": b"x"})) == ResponseBody(b"x")
    assert wire.read(request(response_trailers={})) == ResponseTrailers()
    answer = wire.read(request(response_headers=headers((":status", b"200"), ("a", b"b"))))
    assert answer == ResponseHeaders(200, [(b"a", b"b")])


def test_the_endpoint_that_was_served() -> None:
    answer = request(response_headers=headers((":status", b"200")))
    told = {"x-gateway-destination-endpoint-served": "10.0.0.1:80", "other": 1}
    read = wire.read(with_metadata(with_metadata(answer, "other", {}), "envoy.lb", told))
    assert isinstance(read, ResponseHeaders) and read.served == "10.0.0.1:80"


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
    read = wire.read(with_metadata(request(request_headers=headers()), SUBSET, {KEY: value}))
    assert isinstance(read, RequestHeaders) and read.subset == frozenset(expected)
    without = wire.read(with_metadata(request(request_headers=headers()), SUBSET, {"other": value}))
    assert isinstance(without, RequestHeaders) and without.subset is None


@pytest.mark.parametrize("status", [b"", b"20", b"2000", b"abc", b"-12", b"600", b"099", b"\xb2\xb2\xb2"])
def test_an_answer_without_a_status_is_refused(status: bytes) -> None:
    with pytest.raises(ValueError, match="must be a number of three digits"):
        wire.read(request(response_headers=headers((":status", status))))


@pytest.mark.parametrize("pair", [("a", b"b\r\nc: d"), ("a\nb", b""), ("a", b"\0")])
def test_a_header_that_would_become_two_is_refused(pair: tuple[str, bytes]) -> None:
    with pytest.raises(ValueError, match="line break"):
        wire.read(request(request_headers=headers(pair)))


def test_an_empty_message_is_refused() -> None:
    with pytest.raises(ValueError, match="neither headers nor a body"):
        wire.read(request())


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
    with suppress(DecodeError, ValueError):
        wire.read(ProcessingRequest.FromString(raw))
