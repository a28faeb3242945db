"""Large bodies: limited by total size and by count, read without blocking others, and released."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from contextlib import AsyncExitStack
from typing import Any

import pytest

from api.errors import ApiError
from api.http.bodies import LARGEST_BODY_BYTES, MEDIUM_BYTES, SMALL_BYTES, Bodies, check_limits
from api.native import Native
from api.process.settings import Unusable
from api.prompts.counting import check_body
from router.prompts.reading import client as reading_client
from router.prompts.reading.client import LONG_BODY_BYTES, is_quick
from router.prompts.reading.messages import OUT_OF_MEMORY, Body, Found, Leave, framed
from router.tenants.keys import Key, digest_of
from tests.router.loopback import until
from tests.router.scripted import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Answer,
    Call,
    Client,
    Scripted,
    Served,
    chat,
    connect,
    named,
    says,
    served,
    up,
)

MEGABYTE = 2**20
GOOD = b'"good"'
LIMIT = 16 * MEGABYTE
SPACE = b" " * (LONG_BODY_BYTES + 1)  # before a body it changes nothing but how long it is
LOCAL = {"host": "localhost"}
SALTED = Key(name="tenant", digest=digest_of("secret"), salt="apart")


def ours(*handlers: Any) -> Scripted:
    return Scripted("ours", *(handlers or (says(GOOD),)), native=True)


def head(size: int, path: str = CHAT, more: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n%b\r\n" % (path.encode(), size, more)


def chunk(size: int) -> bytes:
    return b"%x\r\n%b\r\n" % (size, b" " * size)


# ---- how many bytes may be in progress


def test_bodies_are_counted_until_they_are_released() -> None:
    bodies = Bodies(LIMIT)
    held = [bodies.claim(3 * MEGABYTE, 0), bodies.claim(9 * MEGABYTE, 0)]
    assert bodies.used_bytes == 12 * MEGABYTE
    with pytest.raises(ApiError) as refused:
        bodies.claim(2 * MEGABYTE, 0)
    assert (refused.value.status, refused.value.headers["Retry-After"]) == (429, "1")
    assert bodies.claim(MEDIUM_BYTES, 0) == MEDIUM_BYTES, "a quarter is reserved for small bodies"
    assert bodies.claim(SMALL_BYTES, 0) == 0, "small bodies are not counted"
    held[0] = bodies.claim(MEDIUM_BYTES, held[0])  # the parsed request takes less
    for one in (*held, MEDIUM_BYTES):
        bodies.release(one)
    assert bodies.used_bytes == 0


async def grown(client: Client, running: Served, size: int) -> None:
    """A body of unknown length that does not end."""
    before = running.router.bodies.used_bytes
    client.write(b"POST %b HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT.encode() + chunk(size))
    await until(lambda: running.router.bodies.used_bytes == before + size, "it has come")


async def test_unfinished_bodies_take_bounded_memory_and_no_room_from_small_ones() -> None:
    async with served(ours(), max_bodies_bytes=LIMIT) as running, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(running.port)) for _ in range(4)]
        for client in clients[:3]:
            await grown(client, running, 4 * MEGABYTE)
        clients[3].write(b"POST %b HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT.encode())
        clients[3].write(chunk(2 * MEGABYTE))
        told = await clients[3].answer()
        assert (told.status, told.error["code"], told.headers["retry-after"]) == (429, "queue_full", "1")
        assert told.headers["connection"] == "close"
        async with connect(running.port) as small, connect(running.port) as medium:
            assert (await small.post(CHAT, chat())).status == 200
            assert (await medium.post(CHAT, chat("x" * (MEGABYTE // 2)))).status in (200, 400)
        clients[0].leave()
        await until(lambda: running.router.bodies.used_bytes == 8 * MEGABYTE, "its memory is free")
        async with connect(running.port) as client:
            await grown(client, running, 4 * MEGABYTE)
    assert running.router.bodies.used_bytes == 0


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/explain"])
async def test_a_body_without_room_is_refused_before_it_comes(path: str) -> None:
    async with served(ours(), max_bodies_bytes=LIMIT) as running, connect(running.port) as client:
        async with connect(running.port) as other:
            await grown(other, running, 12 * MEGABYTE)
            client.write(head(2 * MEGABYTE, path, b"expect: 100-continue\r\n"))
            told = await client.answer()
            assert (told.status, told.error["code"]) == (429, "queue_full")
        await until(lambda: running.router.bodies.used_bytes == 0, "the other one has left")
        async with connect(running.port) as again:
            told = await again.post(path, SPACE + json.dumps(chat()).encode(), **LOCAL)
            assert told.status in (200, 403)


@pytest.mark.parametrize("path", [CHAT, "/explain"])
async def test_bodies_that_wait_for_their_turn_are_read_up_to_a_size(path: str) -> None:
    """Fifteen of sixty kilobytes behind a request that is still answered: none of them has been admitted."""
    go_on = asyncio.Event()

    async def wait(call: Call) -> None:
        await go_on.wait()
        call.answer(GOOD)

    body = b" " * 60_000 + json.dumps(chat()).encode()
    async with served(ours(wait)) as running, connect(running.port) as client:
        client.send("POST", CHAT, chat())
        await running.opened(1)
        [connection] = [one for one in running.front.server.connections.open if one._open]
        client.write((head(len(body), path) + body) * 15)

        def early() -> int:
            return sum(len(cycle.body) for cycle in list(connection._open)[1:])

        await until(lambda: connection._read_paused or early() > 14 * len(body), "they are read, or are not")
        assert early() < 64 * 1024 + 256 * 1024  # and one read of the connection
        go_on.set()
        assert [(await client.answer()).status for _ in range(16)] == [200] * 16


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/explain"])
async def test_a_length_of_thousands_of_digits_is_refused(path: str) -> None:
    """`int` takes 4,300 of them, and the parser any number of leading zeros."""
    body = json.dumps(chat()).encode()
    async with served(ours()) as running:
        for digits, status in ((19, 200), (20, 400), (5000, 400)):
            async with connect(running.port) as client:
                length = b"%d" % len(body)
                client.write(head(0, path).replace(b": 0\r\n", b": %b\r\n" % length.zfill(digits)) + body)
                assert (await client.answer()).status == status, digits


async def test_what_is_counted_is_released_however_a_request_ends() -> None:
    replica = ours(says(GOOD))
    async with served(replica, max_bodies_bytes=LIMIT) as running:
        bodies = [SPACE + json.dumps(body).encode() for body in (chat(), chat(model="other"), [1], chat(n="x"))]
        statuses = []
        for body in bodies:
            async with connect(running.port) as client:
                statuses.append((await client.post(CHAT, body)).status)
            await until(lambda: running.router.bodies.used_bytes == 0, "nothing is counted any more")
        assert statuses == [200, 404, 400, 400]


async def test_a_body_may_come_slowly_but_not_for_ever() -> None:
    async with served(ours()) as running, connect(running.port) as client:
        client.write(head(1000) + b"{")
        await running.opened(1)
        [connection] = [one for one in running.front.server.connections.open if one._open]
        limits, now_s = connection._limits, asyncio.get_running_loop().time()
        for after_s, told in ((limits.whole_body_s - 1, False), (limits.whole_body_s + 1, True)):
            connection._since_s = now_s + after_s - limits.body_s / 2  # a byte came a little while ago
            connection.end_if_overdue(now_s + after_s)
            assert (connection._awaited == "end") is told
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")


# ---- refused by counting


MANY = {
    "token ids": (b'{"model":"m","prompt":[%b]}' % b",".join([b"1"] * 2_000_000), "2000000 tokens"),
    "a list of token ids": (b'{"model":"m","prompt":[[1],[%b]]}' % b",".join([b"1"] * 2_000_000), "2000000 tokens"),
    "prompts": (b'{"model":"m","prompt":[%b]}' % b",".join([b"[1]"] * 2000), "2,000 entries"),
    "messages": (b'{"model":"m","messages":[%b]}' % b",".join([b"{}"] * 70_000), "70,000 entries"),
    "biases": (b'{"model":"m","logit_bias":{%b}}' % b",".join([b'"1":1'] * 301), "301 entries"),
    "stop tokens": (b'{"model":"m","stop_token_ids":[%b]}' % b",".join([b"1"] * 1025), "1,025 entries"),
}


@pytest.mark.parametrize("shape", MANY)
def test_too_many_are_counted_before_anything_is_built(shape: str) -> None:
    body, found = MANY[shape]
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as refused:
            check_body(body, 8192, chat=shape == "messages")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused.value.status == 400 and found in refused.value.message, refused.value.message
    assert peak < 4 * len(body) + 8 * MEGABYTE


def test_what_is_legal_is_not_refused_by_its_count() -> None:
    texts = ",".join(["[1,2]"] * 100_000)
    legal: list[dict[str, Any]] = [
        {"prompt": texts},
        {"prompt": [texts, texts]},
        {"prompt": [[1, 2, 3]] * 1024},
        {"prompt": list(range(8191))},
        {"messages": [{"role": "user", "content": texts}] * 3},
        {"logit_bias": {str(number): 1 for number in range(300)}, "stop_token_ids": list(range(1024))},
        {"prompt": [], "logit_bias": {}, "stop_token_ids": []},
        {"prompt": None, "messages": "no list", "logit_bias": 7},
    ]
    for fields in legal:
        for chat_request in (True, False):
            check_body(json.dumps(fields).encode(), 8192, chat=chat_request)
    check_body(b"no JSON", 8192, chat=True)


@pytest.mark.parametrize("size", [10, LONG_BODY_BYTES])
@pytest.mark.parametrize(
    ("path", "ignored"),
    [(CHAT, {"prompt": [1] * 10_000}), (COMPLETIONS, {"messages": [{}] * 66_000, "prompt": "hi"})],
    ids=["chat", "completion"],
)
async def test_fields_that_are_ignored_are_not_counted(path: str, ignored: dict[str, Any], size: int) -> None:
    asked = chat(**ignored) if path == CHAT else {"model": MODEL, **ignored}
    async with served(ours()) as running, connect(running.port) as client:
        answer = await client.post(path, b" " * size + json.dumps(asked).encode())
        assert answer.status == 200, answer


# ---- read in another process


@pytest.mark.parametrize(
    ("body", "quick"),
    [
        (b"[" * SMALL_BYTES, True),
        (b"x" * LONG_BODY_BYTES, True),
        (b"x" * (LONG_BODY_BYTES + 1), False),
        (b"[" * 2 * SMALL_BYTES, False),
        (b"{" * 2 * SMALL_BYTES, False),
        (b"1," * 4 * SMALL_BYTES, False),
    ],
    ids=["small", "text", "long text", "lists", "objects", "numbers"],
)
def test_what_takes_long_to_read_is_known_before_it_is_read(body: bytes, quick: bool) -> None:
    assert is_quick(body) is quick


class Kept:
    """Requests at a replica, without the parts that differ each time."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.natives: list[Native] = []

    def __call__(self, call: Call) -> None:
        if call.header("content-type") == "application/x-warmroute-request":
            native, body = call.native
            native.response_id = native.created = native.seed = None
            native.priority = 0.0
            self.natives.append(native)
        else:
            body = call.json
        self.bodies.append(body)
        call.answer(GOOD)


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, chat("hello, world", temperature=0.5, seed=3)),
    "tools": (CHAT, chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": [2]}}}])),
    "parts": (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "text", "text": "é"}]}]}),
    "a text": (COMPLETIONS, {"model": MODEL, "prompt": "one, two", "max_tokens": 3, "logit_bias": {"7": 1.5}}),
    "texts": (COMPLETIONS, {"model": MODEL, "prompt": ["one", "two"], "n": 2, "cache_salt": "s"}),
    "token ids": (COMPLETIONS, {"model": MODEL, "prompt": [1, 2, 3], "stream": False, "stop": ["x", "y"]}),
    "lists of token ids": (COMPLETIONS, {"model": MODEL, "prompt": [[1, 2, 3], [4]], "user": "u"}),
}


