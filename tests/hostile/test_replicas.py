"""Replicas with forbidden answers."""

import asyncio
import contextlib
import json
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from api.native import FRAMES_TYPE
from engines import METRICS, OPENAI
from engines.metrics import Pool, scraped_pools, scraped_queues
from router.members.facts import foreign_facts, native_facts
from router.members.members import Members
from router.members.spec import BadSpec, ReplicaSpec
from router.members.upstream import MAX_HEAD_BYTES
from router.prompts.tokens import Tokens
from router.proxy.answer import MAX_KEPT_BYTES
from router.proxy.attempt import MAX_ANSWER_IDS, MAX_CHOICES
from tests.hostile.pauses import pauses
from tests.router.loopback import until
from tests.router.scripted import CHAT, COMPLETIONS, Call, Script, Scripted, chat, connect, event, named, says, served

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n"
PIECE = bytes(1024 * 1024)


def writes(raw: bytes, *, then_closes: bool = False) -> Callable[[Call], None]:
    def handle(call: Call) -> None:
        call.write(raw)
        if then_closes:
            call.drop()

    return handle


# ---- heads and trailers


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_trailers_never_become_headers(path: str) -> None:
    raw = CHUNKED + b"\r\n2\r\n{}\r\n0\r\nset-cookie: a=b\r\nx-evil: 1\r\n\r\n"
    async with served(Scripted("r", writes(raw))) as running, connect(running.port) as client:
        for _ in range(2):
            answer = await client.post(path, chat())
            assert (answer.status, answer.body) == (200, b"{}")
            assert not {"set-cookie", "x-evil"} & answer.headers.keys()


async def test_what_any_connection_header_names_ends_with_the_connection() -> None:
    raw = (
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: keep-alive, x-one\r\nx-one: 1\r\nx-two: 2\r\n"
        b"connection: X-Two\r\nx-three: 3\r\n\r\n{}"
    )
    replica = Scripted("r", writes(raw))
    async with served(replica) as running, connect(running.port) as client:
        client.write(
            b"POST /v1/embeddings HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\nconnection: x-a\r\n"
            b"connection: baggage, B3\r\nx-a: 1\r\nbaggage: 2\r\nb3: 3\r\ntracestate: 4\r\n\r\n{}"
        )
        answer = await client.answer()
        assert {"x-one", "x-two"}.isdisjoint(answer.headers) and answer.headers["x-three"] == "3"
        sent = {name for name, _ in replica.calls[0].headers}
        assert {"x-a", "baggage", "b3", "connection"}.isdisjoint(sent) and "tracestate" in sent


@pytest.mark.parametrize("native", [False, True])
async def test_clients_do_not_steer_engines(native: bool) -> None:
    steering = {"x_data_parallel_rank": "3", "x_smg_target_worker": "1", "x_amzn_sagemaker_adapter_identifier": "a"}
    replica = Scripted("r", says(), native=native)
    async with served(replica) as running, connect(running.port) as client:
        for path in (CHAT, COMPLETIONS, "/v1/embeddings"):
            await client.post(path, {**chat(), "prompt": "hi"}, x_request_id="mine", user_agent="1", **steering)
        for call in replica.calls:
            assert call.header("user-agent") == "1"
            assert not [name for name, _ in call.headers if name.replace("-", "_") in steering]
            assert call.header("x-request-id")


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999999\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nx: a\r\n folded\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nx: a\rset-cookie: b\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nx: a\nset-cookie: b\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nx: a\0b\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 999 OK\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 600 OK\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 000 OK\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 101 OK\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n{}",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000 + b"content-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * (MAX_HEAD_BYTES + 1) + b"\r\ncontent-length: 2\r\n\r\n{}",
        CHUNKED + b"\r\n2;" + b"a" * 1_000_000 + b"\r\n{}\r\n0\r\n\r\n",
        CHUNKED + b"\r\n0\r\n" + b"a: b\r\n" * 200_000 + b"\r\n",
        CHUNKED + b"\r\nfffffffffffffffffff\r\n{}",
        CHUNKED + b"\r\n-2\r\n{}\r\n0\r\n\r\n",
    ],
    ids=lambda raw: str(raw[:60]),
)
async def test_what_is_no_answer_is_a_fault_of_the_replica_and_the_next_one_is_asked(raw: bytes) -> None:
    script = Script(writes(raw), says(b'"good"'))
    async with served(*script.replicas(2)) as running, connect(running.port) as client:
        answer = await client.post(CHAT, chat())
        assert (answer.status, answer.json) == (200, "good")
        assert sum(member.server.faults for member in running.router.members) == 1


