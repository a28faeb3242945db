"""One request and its answer between a client and a replica, byte for byte."""

import asyncio
import gzip

import pytest

from tests.router.loopback import until
from tests.router.scripted import (
    CHAT,
    COMPLETIONS,
    DONE,
    Call,
    Script,
    chat,
    connect,
    event,
    named,
    says,
    served,
    silent,
)

GOOD = b'{"choices":[]}'
BODY = b'{"model":"m","prompt":"hi","odd":[1.50, "\\u00e9", null]  }'


def head(method: str, path: str, *lines: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "host: router", *lines, "", ""]).encode()


# ---- the request


CHUNKS = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:1], BODY[1:20], BODY[20:], b""))


@pytest.mark.parametrize(
    ("framing", "framed"), [(f"content-length: {len(BODY)}", BODY), ("transfer-encoding: chunked", CHUNKS)]
)
async def test_a_request_may_come_in_pieces_and_its_body_in_chunks(framing: str, framed: bytes) -> None:
    script = Script(says(GOOD))
    sent = head("POST", COMPLETIONS, framing) + framed
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        for cut in (len(sent), *range(1, len(sent), 3)):
            client.write(sent[:cut])
            await client.writer.drain()
            await asyncio.sleep(0)
            client.write(sent[cut:])
            assert (await client.answer()).body == GOOD
            assert script.calls[-1].body == BODY
            assert script.calls[-1].header("content-length") == str(len(BODY))
            assert script.calls[-1].header("transfer-encoding") is None


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])
async def test_a_compressed_body_is_refused(path: str) -> None:
    script = Script(says(GOOD))
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        answer = await client.post(path, gzip.compress(BODY), content_encoding="gzip")
        assert (answer.status, answer.error["code"]) == (415, "content_encoding_unknown")
    assert not script.calls


async def test_a_large_body_passes_in_both_directions() -> None:
    script = Script(lambda call: call.answer(call.body))
    body = b'{"model":"m","prompt":"%b"}' % (bytes(range(97, 123)) * 200_000)
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        assert (await client.post(COMPLETIONS, body)).body == body


async def test_a_client_that_waits_to_be_asked_for_its_body_is_asked() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running, connect(running.port) as client:
        for _ in range(2):
            client.write(head("POST", COMPLETIONS, f"content-length: {len(BODY)}", "expect: 100-continue"))
            assert await client.head() == (100, {})
            client.write(BODY)
            assert (await client.answer()).body == GOOD


async def test_a_client_that_waits_to_be_asked_reads_its_refusal_instead() -> None:
    script = Script(says(GOOD))
    async with served(*script.replicas(1), max_body_bytes=10) as running, connect(running.port) as client:
        client.write(head("POST", COMPLETIONS, f"content-length: {len(BODY)}", "expect: 100-continue"))
        assert (await client.answer()).status == 413
        assert not script.calls


@pytest.mark.parametrize("framing", ["length", "chunks", "chunks at once"])
async def test_a_body_that_is_too_large_is_refused_and_the_client_can_read_why(framing: str) -> None:
    script = Script(says(GOOD))
    async with served(*script.replicas(1), max_body_bytes=100_000) as running, connect(running.port) as client:
        if framing == "length":
            client.write(head("POST", CHAT, "content-length: 8000000"))
        else:
            client.write(head("POST", CHAT, "transfer-encoding: chunked"))
        if framing == "chunks at once":
            client.write(b"186a1\r\n" + bytes(100_001) + b"\r\n0\r\n\r\n")
        else:
            for _ in range(80):  # as most clients do: the answer is read when all is sent
                client.write(b"186a0\r\n" + bytes(100_000) + b"\r\n" if framing == "chunks" else bytes(100_000))
                await client.writer.drain()
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")
        assert "100,000" in answer.error["message"]
        assert answer.headers["connection"] == "close"
        assert await client.rest() == b""
        assert not script.calls


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'"m"', b'{"messages":[]}', b'{"model":7}'])
async def test_a_request_without_a_model_is_refused_on_a_kept_connection(body: bytes) -> None:
    script = Script(says(GOOD))
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        answer = await client.post(CHAT, body)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
        assert (await client.post(CHAT, chat())).body == GOOD
        assert len(script.calls) == 1


