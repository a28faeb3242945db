"""Prompts that are computed elsewhere: both halves between real sockets, and each way in which one fails."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from api.measured_rate import ENOUGH
from router.members.spec import ReplicaSpec
from router.placement.cost import Role
from router.proxy import prefill
from router.tenants.keys import Key, digest_of
from tests.router.loopback import until
from tests.router.proxy.nixl_peer import Engine, Fabric, stream_of
from tests.router.scripted import MODEL, Answer, Call, Client, Scripted, Served, connect, refused_port, says, served

pytestmark = pytest.mark.virtual

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]
CHAT = PATHS[0]
WORDS = "the stars are far away " * 100


def body(path: str = CHAT, text: str = WORDS, **fields: Any) -> dict[str, Any]:
    if path == "/v1/completions":
        return {"model": MODEL, "prompt": text, "max_tokens": 8, **fields}
    if path == "/v1/responses":
        return {"model": MODEL, "input": [{"role": "user", "content": text}], **fields}
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}


class Pair:
    """A router before one engine that computes prompts and others that generate."""

    def __init__(self, running: Served, client: Client, fabric: Fabric, engines: list[Engine]) -> None:
        self.running, self.client, self.fabric = running, client, fabric
        self.prefill, self.decode, *self.others = engines

    async def ask(self, path: str = CHAT, **fields: Any) -> Answer:
        return await self.client.post(path, body(path, **fields))

    @property
    def last(self) -> Any:
        """The last decision's record of the first half."""
        return self.running.router.history.decisions[-1].record().prefill

    async def outcome(self) -> str | None:
        await self.running.idle()
        found: str | None = self.last.outcome
        return found


@asynccontextmanager
async def pair(*more: Role | None, mode: str = "always", **config: Any) -> AsyncIterator[Pair]:
    fabric = Fabric()
    roles: tuple[Role | None, ...] = ("prefill", "decode", *more)
    engines = [Engine(f"e{number}", fabric, role) for number, role in enumerate(roles)]
    config = {"policy": "cost", "prefill_elsewhere": mode, **config}
    async with served(*engines, **config) as running, connect(running.port) as client:
        yield Pair(running, client, fabric, engines)


def said(answer: Answer) -> str:
    """Which engine generated a good answer, by its header and by its text."""
    assert answer.status == 200, answer.body
    name = answer.headers["x-warmroute-replica"]
    assert name.encode() in answer.body
    return name


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_both_halves_of_every_api(path: str, stream: bool) -> None:
    more: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream and path in PATHS[:2] else {}
    if path in PATHS[:2]:
        more["min_tokens"] = 4
    if path == "/v1/messages":
        more["thinking"] = {"type": "enabled", "budget_tokens": 4}
    async with pair() as two:
        answer = await two.ask(path, stream=stream, **more)
        assert said(answer) == "e1"
        if stream:
            assert answer.body == b"".join(stream_of(path, "e1"))
        [asked], [handed] = two.prefill.transferred, two.decode.transferred
        assert asked["do_remote_decode"] and not asked["do_remote_prefill"]
        assert (handed["do_remote_prefill"], handed["remote_engine_id"]) == (True, "e0")
        added = ("kv_transfer_params", "request_id")
        sent = {name: value for name, value in two.decode.calls[0].json.items() if name not in added}
        assert sent == body(path, stream=stream, **more), "the second half is the client's own request"
        assert two.prefill.calls[0].path == two.decode.calls[0].path == path
        assert not two.fabric.held
        assert await two.outcome() == "handed"


async def test_both_halves_have_the_keys_salt() -> None:
    key = Key(name="a", digest=digest_of("a"), salt="apart")
    async with pair(keys=(key,), demand_key=True) as two:
        assert said(await two.client.post(CHAT, body(), authorization="Bearer a")) == "e1"
        assert two.prefill.calls[0].json["cache_salt"] == two.decode.calls[0].json["cache_salt"] == "apart"
        assert not two.fabric.held


@pytest.mark.virtual(False)
@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"prompt_logprobs": 1},
        {"echo": True},
        {"use_beam_search": True},
        {"stream": False, "messages": [{"role": "user", "content": "x" * 2_100_000}]},
        {"tools": [{}] * 20_000},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_what_one_replica_has_to_do_alone(fields: dict[str, Any]) -> None:
    async with pair() as two:
        assert (await two.ask(**fields)).headers["x-warmroute-replica"] == "e1"
        assert not two.prefill.calls
        assert await two.outcome() is None
        assert not two.last.elsewhere and two.last.why


# ---- the first half fails