@pytest.mark.parametrize("shape", ASKED)
async def test_our_replica_gets_the_same_however_a_body_was_read(shape: str) -> None:
    kept = Kept()
    path, asked = ASKED[shape]
    raw = json.dumps(asked).encode()
    async with served(ours(kept)) as running, connect(running.port) as client:
        for body in (raw, SPACE + raw):
            answer = await client.post(path, body)
            assert answer.status == 200, answer
        explained = [(await client.post("/explain", body, **LOCAL)).json for body in (raw, SPACE + raw)]
    assert kept.natives[0] == kept.natives[1] and kept.natives[0].prompts
    meant = {name: kept.bodies[1][name] for name in asked}
    if "tools" not in asked and shape != "parts":
        assert meant == asked
    assert explained[0] == explained[1]


@pytest.mark.parametrize("shape", ASKED)
async def test_a_foreign_replica_gets_the_same_however_a_body_was_read(shape: str) -> None:
    kept = Kept()
    path, asked = ASKED[shape]
    raw = json.dumps(asked).encode()
    async with (
        served(Scripted("r0", kept), keys=(SALTED,), demand_key=True) as running,
        connect(running.port) as client,
    ):
        for body in (raw, SPACE + raw):
            assert (await client.post(path, body, authorization="Bearer secret")).status == 200
        [first, second] = (one.record() for one in running.router.history.decisions)
        for name in ("prompt_tokens", "exact"):
            assert getattr(first, name) == getattr(second, name)
    assert kept.bodies[0] == kept.bodies[1]
    assert kept.bodies[0]["cache_salt"].startswith("apart")


