"""Lines of a file as requests, and copies over HTTP: their bounds, and what is counted."""

import io
import json
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.process.settings import Unusable
from lab.shadow.incoming import BadLine, Incoming, _lines, lines_of, mirror, parse_line
from router.members.upstream import Header

BODY = b'{"model":"m","prompt":"hi"}'


def test_a_line_needs_nothing_but_a_body() -> None:
    incoming = parse_line(b'{"body":%b}' % BODY)
    assert (incoming.ts, incoming.body, incoming.replica) == (None, BODY, None)


def test_a_line_of_a_request_log_says_how_its_request_was_served() -> None:
    fields = {"ts": 5.5, "request_id": "r", "replica": "r1", "cached_tokens": 32, "ttft_s": 0.5, "decisions": [{}]}
    incoming = parse_line(json.dumps(fields | {"body": json.loads(BODY), "output_tokens": 7}).encode())
    assert (incoming.ts, incoming.request_id, incoming.replica) == (5.5, "r", "r1")
    assert (incoming.cached_tokens, incoming.output_tokens, incoming.ttft_s) == (32, 7, 0.5)


def test_a_line_without_a_body_names_the_option_that_logs_bodies() -> None:
    with pytest.raises(BadLine, match=r"it has no body; .* --log-prompts$"):
        parse_line(b'{"ts":1,"request_id":"r","replica":"r1"}')


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
        parse_line(line)


@given(st.binary(max_size=200))
def test_no_line_raises_anything_else(line: bytes) -> None:
    with suppress(BadLine):
        parse_line(line)


MOST = 8


@given(st.text("ab \n", max_size=40).map(str.encode))
def test_lines_that_are_too_long_are_told_apart(content: bytes) -> None:
    found = [None if line is None else line.rstrip(b"\n") for line in _lines(io.BytesIO(content), MOST)]
    lines = [line for line in content.split(b"\n") if len(line) > MOST or (line and not line.isspace())]
    assert found == [line if len(line) <= MOST else None for line in lines]


async def test_a_file_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n\n" + b"x" * 200 + b"\ntwo")
    assert [line async for line in lines_of(str(path), 100)] == [b"one\n", None, b"two"]


@pytest.mark.parametrize("kind", ["folder", "pipe"])
async def test_only_ordinary_files_are_opened_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(Unusable, match=r"is no ordinary file; give -|Is a directory"):
        await anext(lines_of(str(path), 100))


CHAT = "/v1/chat/completions"
MAX_BODY, MOST_BYTES = 100, 250


class Copies:
    """The app, and what it has taken."""

    def __init__(self) -> None:
        self.skipped: Counter[str] = Counter()
        self.taken: list[tuple[Incoming, Sequence[Header]]] = []
        app = mirror(self._take, MAX_BODY, MOST_BYTES, self.skipped)
        self.http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://shadow")

    async def _take(self, copy: Incoming, headers: Sequence[Header]) -> None:
        self.taken.append((copy, headers))


async def test_a_copy_is_taken_with_its_headers_and_answered() -> None:
    copies, headers = Copies(), {"x-request-id": "i" * 200, "x-warmroute-replica": "r1", "x-session-id": "s"}
    async with copies.http as http:
        assert (await http.post(CHAT, content=b"{}", headers=headers)).status_code == 204
    [(copy, told)] = copies.taken
    assert (copy.body, copy.path, copy.request_id, copy.replica) == (b"{}", CHAT, "i" * 128, "r1")
    assert (b"x-session-id", b"s") in told and copy.ts is not None


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/embeddings"), ("GET", CHAT)])
async def test_requests_that_generate_nothing_are_answered_and_not_taken(method: str, path: str) -> None:
    copies = Copies()
    async with copies.http as http:
        assert (await http.request(method, path, content=b"{}")).status_code == 204
    assert not copies.taken and not copies.skipped


async def test_a_body_over_the_limit_is_counted() -> None:
    copies = Copies()
    async with copies.http as http:
        answer = await http.post(CHAT, content=b"x" * (MAX_BODY + 1))
    assert (answer.status_code, answer.headers["connection"]) == (413, "close")
    assert copies.skipped == {"too large": 1}
