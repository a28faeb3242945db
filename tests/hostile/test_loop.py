"""Nothing that a client or a replica can make large is parsed, joined or searched in the router's event loop.

The bodies and answers here are an eighth of the largest legal ones, and so is the time that they may take.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from api.native import encode_frame
from api.tokens.tokenizer import ByteTokenizer
from router.http import routes
from router.prompts.prompt import Peek, Prompt
from router.prompts.reading.client import LONG_EVENT_BYTES
from router.proxy.streams.continuation import Continuation
from router.proxy.streams.fields import without_ids
from tests.hostile.attackers import memory
from tests.hostile.clocked import Clocked, clocked
from tests.hostile.test_routes import routes_of
from tests.router.keeping import PATH, Keeping
from tests.router.scripted import CHAT, COMPLETIONS, MODEL, Call, Handler, connect

MEGABYTE = 2**20
SIZE = 4 * MEGABYTE
MAX_S = 0.06  # a planted parser takes longer
ANSWER_S = 60.0
CONNECTIONS = 200
FIRST = "warmroute"
SECOND = "vllm"
REWRITES = f"[[rewrites]]\nmodel = '{MODEL}'\ntarget = 'other'\n"
GENERATING = (CHAT, COMPLETIONS, "/v1/messages", PATH, "/v1/embeddings")
EVENT = b'{"id":"resp_1","created":1,"model":"m","choices":[{"index":0,"text":"a","delta":{"content":"a"}}]'


def filled(pattern: bytes, size: int) -> bytes:
    return pattern * (size // len(pattern))


def shapes(size: int) -> dict[str, bytes]:
    """JSON values that take long to parse, or to search."""
    return {
        "lists": b"[%b[]]" % filled(b"[],", size),
        "objects": b"[%b{}]" % filled(b"{},", size),
        "keys": b'{%b"a":1}' % filled(b'"a":1,', size),
        "numbers": b"[%b1]" % filled(b"1,", size),
        "escapes": b'"%b"' % filled(b'\\n\\"', size),
        "spaces": b"[%b]" % filled(b" ", size),
        "token ids": b"[%b1]" % filled(b'"token_ids":[1],', size),
        "figures": b"{%b}" % filled(b'"cached_tokens":1,"prompt_tokens":2,', size)[:-1],
        "a figure": b'{"cached_tokens"%b:1}' % filled(b" ", size),
    }


def everything(size: int) -> bytes:
    """A body that fits every route, with a part of each shape where it may do harm."""
    part = shapes(size // 9)
    named = b'{"type":"item_reference","id":"msg_0_0","x":%b}' % part["lists"]
    fields = {
        "previous_response_id": b'"resp_0"',
        "input": b"[%b]" % named,
        "messages": b'[{"role":"user","content":%b}]' % part["escapes"],
        "prompt": part["numbers"],
        "metadata": part["keys"],
        "tools": part["objects"],
        "kv_transfer_params": b"null",
        **{f"x{n}": part[name] for n, name in enumerate(("spaces", "token ids", "figures", "a figure"))},
    }
    return b'{"model":"m","max_tokens":2,"url":7%b}' % b"".join(
        b',"%b":%b' % (name.encode(), value) for name, value in fields.items()
    )


def conversation(size: int) -> bytes:
    """A long conversation as applications have it; only its length is unusual."""
    said = b",".join([b'{"role":"user","content":"%b"}' % (b"what, \\n now? " * 400)] * (size // 2 // 5600))
    return b'{"model":"m","max_tokens":2,"messages":[%b],"input":[%b],"prompt":"x"}' % (said, said)


def small_items(size: int) -> bytes:
    """One of as many items as possible, which continues a response: a million for each four megabytes."""
    said, continued = shapes(size)["objects"], b'{"model":"m","max_tokens":2,"previous_response_id":"resp_0"'
    return b'%b,"input":%b,"messages":[],"prompt":"x"}' % (continued, said)


@asynccontextmanager
async def fronted(*replicas: Keeping, **config: Any) -> AsyncIterator[Clocked]:
    async with AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica.running())
        specs = [{"name": one.name, "url": one.spec.url, "engine": one.spec.engine} for one in replicas]
        router = await stack.enter_async_context(clocked(replicas=specs, max_body_bytes=SIZE + MEGABYTE, **config))
        await router.longest_s()  # of its start
        yield router


async def asked(port: int, method: str, path: str, body: bytes, **headers: str) -> int:
    """Send the request, and read the answer; return its status."""
    async with asyncio.timeout(ANSWER_S), connect(port, 2**20) as client:
        client.send(method, path, body, host="localhost", content_type="application/json", **headers)
        first, *lines = (await client.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status, answered = int(first.split()[1]), dict(line.split(": ", 1) for line in lines if line)
        left = 0 if method == "HEAD" else int(answered.get("content-length", -1))
        while left:
            got = await client.reader.read(2**20)
            left -= len(got) if left > 0 else 0
            if not got or (left < 0 and got.endswith(b"0\r\n\r\n")):
                break
        return status


class Longest:
    """The routes that have kept the loop too long."""

    def __init__(self, router: Clocked) -> None:
        self.router = router
        self.found: dict[str, float] = {}

    async def over(self, name: str, again: Callable[[], Awaitable[object]]) -> None:
        """Note the pause of what was just done; do it once more if that was too long, as the collector may have run."""
        if await self.router.longest_s() > MAX_S:
            await again()
            if (pause_s := await self.router.longest_s()) > MAX_S:
                self.found[name] = pause_s


async def walked(router: Clocked, body: bytes, *paths: str) -> dict[str, float]:
    longest = Longest(router)
    for path in paths or {path for _, path, _ in routes_of(routes.TABLE)}:
        methods = {method for method, at, _ in routes_of(routes.TABLE) if at == path}
        for method in {"POST"} & methods or methods - {"HEAD"}:

            async def ask(method: str = method, path: str = path) -> int:
                return await asked(router.port, method, path, body, authorization="Bearer key")

            await ask()
            await longest.over(f"{method} {path}", ask)
    return longest.found


@pytest.mark.chaos
@pytest.mark.timeout(180)
@pytest.mark.parametrize("engine", [FIRST, SECOND])
async def test_no_route_keeps_the_loop_with_the_largest_body(engine: str, tmp_path: Path) -> None:
    (tmp_path / "rewrites.toml").write_text(REWRITES)
    more = {"keys": ["key"], "model_rewrites_file": str(tmp_path / "rewrites.toml")}
    async with fronted(Keeping("r0", engine), **more) as router:
        assert await walked(router, everything(SIZE), *(GENERATING if engine == SECOND else ())) == {}
        longest = Longest(router)
        for path, body in [*product(GENERATING, [conversation(SIZE)]), (PATH, small_items(SIZE))]:

            async def ask(path: str = path, body: bytes = body) -> int:
                return await asked(router.port, "POST", path, body, authorization="Bearer key")

            await ask()
            await longest.over(path, ask)
        assert longest.found == {}


async def test_a_route_that_parses_in_the_loop_is_found() -> None:
    async with fronted(Keeping("r0", SECOND), planted="/v1/rerank") as router:
        found = await walked(router, everything(SIZE), "/v1/rerank")
        assert found.keys() == {"POST /v1/rerank"}
        assert await walked(router, everything(SIZE), "/v1/score") == {}


# ---- answers


def whole(answer: bytes, status: int = 200) -> Handler:
    return lambda call: call.answer(answer, status)


def streamed(*events: bytes) -> Handler:
    def stream(call: Call) -> None:
        call.begin()
        for event in events:
            call.chunk(event)
        call.end()

    return stream


def framed(*frames: bytes) -> Handler:
    def stream(call: Call) -> None:
        call.begin_frames()
        for frame in frames:
            call.chunk(frame)
        call.end()

    return stream


def answers(engine: str) -> dict[str, Handler]:
    event = b"%b%b}" % (EVENT, b"".join(b',"x%d":%b' % (n, one) for n, one in enumerate(shapes(SIZE // 9).values())))
    tiny = filled(b"data: %b}\n\n" % EVENT, SIZE)
    if engine == FIRST:
        return {
            "one frame": framed(
                encode_frame(0, (1,), b"data: %b\n\n" % event), encode_frame(0, (), b"data: [DONE]\n\n")
            ),
            "token ids": framed(
                encode_frame(0, range(2**19), b"data: {}\n\n"), encode_frame(0, (), b"data: [DONE]\n\n")
            ),
            "tiny frames": framed(filled(encode_frame(0, (1,), b"x"), SIZE // 4)),
        }
    return {
        "whole": whole(event),
        "refused": whole(event, 429),
        "failed": whole(event, 500),
        "one event": streamed(b"data: %b\n\n" % event, b"data: [DONE]\n\n"),
        "tiny events": streamed(tiny, b"data: [DONE]\n\n"),
    }


@pytest.mark.chaos
@pytest.mark.timeout(180)
@pytest.mark.parametrize("engine", [FIRST, SECOND])
async def test_no_answer_of_a_replica_keeps_the_loop(engine: str) -> None:
    kinds, serve = answers(engine), whole(b"{}")
    replica = Keeping("r0", engine)
    replica.handler = lambda call: serve(call)
    async with fronted(replica) as router:
        longest = Longest(router)
        for kind, serve in kinds.items():  # noqa: B007  # the handler answers so
            for path in GENERATING[: 4 if engine == FIRST else 6]:
                body = json.dumps({**BODIES[path], "model": MODEL, "stream": "whole" not in kind}).encode()

                async def ask(path: str = path, body: bytes = body) -> int:
                    return await asked(router.port, "POST", path, body)

                await ask()
                await longest.over(f"{kind}: {path}", ask)
        assert longest.found == {}


SAID = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID},
    COMPLETIONS: {"prompt": "hi"},
    "/v1/messages": {"messages": SAID, "max_tokens": 2},
    PATH: {"input": "hi"},
    "/v1/embeddings": {"input": "hi"},
}


@pytest.mark.parametrize("shape", [*shapes(0), "choices"])
@pytest.mark.parametrize("retells", [False, True], ids=["relayed", "retold"])
def test_an_event_that_another_replica_could_continue_is_read_in_a_bounded_time(shape: str, retells: bool) -> None:
    size = LONG_EVENT_BYTES - 4096
    more = b',"choices":%b' % shapes(size)["objects"] if shape == "choices" else b',"x":%b' % shapes(size)[shape]
    event = b"data: %b%b}\n\n" % (EVENT, more)
    prompt = Prompt("m", 1, [b"\1\0\0\0"], True, None, 1, None, None, Peek("m"))
    continuation = Continuation(False, prompt, b'{"max_tokens":5,"prompt":"a"}', ByteTokenizer())
    continuation.relay()
    if retells:
        continuation.read(b"data: %b}\n\n" % EVENT, False)
        continuation.relay()
    begun_s = time.thread_time()
    continuation.read(event, False)
    assert time.thread_time() - begun_s < 0.2


def test_only_the_members_that_were_asked_for_are_removed_from_an_event() -> None:
    for given, left in (
        (b'{"a":1,"token_ids":[1,2],"b":2}', b'{"a":1,"b":2}'),
        (b'{"token_ids":[],"b":2}', b'{"b":2}'),
        (b'{"prompt_token_ids": [1], "token_ids": [2]}', b"{}"),
        (b'{"a": 1 , "token_ids" : [ 1 , 2 ]}', b'{"a": 1 }'),
        (b'{"text":"\\"token_ids\\":[1]","x_token_ids":[1]}', b'{"text":"\\"token_ids\\":[1]","x_token_ids":[1]}'),
    ):
        assert json.loads(without_ids(given)) == json.loads(left), given


# ---- stored responses, and what the router asks by itself


@pytest.mark.chaos
@pytest.mark.timeout(120)
async def test_long_conversations_that_many_continue_are_joined_one_at_a_time() -> None:
    replica = Keeping("r0", FIRST)
    replica.handler = whole(b'{"items":[{"role":"user","content":"%b"}]}' % (b"well, " * (3_900_000 // 6)))
    body = json.dumps({"model": MODEL, "input": "go on", "previous_response_id": "resp_long"}).encode()
    async with fronted(replica) as router:
        await asked(router.port, "POST", PATH, body)
        await router.longest_s()
        before = memory(router.process.pid)
        statuses = await asyncio.gather(*(asked(router.port, "POST", PATH, body) for _ in range(CONNECTIONS)))
        assert set(statuses) <= {200, 400, 429}, statuses
        assert await router.longest_s() < MAX_S
        assert memory(router.process.pid) - before < 500 * MEGABYTE