async def test_what_our_replicas_would_not_read_is_not_sent_to_them() -> None:
    kept = Kept()
    raw = json.dumps(chat(unknown=["x"] * 100_000)).encode()
    async with served(ours(kept)) as running, connect(running.port) as client:
        assert (await client.post(CHAT, raw)).status == 200
    assert "unknown" not in kept.bodies[0] and kept.bodies[0]["messages"] == chat()["messages"]


@pytest.mark.parametrize("given", [None, "mine", 7])
async def test_a_large_body_that_is_only_forwarded_is_read_and_salted_too(given: Any) -> None:
    kept, other = Kept(), Kept()
    body = {"model": "b", "input": [1] * 100_000} | ({} if given is None else {"cache_salt": given})
    replicas = (Scripted("a", other, models=["a"]), Scripted("b", kept, models=["b"]))
    async with served(*replicas, keys=(SALTED,), demand_key=True) as running, connect(running.port) as client:
        answer = await client.post("/v1/embeddings", body, authorization="Bearer secret")
        assert answer.status == 200, answer
        listed = await client.post("/v1/responses", [1] * 100_000, authorization="Bearer secret")
        assert listed.status == 400 and "object" in listed.error["message"]
    assert not other.bodies
    assert kept.bodies[0].pop("cache_salt") == ("apart.mine" if given == "mine" else "apart")
    assert kept.bodies[0] == {name: value for name, value in body.items() if name != "cache_salt"}