async def test_another_model_is_refused_with_the_names_of_those_that_are_served() -> None:
    async with served(named("a")) as running, connect(running.port) as client:
        answer = await client.post(CHAT, chat() | {"model": "other"})
        assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
        assert '"m"' in answer.error["message"]


async def test_a_failure_of_our_own_is_logged_and_says_nothing_of_its_cause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(named("a")) as running, connect(running.port) as client:
        with monkeypatch.context() as broken:
            broken.setattr(running.router.placement, "question", None)  # nothing that could be asked for does this
            for path in (CHAT, "/v1/embeddings"):
                answer = await client.post(path, chat())
                assert (answer.status, answer.error["code"]) == (500, "internal_error")
                assert b"NoneType" not in answer.body
        assert caplog.text.count("TypeError: 'NoneType' object is not callable") == 2
        assert (await client.post(CHAT, chat())).status == 200


# ---- the answer


@pytest.mark.parametrize(
    "body", [b"", b"x", bytes(range(256)) * 1000, gzip.compress(b"abc" * 1000)], ids=["empty", "one", "binary", "gzip"]
)
@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_an_answer_reaches_the_client_as_it_was_sent(body: bytes, path: str) -> None:
    script = Script(says(body, 201, content_type="application/x", content_encoding="gzip", x_own="1"))
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        answer = await client.post(path, chat(), accept_encoding="gzip")
        assert (answer.status, answer.body) == (201, body)
        assert answer.headers["content-encoding"] == "gzip" and answer.headers["x-own"] == "1"
        assert answer.headers["content-type"] == "application/x"
        assert answer.headers["x-warmroute-replica"] == "r0"
        assert answer.headers["content-length"] == str(len(body))


@pytest.mark.parametrize("native", [False, True])
async def test_each_part_of_a_stream_arrives_before_the_next_is_made(native: bool) -> None:
    arrived = asyncio.Event()

    async def stream(call: Call) -> None:
        call.begin_frames() if native else call.begin()
        for n in range(20):
            call.frame(event(str(n)), n) if native else call.chunk(event(str(n)))
            await arrived.wait()
            arrived.clear()
        call.end()

    async with (
        served(*Script(stream).replicas(1, native=native)) as running,
        connect(running.port) as client,
    ):
        client.send("POST", CHAT, chat(stream=True))
        _, headers = await client.head()
        assert headers["content-type"].startswith("text/event-stream")
        for n in range(20):
            assert await client.chunk() == event(str(n))
            arrived.set()
        assert await client.chunk() == b""


async def test_the_head_of_a_stream_does_not_wait_for_its_first_event() -> None:
    go = asyncio.Event()

    async def stream(call: Call) -> None:
        call.begin()
        await go.wait()
        call.chunk(DONE)
        call.end()

    async with served(*Script(stream).replicas(1)) as running, connect(running.port) as client:
        client.send("POST", CHAT, chat(stream=True))
        assert (await client.head())[0] == 200
        go.set()
        assert await client.chunk() == DONE