async def test_a_compressed_answer_is_passed_on_as_it_is() -> None:
    bomb = b"\x1f\x8b\x08" + bytes(1000)
    replica = Scripted("r", says(bomb, content_encoding="gzip"))
    async with served(replica) as running, connect(running.port) as client:
        answer = await client.post(CHAT, chat())
        assert (answer.body, answer.headers["content-encoding"]) == (bomb, "gzip")


async def test_an_invalid_number_of_cached_tokens_is_ignored() -> None:
    replica = Scripted("r", says(b'"good"', x_warmroute_cached_tokens="9" * 5000))
    async with served(replica) as running, connect(running.port) as client:
        assert (await client.post(CHAT, chat())).json == "good"


# ---- whole answers


async def endless(call: Call) -> None:
    """Megabytes, for as long as the router reads."""
    call.begin("application/json")
    with contextlib.suppress(ConnectionError):
        while not call.connection.closed.is_set():
            call.chunk(PIECE)
            await call.connection.writer.drain()


def kept(running: Any) -> int:
    return int(running.router.held.held_bytes)


@pytest.mark.parametrize("native", [False, True])
async def test_a_long_whole_answer_continues_before_it_is_complete_and_complete(native: bool) -> None:
    body = b"x" * (3 * MAX_KEPT_BYTES)

    async def long(call: Call) -> None:
        if native:
            call.begin_frames("application/json")
        else:
            call.begin("application/json")
        for start in range(0, len(body), 65_536):
            part = body[start : start + 65_536]
            call.frame(part) if native else call.chunk(part)
            await call.connection.writer.drain()
        call.end()

    async with served(Scripted("r", long, native=native)) as running, connect(running.port) as client:
        answer = await client.post(CHAT, chat())
        assert (answer.status, answer.body, answer.headers["content-type"]) == (200, body, "application/json")
        assert kept(running) == 0


async def test_an_endless_answer_takes_bounded_memory_and_blocks_no_other() -> None:
    replica = Scripted("r", endless)
    async with served(replica) as running, connect(running.port) as greedy, connect(running.port) as client:
        greedy.send("POST", CHAT, chat())
        await running.opened(1)
        async with pauses() as found:
            status, _ = await greedy.head()
            assert status == 200
            member = running.member("r")
            await until(lambda: any(one.paused for one in member.upstream.sendings), "its replica has to wait")
            assert (await client.get("/health")).status == 200
        assert kept(running) == 0
        assert found.longest_s < 0.2
        greedy.leave()


async def test_a_long_whole_answer_that_breaks_off_is_never_begun_again() -> None:
    async def breaks(call: Call) -> None:
        call.begin("application/json")
        for _ in range(6):
            call.chunk(PIECE)
        await call.connection.writer.drain()
        call.drop()

    script = Script(breaks, says(b'"other"'))
    async with served(*script.replicas(2)) as running, connect(running.port, limit=2**24) as client:
        client.send("POST", CHAT, chat())
        await client.head()
        assert b"other" not in await client.rest()
        assert len(script.calls) == 1
        await running.idle()


async def test_all_whole_answers_together_are_bounded() -> None:
    async def half(call: Call) -> None:
        call.begin("application/json")
        call.chunk(PIECE)
        await call.left()

    async with served(Scripted("r", half)) as running, contextlib.AsyncExitStack() as stack:
        running.router.held.limit_bytes = 2 * len(PIECE)
        clients = [await stack.enter_async_context(connect(running.port)) for _ in range(4)]
        for client in clients:
            client.send("POST", CHAT, chat())
        heads = [asyncio.ensure_future(client.head()) for client in clients]
        await asyncio.wait(heads, return_when=asyncio.FIRST_COMPLETED)
        await until(lambda: sum(head.done() for head in heads) >= 2, "the others are passed on at once")
        assert kept(running) <= 2 * len(PIECE)
        for client, head in zip(clients, heads, strict=True):
            head.cancel()
            client.leave()
        await running.idle()
        assert kept(running) == 0


# ---- frames


def head_of_frame(index: int, ids: int, payload: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in (index, ids, payload))