@pytest.mark.parametrize("given", [None, "theirs"])
async def test_another_kind_of_replica_that_takes_over_gets_the_salt_of_the_key(given: str | None) -> None:
    kept = Kept()
    foreign = Scripted("foreign", kept)

    async def die_beside_another(call: Call) -> None:
        running.front.upkeep.add(foreign.spec)
        await until(lambda: up(running.front, {"foreign": foreign}), "the replica takes requests")
        call.drop()

    body = chat() if given is None else chat(cache_salt=given)
    async with (
        foreign.running(),
        served(ours(die_beside_another), keys=(SALTED,), demand_key=True) as running,
        connect(running.port) as client,
    ):
        answer = await client.post(CHAT, SPACE + json.dumps(body).encode(), authorization="Bearer secret")
        assert answer.status == 200, answer
    assert kept.bodies[0]["cache_salt"] == ("apart" if given is None else f"apart.{given}")


def pid_of(running: Served) -> int:
    process = running.router.reading._medium._process
    assert process is not None
    return int(process.pid)


async def test_a_process_that_dies_takes_one_request_with_it_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = SPACE + json.dumps(chat()).encode()
    async with served(ours()) as running, connect(running.port) as client:
        assert (await client.post(CHAT, raw)).status == 200
        first = pid_of(running)
        os.kill(first, signal.SIGSTOP)  # as one that reads something that takes for ever
        monkeypatch.setattr(reading_client, "READ_LIMIT_S", 0.2)
        told = await client.post(CHAT, raw)
        assert (told.status, told.error["code"]) == (413, "body_too_costly")
        monkeypatch.undo()
        async with connect(running.port) as other:
            assert (await other.post(CHAT, raw)).status == 200
        assert pid_of(running) != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


