"""A generation request's way through failures, where tests/router/flow/test_traces.py does not tell it."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from api.native import pack_ids, unpack_ids
from events.native import Load
from router.members.spec import ReplicaSpec
from router.placement.cost import ASSUMED_TOKENS_PER_S
from router.placement.decision import Decision
from router.placement.effects import PATIENCE
from router.proxy.answer import Answer
from router.proxy.request import Request
from router.tenants.keys import Key, digest_of
from tests.router.loopback import until
from tests.router.records.test_request_log import no_request_in_a_cycle
from tests.router.scripted import (
    CHAT,
    COMPLETIONS,
    DEADLINE_S,
    DONE,
    DRAINING,
    MODEL,
    QUEUE_FULL,
    Call,
    Handler,
    Script,
    Scripted,
    Served,
    chat,
    connect,
    drops,
    event,
    head_of,
    named,
    says,
    served,
    silent,
)

pytestmark = pytest.mark.virtual

GOOD = b'{"choices":[]}'
JSON = "application/json"
PIECES = [b"one ", b"two ", b"three ", b"four"]


def faults(running: Served) -> int:
    return sum(member.server.faults for member in running.router.members)


# ---- before the first byte


@pytest.mark.parametrize("queue", [{"queue_size": 0}, {"queue_timeout_s": 0.2}], ids=["no queue", "too late"])
async def test_without_a_replica_in_time_the_client_is_told_to_retry(queue: dict[str, Any]) -> None:
    gone = named("gone")
    async with AsyncExitStack() as server:
        await server.enter_async_context(gone.running())
        async with served(gone, **queue) as running, connect(running.port) as client:
            await server.aclose()
            answer = await client.post(CHAT, chat())
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert answer.error["code"] == "no_replica" and "gone" in answer.error["message"]


async def test_a_pool_at_zero_holds_requests_for_the_model_that_it_is_to_serve(tmp_path: Path) -> None:
    """Their tokens are made when it is known whose they are, so that predictions are exact."""
    file, replica = tmp_path / "replicas.toml", Scripted("a", goes_on, native=True)
    file.write_text("")
    config: dict[str, Any] = {"replicas_file": str(file), "expected_models": (MODEL,), "queue_timeout_s": 60.0}
    async with replica.running(), served(**config) as running, connect(running.port) as client:
        assert running.router.lifecycle.not_ready() is None, "a Service would send it nothing"
        async with connect(running.port) as leaving:
            leaving.send("POST", CHAT, chat())
            await until(lambda: len(running.router.waiting) == 1, "the request waits")
            metrics = (await client.get("/metrics")).body
            assert b'warmroute_router:model_queue_length{model="%b"} 1.0\n' % MODEL.encode() in metrics
            assert b"\nwarmroute_router:queue_length 1.0\n" in metrics
        await until(lambda: not running.router.waiting, "its client has left")
        for _ in range(2):
            client.send("POST", CHAT, chat(stream=True))
            await until(lambda: len(running.router.waiting) == 1, "it waits")
            file.write_text(f'[[replicas]]\nname = "a"\nurl = "{replica.spec.url}"\n')
            assert (await client.answer()).body == WHOLE
            assert running.router.history.decisions[-1].decision.question.exact
            file.write_text("# no replicas\n")
            await until(lambda: not running.router.members.by_name, "the pool is at zero again")


async def test_requests_wait_for_expected_models_only_and_not_for_ever() -> None:
    async with served(expected_models=(MODEL,), queue_timeout_s=1.0) as running, connect(running.port) as client:
        assert (await client.post(CHAT, chat() | {"model": "another"})).error["code"] == "model_not_found"
        began_s = asyncio.get_running_loop().time()
        answer = await client.post(CHAT, chat())
        assert (answer.status, answer.error["code"]) == (503, "no_replica")
        assert asyncio.get_running_loop().time() - began_s >= 1.0
    async with served() as running, connect(running.port) as client:
        assert running.router.lifecycle.not_ready() is not None
        assert (await client.post(CHAT, chat())).error["code"] == "no_replica"


async def test_replicas_that_die_together_are_no_fault_of_a_request() -> None:
    """As when their machine dies: the third is dead, too, before the request is tried there; then all are back."""
    lost: list[str] = []
    ends: dict[str, AsyncExitStack] = {}

    def dies(name: str) -> Handler:
        async def handle(call: Call) -> None:  # noqa: ARG001
            lost.append(name)
            await ends[name].aclose()

        return handle

    replicas = {name: Scripted(name, dies(name)) for name in ("r0", "r1", "r2")}
    async with AsyncExitStack() as stack:
        for name, replica in replicas.items():
            ends[name] = await stack.enter_async_context(AsyncExitStack())
            await ends[name].enter_async_context(replica.running())
        async with served(*replicas.values()) as running, connect(running.port) as client:
            client.send("POST", CHAT, chat())
            await until(lambda: len(lost) == 2, "two are lost")
            [third] = replicas.keys() - set(lost)
            await ends[third].aclose()
            for replica in replicas.values():
                replica.handler = says(GOOD)
                await stack.enter_async_context(replica.running(replica.port))
            assert (await client.answer()).status == 200
            assert len(lost) == 2


async def test_a_request_that_ends_whole_processes_takes_no_more_than_three_with_it() -> None:
    ends: dict[str, AsyncExitStack] = {}
    ended: list[str] = []

    def dies(name: str) -> Handler:
        async def handle(call: Call) -> None:
            if b"poison" in call.body:
                ended.append(name)
                await ends[name].aclose()
            else:
                call.answer(GOOD)

        return handle

    replicas = [Scripted(name, dies(name)) for name in "abcdef"]
    async with AsyncExitStack() as stack:
        for replica in replicas:
            ends[replica.name] = await stack.enter_async_context(AsyncExitStack())
            await ends[replica.name].enter_async_context(replica.running())
        running = await stack.enter_async_context(served(*replicas))
        client = await stack.enter_async_context(connect(running.port))
        for _ in range(12):  # each replica has a connection that has been used before
            assert (await client.post(CHAT, chat())).status == 200
        answer = await client.post(CHAT, chat("poison"))
        assert (answer.status, answer.error["code"]) == (503, "no_replica")
        assert len(ended) == 3
        assert [(await client.post(CHAT, chat())).status for _ in range(9)] == [200] * 9


async def test_requests_that_every_replica_refuses_are_not_asked_again_without_end() -> None:
    script = Script(says(b"overloaded", 429))
    async with served(*script.replicas(2)) as running, connect(running.port) as client:
        running.router.retry_budget.left = 3.0
        running.router.retry_budget.filled_s = float("inf")  # time adds nothing
        for _ in range(10):
            assert (await client.post(CHAT, chat())).status == 429
        assert len(script.calls) == 10 + 3 + 2  # a fifth of the ten, too


async def test_internal_errors_in_a_row_open_the_breaker() -> None:
    replicas = Script(says(b"failed", 500)).replicas(1)
    # A health check that went well in between would begin the count anew.
    async with served(*replicas, health_interval_s=60.0) as running, connect(running.port) as client:
        for _ in range(3):
            assert running.member("r0").health.breaker == "closed"
            await client.post(CHAT, chat())
        assert running.member("r0").health.breaker == "open"


@pytest.mark.parametrize("body", [b'{"error":{"code":"mine"}}', b"long" * 200_000], ids=["short", "long"])
async def test_the_clients_own_fault_is_passed_on_and_never_counted(body: bytes) -> None:
    script = Script(says(body, 422, x_own="1"))
    async with served(*script.replicas(2)) as running, connect(running.port) as client:
        for sent in range(1, 6):
            answer = await client.post(CHAT, chat())
            assert (answer.status, answer.body, answer.headers["x-own"]) == (422, body, "1")
            assert len(script.calls) == sent
        assert faults(running) == 0
        assert all(member.candidate.unavailable is None for member in running.router.members)


@pytest.mark.virtual(False)
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])
async def test_a_refusal_arrives_though_the_replica_closed_without_reading_megabytes(path: str) -> None:
    refusal = b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 9\r\nconnection: close\r\n\r\ntoo large"

    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = b'{"data":[{"id":"m"}]}'
        writer.write(refusal if head.startswith(b"POST") else head_of(200, {"connection": "close"}, len(body)) + body)
        writer.close()

    server = await asyncio.start_server(hasty, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    spec = ReplicaSpec(name="hasty", url=f"http://127.0.0.1:{port}", engine="openai")
    async with server, served(ready=False, replicas=(spec,)) as running, connect(running.port) as client:
        await until(lambda: running.member("hasty").candidate.unavailable is None, "the replica takes requests")
        for _ in range(3):
            answer = await client.post(path, {"model": MODEL, "prompt": "x" * 8_000_000})
            assert (answer.status, answer.body) == (413, b"too large")
        assert faults(running) == 0


# ---- in the midst of a plain answer


async def test_an_error_never_becomes_part_of_half_an_event() -> None:
    def broken(call: Call) -> None:
        call.begin()
        call.chunk(event('{"n":1}') + b'data: {"n":')
        call.drop()

    async with served(*Script(broken).replicas(1)) as running, connect(running.port) as client:
        first, half, error, done, end = (await client.post(CHAT, chat(stream=True))).body.split(b"\n\n")
        assert (first, half, done, end) == (b'data: {"n":1}', b'data: {"n":', b"data: [DONE]", b"")
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "broken_stream"


@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b"\r"])
async def test_a_stream_that_is_lost_after_its_last_event_is_complete(ends: bytes) -> None:
    stream = (event('{"n":1}') + DONE).replace(b"\n", ends)

    def broken(call: Call) -> None:
        call.begin()
        call.chunk(stream)
        call.drop()

    async with served(*Script(broken).replicas(1)) as running, connect(running.port) as client:
        assert (await client.post(CHAT, chat(stream=True))).body == stream


@pytest.mark.parametrize(
    "headers",
    [
        b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n",
        b"content-type: text/event-stream\r\ncontent-length: 100\r\n\r\nab",
    ],
    ids=["no events", "a length"],
)
async def test_what_cannot_end_in_words_breaks_off_for_the_client_too(headers: bytes) -> None:
    def broken(call: Call) -> None:
        call.write(b"HTTP/1.1 200 OK\r\n" + headers)
        call.drop()

    async with served(*Script(broken).replicas(2)) as running, connect(running.port) as client:
        client.send("POST", CHAT, chat(stream=True))
        status, _ = await client.head()
        body = await client.rest()
        assert status == 200 and body in (b"ab", b"2\r\nab\r\n")


# ---- native answers


def ids(n: int) -> list[int]:
    return [100 + n]


def from_piece(first: int, until_: int, *, then: str = "end", **begin: str) -> Handler:
    """A native replica that says these PIECES, one token each."""

    def handle(call: Call) -> None:
        call.begin_frames(**begin)
        for n in range(first, until_):
            call.frame(event(PIECES[n].decode()), *ids(n))
        if then == "end":
            call.frame(DONE)
            call.end()
        elif then == "half a frame":
            call.chunk(b"\0\0\0\0\1\0\0\0")
            call.drop()
        elif then == "no frame":
            call.chunk(b"\xff" * 12)
        elif then == "drop":
            call.drop()

    return handle


def goes_on(call: Call) -> None:
    """From wherever the router says that the answer was cut."""
    said = call.native[0].resume_token_ids
    tokens = unpack_ids(said[0]) if said else []
    assert tokens == [100, 101, 102, 103][: len(tokens)]
    from_piece(len(tokens), 4)(call)


WHOLE = b"".join(event(piece.decode()) for piece in PIECES) + DONE


async def test_a_native_replica_gets_the_tokens_and_the_seed() -> None:
    script = Script(from_piece(0, 4, x_warmroute_cached_tokens="16"))
    async with served(*script.replicas(1, native=True)) as running, connect(running.port) as client:
        answer = await client.post(CHAT, chat(stream=True, seed=None, unknown=[1]), accept="text/event-stream")
        assert answer.body == WHOLE
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-warmroute-cached-tokens"] == "16"
        assert "x-warmroute-content-type" not in answer.headers
        call = script.calls[0]
        assert call.header("content-type") == "application/x-warmroute-request"
        assert call.header("accept") == "application/x-warmroute-frames"
        native, body = call.native
        assert body == chat(stream=True, seed=None, unknown=[1])
        assert ord("h") in unpack_ids(native.prompts[0])
        assert native.response_id is not None and native.response_id.startswith("chatcmpl-")
        assert native.created is not None and native.seed is not None
        assert native.resume_token_ids == []
        await client.post(CHAT, chat(stream=True, seed=7))
        assert script.calls[1].native[0].seed is None, "a client's own seed stands"


async def test_a_native_replica_gets_priorities_and_a_retry_keeps_its_place() -> None:
    script = Script(from_piece(0, 4))
    async with served(*script.replicas(1, native=True), policy="cost") as running, connect(running.port) as client:
        for words in (10, 2000):
            await client.post(CHAT, chat("a " * words, stream=True))
        short, long = (call.native[0].priority for call in script.calls)
        assert long - short > PATIENCE * 1900 / ASSUMED_TOKENS_PER_S

    script = Script(drops, from_piece(0, 4))
    async with served(*script.replicas(2, native=True), policy="cost") as running, connect(running.port) as client:
        await client.post(CHAT, chat(stream=True))
        first, again = (call.native[0].priority for call in script.calls)
        assert again < first


async def test_a_body_that_comes_slowly_gains_nothing_by_it() -> None:
    script = Script(from_piece(0, 4))
    async with served(*script.replicas(1, native=True), policy="cost") as running, connect(running.port) as client:
        router, late_s = running.router, 0.0
        clock = router.now_s
        router.now_s = lambda: clock() + late_s
        body = json.dumps(chat(stream=True)).encode()
        client.send("POST", CHAT, body[:10], content_length=str(len(body)))
        await until(lambda: router.lifecycle.open_requests, "its head has come")
        late_s = 30.0
        client.write(body[10:])
        assert (await client.answer()).status == 200
        assert script.calls[0].native[0].priority > -late_s / 2
        await running.idle()
        assert router.history.decisions[-1].record().duration_s >= late_s  # the negative control: it came so early


@pytest.mark.parametrize("then", ["drop", "half a frame", "no frame"])
@pytest.mark.parametrize("cut", [0, 1, 3, 4])
async def test_a_native_stream_continues_elsewhere_and_the_client_reads_the_same_bytes(cut: int, then: str) -> None:
    script = Script(from_piece(0, cut, then=then), goes_on)
    async with served(*script.replicas(2, native=True)) as running, connect(running.port) as client:
        assert (await client.post(CHAT, chat(stream=True, cache_salt="s"))).body == WHOLE
        first, second = (call.native[0] for call in script.calls)
        assert len(second.resume_token_ids) == (cut > 0) or then == "no frame"  # which takes what came with it along
        assert second.prompts == first.prompts and second.cache_salt == first.cache_salt == "s"
        assert (second.response_id, second.created, second.seed) == (first.response_id, first.created, first.seed)
        assert script.calls[0].native[1] == script.calls[1].native[1]
        assert running.router.history.counts.resumes == 1 and faults(running) == 1


async def test_half_an_answer_waits_while_every_replica_is_gone() -> None:
    script = Script(from_piece(0, 2, then="wait"), goes_on)
    replica, *_ = script.replicas(1, native=True)
    async with AsyncExitStack() as server:
        await server.enter_async_context(replica.running())
        async with served(replica, health_interval_s=0.05) as running, connect(running.port) as client:
            client.send("POST", CHAT, chat(stream=True))
            await client.head()
            await server.aclose()
            await until(lambda: len(running.router.waiting) == 1, "half an answer waits")
            await server.enter_async_context(replica.running(replica.port))
            assert b"".join([part async for part in client.chunks()]) == WHOLE


async def test_without_resume_a_native_stream_that_is_lost_ends_in_an_error() -> None:
    script = Script(from_piece(0, 2, then="drop"), from_piece(2, 4))
    async with served(*script.replicas(2, native=True), resume=False) as running, connect(running.port) as client:
        body = (await client.post(CHAT, chat(stream=True))).body
        assert b"broken_stream" in body and len(script.calls) == 1
        assert (await client.post(CHAT, chat(stream=True))).status == 200


async def test_a_native_stream_lost_after_its_last_event_is_complete() -> None:
    def broken(call: Call) -> None:
        call.begin_frames()
        for n, piece in enumerate(PIECES):
            call.frame(event(piece.decode()), *ids(n))
        call.frame(DONE)
        call.drop()

    script = Script(broken, from_piece(0, 4))
    async with served(*script.replicas(2, native=True)) as running, connect(running.port) as client:
        assert (await client.post(CHAT, chat(stream=True))).body == WHOLE
        assert len(script.calls) == 1


async def test_the_choices_of_a_native_stream_are_resumed_each_where_it_was() -> None:
    def first(call: Call) -> None:
        call.begin_frames()
        call.frame(event("a0"), 10, choice=0)
        call.frame(event("c0"), 30, 31, choice=2)
        call.drop()

    script = Script(first, from_piece(0, 1))
    async with served(*script.replicas(2, native=True)) as running, connect(running.port) as client:
        assert (await client.post(CHAT, chat(stream=True, n=3))).body == event("a0") + event("c0") + event(
            "one "
        ) + DONE
        assert script.calls[1].native[0].resume_token_ids == [pack_ids([10]), b"", pack_ids([30, 31])]


@pytest.mark.parametrize("lost_after", ["tokens", "the answer"])
async def test_a_whole_native_answer_that_is_lost_is_not_seen_by_the_client(lost_after: str) -> None:
    def first(call: Call) -> None:
        call.begin_frames(JSON)
        call.frame(b"", 10, 11)
        if lost_after == "the answer":
            call.frame(GOOD)
        call.drop()

    def second(call: Call) -> None:
        call.begin_frames(JSON, x_warmroute_cached_tokens="3")
        call.frame(b"", 12)
        call.frame(GOOD)
        call.end()

    script = Script(first, second)
    async with served(*script.replicas(2, native=True)) as running, connect(running.port) as client:
        answer = await client.post(COMPLETIONS, {"model": MODEL, "prompt": "hi"})
        assert (answer.status, answer.body) == (200, GOOD)
        assert answer.headers["content-type"] == JSON
        assert answer.headers["content-length"] == str(len(GOOD))
        assert script.calls[1].native[0].resume_token_ids == [pack_ids([10, 11])]


@pytest.mark.parametrize(
    ("refusal", "status"),
    [(DRAINING, 503), (QUEUE_FULL, 429), (QUEUE_FULL, 503), *((b"{}", n) for n in (429, 500, 503))],
)
async def test_a_native_replica_that_will_not_continue_leaves_it_to_another_one(refusal: bytes, status: int) -> None:
    script = Script(from_piece(0, 2, then="drop"), says(refusal, status), from_piece(2, 4))
    async with served(*script.replicas(3, native=True)) as running, connect(running.port) as client:
        assert (await client.post(CHAT, chat(stream=True))).body == WHOLE
        assert faults(running) == 1 + (status >= 500 and refusal == b"{}"), "to be full or to drain is no fault"


async def test_a_native_replica_that_refuses_to_continue_ends_the_stream_with_an_error() -> None:
    script = Script(from_piece(0, 2, then="drop"), says(b'{"error":{}}', 400))
    async with served(*script.replicas(3, native=True)) as running, connect(running.port) as client:
        body = (await client.post(CHAT, chat(stream=True))).body
        assert body.startswith(event("one ") + event("two ")) and body.count(b"broken_stream") == 1
        assert len(script.calls) == 2


# ---- time


async def test_a_whole_answer_may_take_its_time() -> None:
    release = asyncio.Event()

    async def slow(call: Call) -> None:
        await release.wait()
        call.answer(GOOD)

    script = Script(slow)
    async with (
        served(*script.replicas(2), idle_timeout_s=0.05) as running,
        connect(running.port) as client,
    ):
        client.send("POST", CHAT, chat())
        asyncio.get_running_loop().call_later(0.4, release.set)
        assert (await client.answer()).body == GOOD
        assert faults(running) == 0


async def test_a_stream_that_speaks_now_and_then_is_not_silent() -> None:
    async def slow(call: Call) -> None:
        call.begin()
        for n in range(6):
            await asyncio.sleep(0.1)
            call.chunk(event(str(n)))
        call.chunk(DONE)
        call.end()

    async with served(*Script(slow).replicas(2), idle_timeout_s=0.35) as running, connect(running.port) as client:
        assert (await client.post(CHAT, chat(stream=True))).body == b"".join(event(str(n)) for n in range(6)) + DONE
        assert faults(running) == 0


async def test_a_client_that_reads_slowly_does_not_make_the_replica_look_silent() -> None:
    size = 2_000_000

    async def long(call: Call) -> None:
        call.begin()
        for _ in range(size // 100_000):
            call.chunk(bytes(100_000))
            await call.connection.writer.drain()
        call.end()

    async with (
        served(*Script(long).replicas(1), idle_timeout_s=1.0, first_token_timeout_s=0.1) as running,
        connect(running.port) as client,
    ):
        client.send("POST", CHAT, chat(stream=True))
        await client.head()
        await asyncio.sleep(0.6)
        assert len((await client.chunk()) + b"".join([part async for part in client.chunks()])) == size
        assert faults(running) == 0


async def test_a_client_that_reads_nothing_any_more_gives_its_slot_back() -> None:
    async def long(call: Call) -> None:
        call.begin()
        while True:
            call.chunk(bytes(100_000))
            await call.connection.writer.drain()

    async with (
        served(*Script(long).replicas(1), idle_timeout_s=0.1) as running,
        connect(running.port) as client,
    ):
        client.send("POST", CHAT, chat(stream=True))
        await until(lambda: running.router.lifecycle.open_requests == 1, "it has come")
        await running.idle()
        assert faults(running) == 0 and running.router.history.counts.client_left == 1


# ---- waiting for room


async def test_requests_beyond_the_limit_wait_and_go_in_the_order_in_which_they_came() -> None:
    release = [asyncio.Event() for _ in range(5)]
    begun: list[str] = []

    async def one(call: Call) -> None:
        begun.append(call.json["messages"][0]["content"])
        await release[len(begun) - 1].wait()
        call.answer(GOOD)

    async with served(*Script(one).replicas(1), replica_limit=1) as running, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(running.port)) for _ in range(5)]
        for n, client in enumerate(clients):
            client.send("POST", CHAT, chat(str(n)))
            await running.opened(n + 1)
        await until(lambda: begun == ["0"], "one is answered")
        await asyncio.sleep(0.35)  # the clock looks a few times whether there is room
        assert len(running.router.waiting) == 4
        for n in range(5):
            release[n].set()
            assert (await clients[n].answer()).body == GOOD
        assert begun == ["0", "1", "2", "3", "4"]
        waited = [one.record().waited_s for one in running.router.history.decisions]
        assert waited[0] == 0 and all(waited_s > 0.3 for waited_s in waited[1:])


async def test_the_queue_is_bounded_and_says_when_to_come_again() -> None:
    release = asyncio.Event()

    async def slow(call: Call) -> None:
        await release.wait()
        call.answer(GOOD)

    async with (
        served(*Script(slow).replicas(1), replica_limit=1, queue_size=1) as running,
        connect(running.port) as first,
        connect(running.port) as second,
        connect(running.port) as third,
    ):
        first.send("POST", CHAT, chat())
        await until(lambda: running.member("r0").candidate.in_flight == 1, "the replica is full")
        second.send("POST", CHAT, chat())
        await until(lambda: len(running.router.waiting) == 1, "the queue is full")
        answer = await third.post(CHAT, chat())
        assert (answer.status, answer.error["code"]) == (429, "queue_full")
        assert answer.error["type"] == "rate_limit_error" and int(answer.headers["retry-after"]) >= 1
        assert running.router.history.counts.refused["queue_full"] == 1
        release.set()
        assert (await first.answer()).body == (await second.answer()).body == GOOD


async def test_a_client_that_leaves_while_waiting_takes_no_room() -> None:
    script = Script(silent, says(GOOD))
    async with (
        served(*script.replicas(1), replica_limit=1) as running,
        connect(running.port) as first,
        connect(running.port) as second,
        connect(running.port) as third,
    ):
        for n, client in enumerate((first, second, third)):
            client.send("POST", CHAT, chat(str(n)))
            await running.opened(n + 1)
        second.leave()
        await until(lambda: len(running.router.waiting) == 1, "it is out of the queue")
        first.leave()
        assert (await third.answer()).body == GOOD
        assert [call.json["messages"][0]["content"] for call in script.calls] == ["0", "2"]
        await until(lambda: running.router.history.counts.client_left == 2, "both are counted")


def takes(call: Call) -> None:
    """The test answers it."""


async def test_a_wait_for_one_model_does_not_delay_another_model() -> None:
    one, other = Scripted("one", takes, models=["x"]), Scripted("other", takes, models=["y"])
    async with served(one, other, replica_limit=1) as running, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(running.port)) for _ in range(4)]
        for n, (client, model) in enumerate(zip(clients, "xyxy", strict=True)):
            client.send("POST", CHAT, chat(str(n)) | {"model": model})
            await running.opened(n + 1)
        await until(lambda: len(running.router.waiting) == 2 and one.calls and other.calls, "two wait behind two")
        other.calls[0].answer(GOOD)  # the third waits before the fourth, but for the other model
        await until(lambda: len(other.calls) == 2, "the fourth has its turn")
        assert len(one.calls) == 1
        one.calls[0].answer(GOOD)
        await until(lambda: len(one.calls) == 2, "the third has its turn")
        one.calls[1].answer(GOOD)
        other.calls[1].answer(GOOD)
        assert [(await client.answer()).status for client in clients] == [200] * 4


async def test_waiting_requests_go_to_a_new_replica_and_not_to_a_removed_one() -> None:
    busy, gone, new = (Scripted(name, takes) for name in ("busy", "gone", "new"))
    async with AsyncExitStack() as stack:
        for replica in (gone, new):
            await stack.enter_async_context(replica.running())
        running = await stack.enter_async_context(served(busy, replica_limit=1))
        clients = [await stack.enter_async_context(connect(running.port)) for _ in range(4)]
        running.front.upkeep.add(gone.spec)
        await until(lambda: "gone" in running.router.members.by_name, "the replica is known")
        await until(lambda: running.member("gone").candidate.unavailable is None, "the replica takes requests")
        for n, client in enumerate(clients[:3]):
            client.send("POST", CHAT, chat())
            await running.opened(n + 1)
        await until(lambda: gone.calls and busy.calls and len(running.router.waiting) == 1, "one request waits")
        running.front.upkeep.remove("gone")
        gone.calls[0].answer(GOOD)
        await until(lambda: running.router.lifecycle.open_requests == 2, "what it had is answered")
        assert len(gone.calls) == len(running.router.waiting) == 1
        running.front.upkeep.add(new.spec)
        await until(lambda: new.calls, "the one that waits goes to the new one")
        new.calls[0].answer(GOOD)
        busy.calls[0].answer(GOOD)
        assert [(await client.answer()).status for client in clients[:3]] == [200] * 3


@pytest.mark.parametrize("queue", [{"queue_size": 0}, {"queue_timeout_s": 0.1}], ids=["full", "too slow"])
async def test_a_stream_that_waits_to_continue_ends_within_itself(queue: dict[str, Any]) -> None:
    taken = Scripted("taken", takes, native=True)
    losing = Scripted("losing", takes, native=True)
    async with (
        served(taken, losing, replica_limit=1, **queue) as running,
        connect(running.port) as first,
        connect(running.port) as second,
    ):
        for n, client in enumerate((first, second)):
            client.send("POST", CHAT, chat(stream=True))
            await running.opened(n + 1)
        await until(lambda: taken.calls and losing.calls, "both are full")
        from_piece(0, 1, then="drop")(losing.calls[0])
        pending = {asyncio.ensure_future(one.answer()): one for one in (first, second)}
        done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED, timeout=DEADLINE_S)
        bodies = [task.result().body for task in done]
        assert len(bodies) == 1
        assert bodies[0].startswith(event("one ")) and bodies[0].count(b"broken_stream") == 1
        assert bodies[0].endswith(DONE) and b"HTTP/1.1" not in bodies[0]
        from_piece(0, 4)(taken.calls[0])
        assert (await next(task for task in pending if task not in done)).body == WHOLE


async def test_streaming_time_is_not_waiting_time() -> None:
    one, other = (Scripted(name, takes, native=True) for name in ("one", "other"))
    async with (
        served(one, other, replica_limit=1, queue_timeout_s=1.5) as running,
        connect(running.port) as first,
        connect(running.port) as second,
        connect(running.port) as third,
    ):
        for n, client in enumerate((first, second, third)):
            client.send("POST", CHAT, chat(stream=True))
            await running.opened(n + 1)
        await until(lambda: len(running.router.waiting) == 1, "the third waits")
        from_piece(0, 4)(one.calls[0])
        await until(lambda: len(one.calls) == 2, "the third has its turn")
        one.calls[1].begin_frames()
        one.calls[1].frame(event("one "), *ids(0))
        await asyncio.sleep(1.6)  # longer than it may wait
        one.calls[1].drop()
        await until(lambda: len(running.router.waiting) == 1, "it waits again")
        from_piece(0, 4)(other.calls[0])
        await until(lambda: len(other.calls) == 2, "and goes on")
        from_piece(1, 4)(other.calls[1])
        assert [(await client.answer()).body for client in (first, second, third)] == [WHOLE] * 3
        assert all(remembered.record().waited_s < 1.4 for remembered in running.router.history.decisions)


async def test_a_request_for_a_model_without_its_last_replica_is_told_to_retry() -> None:
    coming = Scripted("coming", says(GOOD))
    async with coming.running(), served(queue_timeout_s=0.1) as running, connect(running.port) as client:
        assert (await client.post(CHAT, chat())).status == 503  # nobody is known
        coming.control["/v1/models"] = (500, {})
        running.front.upkeep.add(coming.spec)
        answer = await client.post(CHAT, chat())
        assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "no_replica", "1")
        running.front.upkeep.remove("coming")
        coming.control["/v1/models"] = (200, {"data": [{"id": MODEL}]})
        running.front.upkeep.add(coming.spec)
        await until(lambda: running.router.members.models, "its models are known")
        await until(lambda: running.member("coming").candidate.unavailable is None, "the replica takes requests")
        assert (await client.post(CHAT, chat())).body == GOOD
        running.front.upkeep.remove("coming")
        answer = await client.post(CHAT, chat())
        assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "no_replica", "1")
        assert (await client.post(CHAT, chat() | {"model": "never"})).status == 404


async def test_a_long_waiting_prompt_is_not_tried_where_only_shorter_ones_fit() -> None:
    small, big = Scripted("small", says(GOOD), native=True), Scripted("big", takes, native=True)
    small.control["/load"][1]["max_model_len"] = 8
    asked = {"model": MODEL, "prompt": "x" * 64}
    async with (
        served(small, big, replica_limit=1) as running,
        connect(running.port) as first,
        connect(running.port) as second,
        connect(running.port) as third,
    ):
        first.send("POST", COMPLETIONS, asked)
        await until(lambda: big.calls, "the replica is full")
        second.send("POST", COMPLETIONS, asked)
        await until(lambda: len(running.router.waiting) == 1, "one request waits")
        decided = sum(running.router.history.counts.decision_s.counts)
        await asyncio.sleep(0.4)  # the clock looks a few times
        assert sum(running.router.history.counts.decision_s.counts) == decided
        assert (await third.post(COMPLETIONS, {"model": MODEL, "prompt": "x"})).body == GOOD
        big.calls[0].answer(GOOD)
        await until(lambda: len(big.calls) == 2, "the second has its turn")
        big.calls[1].answer(GOOD)
        assert (await first.answer()).body == (await second.answer()).body == GOOD


async def test_a_replica_that_never_began_with_a_prompt_is_not_taken_to_have_it_cached() -> None:
    script = Script(drops, says(b"{}", 400), says(GOOD))
    async with served(*script.replicas(1, native=True)) as running, connect(running.port) as client:
        running.member("r0").block_size = 16  # as if it had events
        running.router.members.arrange()
        kept = []
        for _ in range(2):  # the first is asked twice
            await client.post(COMPLETIONS, {"model": MODEL, "prompt": "x" * 64})
            await running.idle()
            kept.append(len(running.router.placement.index.optimistic))
        assert kept == [0, 4]


@pytest.mark.parametrize(("queue_s", "still_s", "gone_s"), [(100.0, 150.0, 300.0), (10_000.0, 600.0, 700.0)])
async def test_what_waits_in_a_long_queue_counts_as_cached_while_it_may_have_its_turn(
    queue_s: float, still_s: float, gone_s: float
) -> None:
    """No longer than a first token is waited for, though."""
    script = Script(says(GOOD))
    async with served(*script.replicas(1, native=True)) as running, connect(running.port) as client:
        member, router = running.member("r0"), running.router
        member.block_size = 16
        router.members.arrange()
        load = Load(waiting=9, queued_prefill_tokens=int(queue_s * 8000), prefill_tokens_per_s=8000.0)
        member.load.reported(load, router.now_s())
        await client.post(COMPLETIONS, {"model": MODEL, "prompt": "x" * 64})
        await running.idle()
        router.placement.index.optimistic.expire(router.now_s() + still_s)
        assert len(router.placement.index.optimistic) == 4
        router.placement.index.optimistic.expire(router.now_s() + gone_s)
        assert len(router.placement.index.optimistic) == 0


async def test_prompts_are_kept_account_of_where_the_policy_asks_what_they_would_drive_out() -> None:
    for policy, answer, pages in (("cost", says(GOOD), 1), ("cost", says(b"{}", 400), 0), ("prefix", says(GOOD), 0)):
        script = Script(answer)
        async with served(*script.replicas(1, native=True), policy=policy) as running, connect(running.port) as client:
            member = running.member("r0")
            member.block_size = 1024
            running.router.members.arrange()
            member.load.describe(1024, 100)
            await client.post(COMPLETIONS, {"model": MODEL, "prompt": "x" * 1500})
            await running.idle()
            assert member.candidate.ages is not None
            assert len(member.candidate.ages) == pages


# ---- what nobody thought of


SALTED = Key(name="k", digest=digest_of("secret"), salt="s")


@pytest.mark.virtual(False)
@pytest.mark.parametrize("apart", [False, True])
async def test_a_body_that_cannot_be_salted_is_refused_and_leaves_nothing_behind(apart: bool) -> None:
    rest = b"x" * 3_000_000 if apart else b"x"
    body = b'{"model":"m","messages":[{"role":"user","content":"%b"}],"cache_salt":"x","\xff":1}' % rest
    async with served(named("r0"), keys=(SALTED,), demand_key=True) as running, connect(running.port) as client:
        answer = await client.post(CHAT, body, authorization="Bearer secret")
        assert answer.status == 400 and "UTF-8" in answer.error["message"]
        await running.idle()
        answer = await client.post(CHAT, chat(cache_salt="x"), authorization="Bearer secret")
        assert answer.json == "r0"  # the negative control


class Resumed(Scripted):
    """An engine whose streams the router reads on their way."""

    @property
    def spec(self) -> ReplicaSpec:
        return ReplicaSpec(name=self.name, url=f"http://127.0.0.1:{self.port}", engine="vllm", resume=True)


async def test_a_body_that_cannot_be_read_for_continuing_with_its_answer_is_refused() -> None:
    ours, vllm = Scripted("ours", says(GOOD), native=True), Resumed("vllm", says(GOOD))
    body = b'{"model":"m","prompt":"hi","stream":true,"thinking_token_budget":"\xff"}'
    async with served(ours, vllm) as running, connect(running.port) as client:
        assert running.router.members.models[MODEL].tokens.prompts is not None
        answers = [await client.post(COMPLETIONS, body) for _ in range(2)]
        assert sorted(answer.status for answer in answers) == [200, 400], answers  # nothing reads it for ours
        await running.idle()


@pytest.mark.virtual(False)
@pytest.mark.parametrize("stage", ["choose", "begun", "take", "prompted"])
async def test_a_mistake_of_ours_ends_one_request_and_leaves_nothing_behind(
    stage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Answer if stage in ("begun", "take") else Request
    right = getattr(owner, stage)

    def wrong(routing: Any, *arguments: object) -> Any:
        if (routing.facts if owner is Answer else routing).peek.prompt_cache_key == "unlucky":
            raise ZeroDivisionError
        return right(routing, *arguments)

    monkeypatch.setattr(owner, stage, wrong)
    async with served(named("r0")) as running, connect(running.port) as client:
        answer = await client.post(CHAT, chat("x" * 3_000_000, prompt_cache_key="unlucky"))
        assert (answer.status, answer.error["code"]) == (500, "internal_error")
        await running.idle()
        assert "ZeroDivisionError" in caplog.text
        assert (await client.post(CHAT, chat())).json == "r0"


async def test_a_mistake_of_ours_leaves_the_others_that_wait_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(takes, says(GOOD))
    async with served(*script.replicas(1), replica_limit=1) as running, AsyncExitStack() as stack:
        first, unlucky, last = [await stack.enter_async_context(connect(running.port)) for _ in range(3)]
        first.send("POST", CHAT, chat())
        await until(lambda: script.calls, "the replica is full")
        unlucky.send("POST", CHAT, chat(prompt_cache_key="unlucky"))
        await until(lambda: len(running.router.waiting) == 1, "one request waits")
        last.send("POST", CHAT, chat())
        await until(lambda: len(running.router.waiting) == 2, "two requests wait")
        right = Request.choose

        def wrong(routing: Request) -> Decision | None:
            if routing.peek.prompt_cache_key == "unlucky":
                raise ZeroDivisionError
            return right(routing)

        monkeypatch.setattr(Request, "choose", wrong)
        script.calls[0].answer(GOOD)
        assert [(await one.answer()).status for one in (first, unlucky, last)] == [200, 500, 200]


async def test_an_unwritable_access_log_blocks_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    async with served(named("r0"), access_log="/dev/full") as running, connect(running.port) as client:
        for _ in range(3):
            assert (await client.post(CHAT, chat())).json == "r0"
        await running.idle()
    assert caplog.text.count("Cannot write the access log") == 1


# ---- sessions, salts, counters


async def test_a_session_stays_with_its_replica() -> None:
    replicas = [named(name) for name in "abcd"]
    async with served(*replicas, policy="session") as running, connect(running.port) as client:
        by_session: dict[str, set[str]] = {}
        for n in range(40):
            session = f"s{n % 8}"
            header = ("x_session_id", "x_claude_code_session_id", "")[n % 3]
            by_header = {header: session} if header else {}
            body = chat() if header else chat(prompt_cache_key=session)
            by_session.setdefault(session, set()).add((await client.post(CHAT, body, **by_header)).json)
        assert all(len(replicas) == 1 for replicas in by_session.values())
        assert len(set.union(*by_session.values())) > 1  # the negative control: they are spread


async def test_everything_is_remembered_but_the_words() -> None:
    script = Script(says(b'{"usage":{"prompt_tokens_details":{"cached_tokens":48}}}'), drops)
    async with served(*script.replicas(1)) as running, connect(running.port) as client:
        await client.post(CHAT, chat("secret words"), x_request_id="my-id")
        await client.post(CHAT, chat("secret words"))
        good, bad = [one.record() for one in running.router.history.decisions]
        assert (good.request_id, good.status, good.chosen, good.reported_cached_tokens) == ("my-id", 200, "r0", 48)
        assert good.ttft_s is not None and good.ttft_s <= good.duration_s
        assert (bad.status, bad.ttft_s) == (503, None) and bad.why and "no replica" not in (good.why or "")
        assert "secret" not in repr((good, bad))


async def test_a_long_body_that_is_refused_is_not_kept_in_a_cycle_of_references() -> None:
    """The collector may take its time, and bodies are megabytes."""
    body = {"model": MODEL, "prompt": "x" * 200_000}
    async with served(*Script(says(b"{}")).replicas(1, native=True)) as running, connect(running.port) as client:
        with no_request_in_a_cycle():
            client.send("POST", COMPLETIONS, body)
            assert (await client.answer()).status == 400