async def test_a_slow_reader_stops_the_replica_instead_of_filling_memory() -> None:
    written = 0

    async def endless(call: Call) -> None:
        nonlocal written
        call.begin()
        while True:
            call.chunk(bytes(100_000))
            await call.connection.writer.drain()
            written += 100_000

    async with served(*Script(endless).replicas(1)) as running, connect(running.port) as client:
        client.send("POST", CHAT, chat(stream=True))
        await client.head()
        seen = -1

        def stalled() -> bool:
            nonlocal seen
            before, seen = seen, written
            return 0 < before == seen

        [attempt] = running.router.attempts
        await until(lambda: attempt.sending.paused, "the replica is stopped")
        await until(stalled, "nothing more comes")
        [connection] = running.front.server.connections.open
        assert connection.transport.get_write_buffer_size() < 2_000_000
        client.leave()


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_a_body_has_none(status: int) -> None:
    def bare(call: Call) -> None:
        call.write(b"HTTP/1.1 %d -\r\nx-own: 1\r\n\r\n" % status)

    async with served(*Script(bare).replicas(1)) as running, connect(running.port) as client:
        for path in (CHAT, "/v1/responses"):
            answer = await client.post(path, chat())
            assert (answer.status, answer.headers["x-own"]) == (status, "1")
            assert "transfer-encoding" not in answer.headers


async def test_head_has_the_length_and_no_body() -> None:
    def length(call: Call) -> None:
        call.answer(b"" if call.method == "HEAD" else b"four", x_length="4")

    async with served(*Script(length).replicas(1)) as running, connect(running.port) as client:
        answer = await client.ask("HEAD", "/v1/files", host="localhost")
        assert (answer.status, answer.headers["x-length"]) == (200, "4")
        assert (await client.get("/v1/files", host="localhost")).body == b"four"  # the connection is still in step


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keep", ["", "connection: keep-alive"])
async def test_an_old_client_gets_an_answer_that_ends_with_the_connection(stream: bool, keep: str) -> None:
    def answers(call: Call) -> None:
        if stream:
            call.begin()
            call.chunk(event("1"))
            call.chunk(DONE)
            call.end()
        else:
            call.answer(GOOD)

    body = b'{"model":"m","messages":[],"stream":%b}' % (b"true" if stream else b"false")
    async with served(*Script(answers).replicas(1)) as running, connect(running.port) as client:
        lines = [f"content-length: {len(body)}", *([keep] if keep else [])]
        client.write(head("POST", CHAT, *lines, version="1.0") + body)
        answer = await client.answer()
        assert answer.body == (event("1") + DONE if stream else GOOD)
        assert "transfer-encoding" not in answer.headers and answer.headers["connection"] == "close"
        assert await client.rest() == b""


# ---- connections


async def test_a_connection_is_kept_and_used_again() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running, connect(running.port) as client:
        for _ in range(3):
            answer = await client.post(CHAT, chat())
            assert answer.body == GOOD and "connection" not in answer.headers
        assert len(running.replicas["r0"].connections) == 1  # the router's, too


async def test_a_connection_that_the_client_does_not_want_to_keep_is_closed() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running, connect(running.port) as client:
        answer = await client.post(CHAT, chat(), connection="close")
        assert (answer.body, answer.headers["connection"]) == (GOOD, "close")
        assert await client.rest() == b""


PIPELINES = {
    "hot-hot": [("POST", CHAT), ("POST", CHAT), ("POST", COMPLETIONS)],
    "hot-app": [("POST", CHAT), ("GET", "/health"), ("POST", CHAT), ("GET", "/health")],
    "app-hot": [("GET", "/health"), ("POST", CHAT), ("GET", "/v1/models")],
    "refused": [("POST", "/v1/score"), ("GET", "/nothing"), ("POST", CHAT)],
}


@pytest.mark.parametrize("requests", PIPELINES.values(), ids=PIPELINES)
async def test_requests_that_are_sent_at_once_are_answered_in_turn(requests: list[tuple[str, str]]) -> None:
    async def answers(call: Call) -> None:
        await asyncio.sleep(0.01)
        call.answer(call.body[-30:], 200, x_path=call.path)

    async with served(*Script(answers).replicas(2)) as running, connect(running.port) as client:
        for n, (method, path) in enumerate(requests):
            client.send(method, path, chat() | {"n": n} if method == "POST" else None, x_request_id=f"id-{n}")
        for n, (method, path) in enumerate(requests):
            answer = await client.answer()
            assert answer.headers["x-request-id"] == f"id-{n}"
            if method == "POST":
                assert answer.headers["x-path"] == path and answer.body.endswith(b'"n": %d}' % n)