@pytest.mark.parametrize(
    "frames",
    [
        head_of_frame(0, 0, 2**32 - 1),
        head_of_frame(0, 2**32 - 1, 0),
        head_of_frame(MAX_CHOICES, 1, 0) + bytes(4),
        head_of_frame(0, MAX_ANSWER_IDS + 1, 0) + bytes(4 * MAX_ANSWER_IDS + 4),
    ],
    ids=["bytes", "ids", "choice", "all ids"],
)
async def test_frames_that_claim_too_much_are_a_fault_and_the_next_replica_is_asked(frames: bytes) -> None:
    def claims(call: Call) -> None:
        call.begin_frames("application/json")
        call.chunk(frames)

    def good(call: Call) -> None:
        call.begin_frames("application/json")
        call.frame(b'"good"', 1)
        call.end()

    script = Script(claims, good)
    async with served(*script.replicas(2, native=True)) as running, connect(running.port) as client:
        assert (await client.post(CHAT, chat())).json == "good"
        assert sum(member.server.faults for member in running.router.members) == 1


async def test_unfinished_frames_count_among_what_is_held() -> None:
    def half(call: Call) -> None:
        call.begin_frames("application/json")
        call.chunk(head_of_frame(0, 0, 8 * 2**20) + bytes(4 * 2**20))

    async with served(Scripted("r", half, native=True)) as running, connect(running.port) as client:
        running.router.held.limit_bytes = 2**20
        answer = await client.post(CHAT, chat())
        assert answer.status == 503
        assert kept(running) == 0


@pytest.mark.parametrize("native", [False, True])
async def test_unrequested_frames_are_passed_on_like_any_answer(native: bool) -> None:
    body = head_of_frame(0, 0, 2**20) + bytes(2**19)
    replica = Scripted("r", says(body, content_type=FRAMES_TYPE), native=native)
    async with served(replica) as running, connect(running.port) as client:
        answer = await client.post("/v1/embeddings" if native else CHAT, chat())
        assert (answer.status, answer.body) == (200, body)


async def test_a_stream_that_is_faster_than_its_client_waits_for_it() -> None:
    async def floods(call: Call) -> None:
        call.begin()
        with contextlib.suppress(ConnectionError):
            while not call.connection.closed.is_set():
                call.chunk(event("x" * 65_536))
                await call.connection.writer.drain()

    async with served(Scripted("r", floods)) as running, connect(running.port) as client:
        client.send("POST", CHAT, chat(stream=True))
        await client.head()
        member = running.member("r")
        await until(lambda: any(one.paused for one in member.upstream.sendings), "it has to wait")
        attempt = next(iter(running.router.attempts))
        assert attempt.owner.exchange.unread_bytes < 2 * 2**20
        client.leave()


# ---- what it says of itself

SPEC = ReplicaSpec(name="r", url="http://h:1")
LOADED = {"model": "m", "block_size": 16, "max_model_len": 4096, "incarnation": 1}


@pytest.mark.parametrize(
    "field",
    [
        {"block_size": 0},
        {"block_size": -16},
        {"block_size": 2**62},
        {"max_model_len": -1},
        {"max_model_len": 2**63},
        {"model": ""},
        {"model": "m" * 100_000},
        {"pool": {"total": -1}},
        {"pool": {"total": 2**62}},
    ],
    ids=lambda field: str(field)[:40],
)
async def test_impossible_figures_of_a_replica_do_no_harm(field: dict[str, Any]) -> None:
    assert native_facts(SPEC, json.dumps({**LOADED, **field}).encode()) is None
    odd, good = Scripted("odd", says(), native=True), named("good")
    odd.control["/load"] = (200, {**LOADED, "tokenizer": "bytes", **field})
    async with served(odd, good, ready=False) as running, connect(running.port) as client:
        await until(lambda: running.member("odd").server.trouble != "", "it is refused")
        await until(lambda: running.member("good").candidate.unavailable is None, "the other one is well")
        assert (await client.post(CHAT, chat())).json == "good"


@pytest.mark.parametrize(
    "body",
    [
        b'{"data":' + b"[" * 100_000,
        json.dumps({"data": [{"id": f"m{number}"} for number in range(5000)]}).encode(),
        json.dumps({"data": [{"id": "m" * 10_000}]}).encode(),
        json.dumps({"data": [{"id": "m", "max_model_len": -1}]}).encode(),
    ],
    ids=["nested", "many", "long", "negative"],
)
def test_models_that_cannot_be_are_none(body: bytes) -> None:
    with pytest.raises(BadSpec):
        foreign_facts(SPEC, body)