@pytest.mark.parametrize(
    "handler",
    [
        says(b'{"id":"a"}'),
        says(b'{"kv_transfer_params":null}'),
        says(b'{"kv_transfer_params":{"do_remote_prefill":true}}'),
        says(b'{"kv_transfer_params":[1]}'),
        says(b"not JSON"),
        says(b" " * (prefill.MAX_ANSWER_BYTES + 1)),
    ],
)
async def test_a_prompt_that_is_not_computed_there_is_computed_here(handler: Any) -> None:
    async with pair() as two:
        two.prefill.handler = handler
        assert said(await two.ask()) == "e1"
        assert await two.outcome() == "nothing"
        assert two.decode.transferred == [None], "it is sent plainly, and once"


async def test_a_prefill_replica_that_hands_nothing_over_is_left_alone_for_a_while() -> None:
    async with pair() as two:
        two.prefill.hands_over = False
        for _ in range(3):
            assert said(await two.ask()) == "e1"
        assert len(two.prefill.calls) == 1
        two.running.member("e0").no_prefill_until_s = 0.0
        two.prefill.hands_over = True
        assert said(await two.ask()) == "e1"
        assert await two.outcome() == "handed"


# ---- the second half fails


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_kv_that_cannot_be_read_is_computed_by_the_reader(path: str, stream: bool) -> None:
    async with pair() as two:

        def hands_over_and_dies(call: Call) -> None:
            two.prefill.serve(call)
            two.fabric.dies("e0")

        two.prefill.handler = hands_over_and_dies
        answer = await two.ask(path, stream=stream)
        assert said(answer) == "e1"
        if stream:
            assert answer.body == b"".join(stream_of(path, "e1")), "nothing of the error is seen"
        assert [bool(params) for params in two.decode.transferred] == [True, False]
        assert await two.outcome() == "unread"


async def test_parameters_that_reached_nobody_are_sent_to_the_next_replica() -> None:
    async with pair("decode") as two:
        first, second = (two.running.member(name) for name in ("e1", "e2"))
        second.candidate.running = 100  # the first is chosen
        first.upstream.target = first.upstream.target._replace(port=refused_port())
        first.upstream.drop_idle()  # what polls have left
        assert said(await two.ask()) == "e2"
        assert two.others[0].transferred[0]["remote_engine_id"] == "e0"
        assert len(two.prefill.calls) == 1
        assert await two.outcome() == "handed"


@pytest.mark.parametrize("ends", [Call.drop, lambda call: call.answer(b"{}", 503)], ids=["dies", "refuses"])
async def test_parameters_that_reached_a_replica_are_never_sent_again(ends: Any) -> None:
    async with pair("decode") as two:
        sent = []

        def serve(engine: Engine) -> Any:
            def serves(call: Call) -> None:
                sent.append(call.json.get("kv_transfer_params"))
                if len(sent) == 1:
                    ends(call)
                else:
                    engine.serve(call)

            return serves

        for engine in (two.decode, *two.others):
            engine.handler = serve(engine)
        assert said(await two.ask()) in ("e1", "e2")
        ids = [params["remote_request_id"] for params in sent if params]
        assert len(ids) == len(set(ids)) == len(two.prefill.calls) == 2, "the prompt, still cached, is computed again"


async def test_the_turns_of_round_robin_go_on() -> None:
    for mode in ("always", "auto"):
        async with pair("decode", "decode", mode=mode, policy="round-robin") as two:
            chosen = [said(await two.ask(text=f"{number} {WORDS}")) for number in range(6)]
            assert {chosen.count(name) for name in ("e1", "e2", "e3")} == {2}


async def test_parameters_are_not_sent_when_they_may_have_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "HELD_S", 0.0)
    async with pair() as two:
        assert said(await two.ask()) == "e1"
        assert two.decode.transferred == [None]


# ---- the client leaves


async def test_a_client_that_leaves_ends_the_first_half() -> None:
    left = asyncio.Event()

    async def waits(call: Call) -> None:
        await call.left()
        left.set()

    async with pair() as two:
        two.prefill.handler = waits
        two.client.send("POST", CHAT, body())
        await until(lambda: two.prefill.calls, "the prompt has come")
        two.client.leave()
        async with asyncio.timeout(5):
            await left.wait()
        assert await two.outcome() == "left"
        assert not two.decode.calls


# ---- which replicas