async def test_a_client_may_say_that_it_sends_no_more() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running, connect(running.port) as client:
        client.send("POST", CHAT, chat())
        assert (await client.answer()).body == GOOD
        client.writer.write_eof()
        assert await client.rest() == b""


# ---- the client leaves


async def patient(call: Call) -> None:
    call.begin()
    call.chunk(event("1"))
    await call.left()


@pytest.mark.parametrize("when", ["before the answer", "in its midst", "with more requests behind it"])
async def test_a_client_that_leaves_takes_its_request_away_from_the_replica_at_once(when: str) -> None:
    script = Script(silent if when == "before the answer" else patient)
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        client.send("POST", CHAT, chat(stream=True))
        if when == "with more requests behind it":
            client.send("POST", CHAT, chat(stream=True))
            client.send("GET", "/health")
        await until(lambda: script.calls, "the replica is asked")
        if when != "before the answer":
            await client.head()
        client.leave()
        async with asyncio.timeout(20):
            await script.calls[0].left()
        await running.idle()
        assert running.router.history.counts.client_left == 1
        assert len(script.calls) == 1
        assert running.member("r0").server.faults == 0


@pytest.mark.parametrize("sent", ["head", "half of the body"])
async def test_a_client_that_leaves_before_it_has_asked_leaves_nothing(sent: str) -> None:
    script = Script(says(GOOD))
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        client.write(head("POST", CHAT, "content-length: 100"))
        if sent == "half of the body":
            client.write(b"{" * 50)
        await until(lambda: running.router.lifecycle.open_requests == 1, "it has begun")
        client.leave()
        await running.idle()
        assert not script.calls


async def test_leaving_after_the_answer_does_not_count_as_a_disconnect() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running, connect(running.port) as client:
        await client.post(CHAT, chat())
        client.leave()
        await running.idle()
        assert running.router.history.counts.client_left == 0


# ---- headers


async def test_headers_of_one_connection_end_with_it() -> None:
    def answers(call: Call) -> None:
        call.answer(
            GOOD, connection="keep-alive, x-named", keep_alive="timeout=5", x_named="n", x_own="1", server="replica",
            x_request_id="its-own", proxy_authenticate="x", x_warmroute_replica="another",
        )  # fmt: skip

    script = Script(answers)
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        answer = await client.post(
            CHAT, chat(), connection="keep-alive, X-Named, content-length, host, Baggage", x_named="n", te="trailers",
            proxy_authorization="x", keep_alive="timeout=9", x_request_id="mine", traceparent="00-1-2-01", baggage="b",
            user_agent="2",
        )  # fmt: skip
        call = script.calls[0]
        for gone in ("x-named", "te", "proxy-authorization", "keep-alive", "connection", "expect", "baggage"):
            assert call.header(gone) is None, gone
        assert (call.header("user-agent"), call.header("traceparent"), call.header("x-request-id")) == (
            "2",
            "00-1-2-01",
            "mine",
        )
        assert call.header("host") == f"127.0.0.1:{running.replicas['r0'].port}"
        assert call.json == chat()
        for gone in ("x-named", "keep-alive", "connection", "proxy-authenticate"):
            assert gone not in answer.headers, gone
        assert answer.headers["x-own"] == "1" and answer.headers["server"] == "replica"
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["x-warmroute-replica"] == "r0"


async def test_several_cookies_stay_several() -> None:
    def answers(call: Call) -> None:
        call.write(b"HTTP/1.1 200 -\r\nset-cookie: a=1\r\nset-cookie: b=2\r\ncontent-length: 2\r\n\r\n{}")

    async with served(*Script(answers).replicas(1)) as running, connect(running.port) as client:
        client.send("POST", CHAT, chat())
        raw = await client.reader.readuntil(b"{}")
        assert b"set-cookie: a=1\r\n" in raw and b"set-cookie: b=2\r\n" in raw