def test_models_that_come_and_go_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.members.members.MAX_REMEMBERED", 100)
    made: list[weakref.ref[Tokens]] = []

    def tokens_of(model: str, *_: Any) -> Tokens:
        tokens = Tokens(model, None)
        made.append(weakref.ref(tokens))
        return tokens

    members = Members(tokens_of)
    for number in range(1000):
        candidate = SimpleNamespace(max_model_len=None)
        member: Any = SimpleNamespace(
            name="r",
            models=(f"m{number}",),
            adapters=frozenset(),
            candidate=candidate,
            slot=0,
            block_size=16,
            spec=SimpleNamespace(role=None),
            profile=OPENAI,
            tokenizer=None,
            taken_names={},
        )
        members.servers["r"] = SimpleNamespace(members=[member])  # type: ignore[assignment]
        members.arrange()
    assert members.model("m999").name == "m999"
    assert [model.name for model in members._gone.values()] == [f"m{number}" for number in range(991, 999)]
    assert len(members._once_served) == 100
    assert len([one for one in made if one() is not None]) == 9, "other models keep their tokenizers"


async def test_facts_without_end_are_given_up() -> None:
    odd = named("odd")
    odd.control["/v1/models"] = (200, b" " * (5 * 1024 * 1024))
    async with served(odd, ready=False) as running:
        await until(lambda: "longer than" in running.member("odd").server.trouble, "it is refused")


def test_metrics_of_nothing_but_open_braces_take_no_time() -> None:
    async def scrape() -> float:
        async with pauses() as found:
            await asyncio.sleep(0)
            for line in (b"vllm:num_requests_running{", b"vllm:cache_config_info{", b"sglang:num_pages{"):
                text = (line + b"\n") * 100_000
                assert scraped_queues(text, METRICS) == {}
                assert scraped_pools(text, METRICS) == {}
            await asyncio.sleep(0)
        return found.longest_s

    assert asyncio.run(scrape()) < 0.5


@pytest.mark.parametrize("value", ["-5", "1e400", "1e12", "-1e-3"])
def test_queues_that_cannot_be_are_none(value: str) -> None:
    assert scraped_queues(f"vllm:num_requests_running {value}\n".encode(), METRICS) == {}


@pytest.mark.parametrize(
    ("text", "blocks", "tokens"),
    [
        ('vllm:cache_config_info{block_size="16",mamba_block_size="32",num_gpu_blocks="1000"} 1.0', 1000, 16),
        ('vllm:cache_config_info{num_gpu_blocks_override="7",num_gpu_blocks="1000",block_size="16"} 1.0', 1000, 16),
        ('sglang:cache_config_info{page_size="1",num_pages="5"} 1', 5, 1),
    ],
)
def test_the_size_of_a_pool_is_read(text: str, blocks: int, tokens: int) -> None:
    pool = scraped_pools(f"# HELP x\n{text}\n".encode(), METRICS).get(None)
    assert pool is not None and (pool.blocks, pool.block_tokens) == (blocks, tokens)


# As SGLang 0.5.23's own collector writes them; processes of the same rank describe the same pool.
PAGES = """\
# TYPE sglang:page_size gauge
sglang:page_size{dp_rank="0",engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 16.0
sglang:page_size{dp_rank="0",engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="1"} 16.0
sglang:page_size{dp_rank="1",engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 16.0
# TYPE sglang:num_pages gauge
sglang:num_pages{dp_rank="0",engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 1.6384e+06
sglang:num_pages{dp_rank="0",engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="1"} 1.6384e+06
sglang:num_pages{dp_rank="1",engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 8192.0
"""


def test_the_sizes_of_pools_in_pages_are_read_by_rank() -> None:
    one, other = Pool(1_638_400, 16), Pool(8192, 16)
    assert scraped_pools(PAGES.encode(), METRICS) == {0: one, 1: other, None: Pool(1_646_592, 16)}


@pytest.mark.parametrize(
    "text",
    [
        *(
            f"sglang:page_size 16.0\nsglang:num_pages {value}\n"
            for value in ("1e400", "1e12", "0.0", "nan", "1.2.3", "-5")
        ),
        *(f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{n}"}} 1.0' for n in ("None", "-1", "0", "9" * 30)),
    ],
)
def test_the_size_of_a_pool_that_cannot_be_is_none(text: str) -> None:
    assert scraped_pools(text.encode(), METRICS) == {}