async def test_a_replica_that_only_computes_prompts_never_generates() -> None:
    fabric = Fabric()
    one = Engine("e0", fabric, "prefill")
    async with served(one, queue_timeout_s=0.05) as running, connect(running.port) as client:
        answer = await client.post(CHAT, body())
        assert (answer.status, answer.error["code"]) == (503, "no_replica")
        assert "its role is prefill" in answer.error["message"]
        assert not one.calls
        assert (await client.get("/ready")).status == 503


@pytest.mark.parametrize("roles", [(None, None), ("decode", "decode"), ("prefill", None), ("both",)])
async def test_without_two_roles_a_request_is_sent_as_ever(roles: tuple[Role | None, ...]) -> None:
    engines = [Engine(f"e{number}", Fabric(), role) for number, role in enumerate(roles)]
    async with served(*engines, prefill_elsewhere="always", policy="cost") as running, connect(running.port) as client:
        assert (await client.post(CHAT, body())).status == 200
        assert [params for engine in engines for params in engine.transferred] == [None]


async def test_engines_of_other_kinds_are_asked_for_nothing() -> None:
    class Other(Scripted):
        @property
        def spec(self) -> ReplicaSpec:
            return ReplicaSpec(name=self.name, url=f"http://127.0.0.1:{self.port}", engine="openai", role="prefill")

    other, decode = Other("e0", says()), Engine("e1", Fabric(), "decode")
    async with served(other, decode, prefill_elsewhere="always", policy="cost") as running:
        async with connect(running.port) as client:
            assert (await client.post(CHAT, body())).status == 200
        assert not other.calls


async def test_a_long_prompt_goes_elsewhere_where_answers_would_wait_for_it() -> None:
    async with pair(mode="auto") as two:
        for name in ("e0", "e1"):
            two.running.member(name).candidate.prefill_tokens_per_s = 1000.0
        assert said(await two.ask()) == "e1"
        assert not two.prefill.calls, "the reader is idle, and computes it as soon"
        two.running.member("e1").candidate.running = 8
        assert said(await two.ask(text="a" + WORDS)) == "e1"
        assert len(two.prefill.calls) == 1
        assert said(await two.ask(text="short")) == "e1"
        assert len(two.prefill.calls) == 1
    async with pair(mode="never") as two:
        two.running.member("e1").candidate.running = 8
        assert said(await two.ask()) == "e1"
        assert not two.prefill.calls


# ---- what is told


async def test_both_halves_are_told(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    async with pair(request_log=str(log)) as two:
        answer = await two.client.post("/explain", body(), host="127.0.0.1")
        assert answer.status == 200, answer.body
        explained = answer.json["prefill"]
        assert (explained["elsewhere"], explained["replica"]) == (True, "e0")
        assert [one["name"] for one in explained["candidates"]] == ["e0"]
        answer = await two.client.post(CHAT, body(), x_request_id="mine")
        assert said(answer) == "e1"
        await two.running.idle()
        told = (await two.client.get("/decisions/mine", host="127.0.0.1")).json
        assert told["chosen"] == "e1"
        assert (told["prefill"]["replica"], told["prefill"]["outcome"]) == ("e0", "handed")
        assert told["prefill"]["reported_cached_tokens"] == 16
        metrics = (await two.client.get("/metrics")).body.decode()
        assert 'warmroute_router:prefills_total{replica="e0",outcome="handed"} 1.0' in metrics
        assert 'warmroute_router:prefill_seconds_count{replica="e0"} 1.0' in metrics
        computed = re.findall(
            '^warmroute_router:prefill_tokens_total.*replica="(..)",.* ([1-9].*)', metrics, re.MULTILINE
        )
        assert [(name, float(tokens)) for name, tokens in computed] == [("e0", told["prompt_tokens"] - 16)]
        replicas = (await two.client.get("/replicas", host="127.0.0.1")).json["replicas"]
        assert [one["role"] for one in replicas] == ["prefill", "decode"]
    [line] = [json.loads(text) for text in log.read_text().splitlines()]
    assert (line["prefill"]["replica"], line["prefill"]["outcome"]) == ("e0", "handed")
    assert [one["replica"] for one in line["sendings"]] == ["e0", "e1"]


async def test_the_speed_of_transfers_is_learned_from_streams() -> None:
    async with pair() as two:
        router = two.running.router
        assert router.placement.transfers.measured_tokens_per_s(router.now_s()) == 0.0
        for number in range(ENOUGH):
            assert said(await two.ask(text=f"{number} {WORDS}", stream=True)) == "e1"
        assert router.placement.transfers.measured_tokens_per_s(router.now_s()) > 0
        assert two.running.member("e1").candidate.prefill_tokens_per_s == 0.0, "that of prefill is not"
