"""Lines of a file as requests."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.shadow.incoming import BadLine, parse_line

BODY = b'{"model":"m","prompt":"hi"}'


def test_a_line_needs_nothing_but_a_body() -> None:
    incoming = parse_line(b'{"body":%b}' % BODY, 12.0)
    assert (incoming.ts, incoming.body, incoming.replica) == (12.0, BODY, None)


def test_a_line_of_a_request_log_says_how_its_request_was_served() -> None:
    fields = {"ts": 5.5, "request_id": "r", "replica": "r1", "cached_tokens": 32, "ttft_s": 0.5, "decisions": [{}]}
    incoming = parse_line(json.dumps(fields | {"body": json.loads(BODY), "output_tokens": 7}).encode(), 12.0)
    assert (incoming.ts, incoming.request_id, incoming.replica) == (5.5, "r", "r1")
    assert (incoming.cached_tokens, incoming.output_tokens, incoming.ttft_s) == (32, 7, 0.5)


def test_a_line_without_a_body_names_the_option_that_logs_bodies() -> None:
    with pytest.raises(BadLine, match=r"it has no body; .* --log-prompts$"):
        parse_line(b'{"ts":1,"request_id":"r","replica":"r1"}', 0.0)


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1",
        b"[1]",
        b'{"body":{}, "ts":"now"}',
        b'{"body":{}, "ts":1e300}',
        b'{"body":{}, "output_tokens":-1}',
        b'{"body":{}, "replica":"%b"}' % (b"x" * 600),
        b"\xff\xfe",
        b'{"body":' + b"[" * 100_000,
    ],
)
def test_a_line_that_is_no_request_is_refused_with_an_example(line: bytes) -> None:
    with pytest.raises(BadLine, match=r'it is no request: .*; write \{"ts"'):
        parse_line(line, 0.0)


@given(st.binary(max_size=200))
def test_no_line_raises_anything_else(line: bytes) -> None:
    with suppress(BadLine):
        parse_line(line, 0.0)