async def test_a_killed_process_costs_no_answer_and_the_next_ends_with_the_router() -> None:
    raw = SPACE + json.dumps(chat()).encode()
    async with served(ours()) as running, connect(running.port) as client:
        assert (await client.post(CHAT, raw)).status == 200
        first = pid_of(running)
        os.kill(first, signal.SIGSTOP)
        client.send("POST", CHAT, raw)
        await until(lambda: running.router.bodies.used_bytes == len(raw), "it has come")
        os.kill(first, signal.SIGKILL)
        assert (await client.answer()).status == 200
        second = pid_of(running)
        assert second != first
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


async def test_processes_that_end_at_once_are_no_fault_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    raw = SPACE + json.dumps(chat()).encode()
    async with served(ours()) as running, connect(running.port) as client:
        told = await client.post(CHAT, raw)
        assert (told.status, told.error["code"], told.headers["retry-after"]) == (503, "reading_failed", "1")
        monkeypatch.undo()
        assert (await client.post(CHAT, raw)).status == 200


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_a_body_there_is_no_memory_for_is_never_taken_for_messages() -> None:
    """An unread body stays in the pipe: here it would be a message of the router's, and another tenant's body."""
    planted = json.dumps(chat("planted")).encode()
    unread = framed(Body(len(planted), whole=True)) + planted + framed(Leave())
    run = "Process(sys.stdin.buffer, sys.stdout.buffer, most_bytes=2**20).run()"
    start = f"import sys; from router.prompts.reading.process import Process; {run}"
    asked = framed(Body(64 * MEGABYTE, whole=True)) + unread
    ended = subprocess.run([sys.executable, "-c", start], input=asked, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (OUT_OF_MEMORY, b""), ended.stderr


@pytest.mark.chaos
@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
async def test_a_body_larger_than_the_memory_to_read_it_ends_the_process() -> None:
    reading = reading_client.Reading(10)
    found: list[Found] = []
    try:
        with pytest.raises(ApiError) as refused:
            await reading.read(bytes(2 * LARGEST_BODY_BYTES + MEGABYTE), found.append)
        assert (refused.value.status, refused.value.code) == (413, "body_too_costly")
        await reading.read(b" " * 2 * MEGABYTE + json.dumps(chat("next")).encode(), found.append)
        assert [one.fields for one in found] == [{"model": MODEL}]
    finally:
        await reading.close()


def test_bodies_may_not_be_allowed_to_outgrow_the_memory_to_read_them() -> None:
    check_limits({"max_body_bytes": LARGEST_BODY_BYTES, "max_bodies_bytes": 2 * LARGEST_BODY_BYTES})
    with pytest.raises(Unusable, match="134217729 is too large"):
        check_limits({"max_body_bytes": LARGEST_BODY_BYTES + 1, "max_bodies_bytes": 4 * LARGEST_BODY_BYTES})


async def test_a_client_that_leaves_before_its_body_is_read_leaves_nothing() -> None:
    raw = SPACE + json.dumps(chat()).encode()
    replica = ours()
    async with served(replica) as running, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(running.port)) for _ in range(4)]
        assert (await clients[0].post(CHAT, raw)).status == 200
        os.kill(pid_of(running), signal.SIGSTOP)
        for client in clients[:3]:
            client.send("POST", CHAT, raw)
        await until(lambda: running.router.bodies.used_bytes == 3 * len(raw), "all three have come")
        for client in clients[:3]:
            client.leave()
        await until(lambda: running.router.bodies.used_bytes == 0, "they have left")
        os.kill(pid_of(running), signal.SIGCONT)
        assert (await clients[3].post(CHAT, raw)).status == 200
    assert len(replica.calls) == 2


@pytest.mark.chaos
async def test_what_takes_too_much_memory_is_refused_or_left_to_the_engine() -> None:
    """A list of ten million small objects, which is legal JSON of thirty megabytes."""
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[%b]}' % b",".join([b"{}"] * 10_000_000)
    statuses: list[Answer] = []
    for replica in (ours(), named("foreign")):
        async with served(replica) as running, connect(running.port) as client, connect(running.port) as other:
            statuses.append(await client.post(CHAT, body))
            assert (await other.post(CHAT, SPACE + json.dumps(chat()).encode())).status == 200
    assert (statuses[0].status, statuses[0].error["code"]) == (413, "body_too_costly")
    assert statuses[1].status == 200
