"""The order of a gateway's messages, and the replies to them, without gRPC."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.picker.stream import (
    ENDPOINT,
    PART_BYTES,
    Message,
    Mode,
    Mutation,
    Outcome,
    OutOfOrder,
    Phase,
    Pick,
    PickerStream,
    Refusal,
    Reply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)

BODY = b'{"model":"m"}'
PICK = Pick("10.0.0.1:80", Mutation([(b"x-a", b"1")], [b"x-b"]), BODY)
REFUSAL = Refusal(429, [(b"retry-after", b"1")], b"{}")
BUFFERED = RequestHeaders((), request_mode=Mode.BUFFERED, response_mode=Mode.STREAMED)


def after(*messages: Message, outcome: Outcome | None = None) -> tuple[PickerStream, list[Reply | Refusal]]:
    """A stream that has received these, and its replies, those to the outcome included."""
    stream, replies = PickerStream(), list[Reply | Refusal]()
    for message in messages:
        replies += stream.receive(message)
    if outcome is not None:
        replies += stream.decide(outcome)
    return stream, replies


def about(replies: Sequence[Reply | Refusal]) -> list[str]:
    return [reply.about if isinstance(reply, Reply) else str(reply.status) for reply in replies]


def test_a_body_that_streams_comes_back_after_the_headers() -> None:
    _, replies = after(RequestHeaders(()), RequestBody(BODY[:5]), RequestBody(BODY[5:], True), outcome=PICK)
    headers, body = replies
    assert isinstance(headers, Reply) and isinstance(body, Reply)
    assert dict(headers.mutation.changed) == {
        b"x-a": b"1",
        ENDPOINT: b"10.0.0.1:80",
        b"content-length": b"13",
    }
    assert headers.mutation.removed == [b"x-b"]
    assert headers.endpoint == "10.0.0.1:80"
    assert (body.about, body.part, body.end) == ("request_body", BODY, True)


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES])
def test_a_large_body_streams_in_parts_that_the_gateway_takes(size: int) -> None:
    body = bytes(index % 251 for index in range(size))
    _, (_, *replies) = after(RequestHeaders(()), RequestBody(b"", True), outcome=Pick("a:1", body=bytearray(body)))
    parts = [(reply.part or b"", reply.end) for reply in replies if isinstance(reply, Reply)]
    assert b"".join(part for part, _ in parts) == body
    assert max(len(part) for part, _ in parts) <= PART_BYTES
    assert [end for _, end in parts] == [False] * (len(parts) - 1) + [True]


def test_trailers_end_a_body_in_its_place() -> None:
    _, replies = after(RequestHeaders(()), RequestBody(BODY), RequestTrailers((b"x-a",)), outcome=PICK)
    headers, body, trailers = (reply for reply in replies if isinstance(reply, Reply))
    assert b"content-length" not in dict(headers.mutation.changed)
    assert list(headers.mutation.removed) == [b"x-b", b"content-length"]  # which a client may have given
    assert (body.part, body.end, trailers.about) == (BODY, False, "request_trailers")


@pytest.mark.parametrize("headers", [RequestHeaders(()), BUFFERED], ids=["duplex", "buffered"])
def test_no_trailer_gets_to_a_replica(headers: RequestHeaders) -> None:
    names = (b"x-data-parallel-rank", b"authorization")
    stream, _ = after(headers, RequestBody(BODY))
    if stream.phase is Phase.ASKING:
        stream.receive(RequestTrailers(names))
        *_, reply = stream.decide(PICK)
    else:
        list(stream.decide(PICK))
        [reply] = stream.receive(RequestTrailers(names))
    assert isinstance(reply, Reply)
    assert (reply.about, reply.mutation) == ("request_trailers", Mutation((), names))


def test_no_client_has_the_endpoint_removed() -> None:
    _, (reply,) = after(RequestHeaders((), end=True), outcome=Pick("a:1", Mutation((), [ENDPOINT, b"x-b"])))
    assert isinstance(reply, Reply)
    assert (list(reply.mutation.changed), list(reply.mutation.removed)) == ([(ENDPOINT, b"a:1")], [b"x-b"])


def test_trailers_without_a_body_have_their_reply() -> None:
    _, replies = after(RequestHeaders(()), RequestTrailers(), outcome=Pick("a:1"))
    assert about(replies) == ["request_headers", "request_trailers"]
    stream, _ = after(BUFFERED)
    with pytest.raises(OutOfOrder, match="RequestTrailers came when the stream was asking"):
        stream.receive(RequestTrailers())
    assert about(list(stream.decide(REFUSAL))) == ["429"]


def test_a_buffered_body_that_changes_has_its_new_length() -> None:
    changed = Pick("a:1", body=b"other", is_changed=True)
    _, (_, reply) = after(BUFFERED, RequestBody(BODY, True), outcome=changed)
    assert isinstance(reply, Reply)
    assert reply.whole == b"other"
    assert (b"content-length", b"5") in reply.mutation.changed


# ---- any messages in any order

MODES = st.sampled_from(Mode)
MESSAGES = st.one_of(
    st.builds(RequestHeaders, st.just(()), st.booleans(), MODES, MODES),
    st.builds(RequestBody, st.binary(max_size=20), st.booleans()),
    st.just(RequestTrailers()),
    st.builds(ResponseHeaders, st.just(200), st.just(()), st.booleans()),
    st.builds(ResponseBody, st.binary(max_size=20), st.booleans()),
    st.just(ResponseTrailers()),
)
FIELDS = {
    RequestHeaders: "request_headers",
    RequestBody: "request_body",
    RequestTrailers: "request_trailers",
    ResponseHeaders: "response_headers",
    ResponseBody: "response_body",
    ResponseTrailers: "response_trailers",
}
OUTCOMES = st.sampled_from([PICK, REFUSAL])


@given(st.lists(st.one_of(MESSAGES, OUTCOMES), max_size=40))
def test_whatever_comes_phases_go_forwards_and_replies_fit_the_messages(steps: list[Message | Outcome]) -> None:
    stream, phases, replied = PickerStream(), [Phase.NEW], 0
    for step in steps:
        if isinstance(step, Pick | Refusal):
            if stream.phase is Phase.DECIDING or (isinstance(step, Refusal) and stream.is_open):
                replied += len(list(stream.decide(step)))
        else:
            try:
                replies = stream.receive(step)
            except OutOfOrder:
                continue  # the stream is as it was
            assert {reply.about for reply in replies} <= {FIELDS[type(step)]}
            replied += len(replies)
        phases.append(stream.phase)
    assert all(before <= later for before, later in pairwise(phases))
    assert replied <= 2 * len(steps) + 3


PARTS = st.lists(st.binary(max_size=PART_BYTES // 2), max_size=6)


@given(PARTS, st.booleans(), st.sampled_from([Mode.BUFFERED, Mode.FULL_DUPLEX_STREAMED]))
def test_a_replica_gets_each_byte_once(sent: list[bytes], has_trailers: bool, mode: Mode) -> None:
    whole = b"".join(sent)
    received = [whole] if mode is Mode.BUFFERED else sent
    stream, _ = after(RequestHeaders((), request_mode=mode))
    for number, part in enumerate(received, 1):
        stream.receive(RequestBody(part, number == len(received) and not has_trailers))
    if stream.phase is Phase.ASKING:
        stream.receive(RequestTrailers())
    replies = [reply for reply in stream.decide(Pick("a:1", body=whole)) if isinstance(reply, Reply)]
    arrived = b"".join(reply.part or b"" for reply in replies)
    assert arrived == (b"" if mode is Mode.BUFFERED else whole)
    ends = [reply.end or reply.about == "request_trailers" for reply in replies]
    assert sum(ends) == (mode is Mode.FULL_DUPLEX_STREAMED)
