"""Prompts that one replica of ours computes for another: the two requests, roles as they are told, and each loss."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from api.native import FRAMES_TYPE, REQUEST_TYPE, KvSource, Native, unpack_ids
from events.native import Load
from router.members.spec import ReplicaSpec
from router.tenants.keys import parse_keys
from tests.router.proxy.test_prefill import CHAT, PATHS, body
from tests.router.scripted import MODEL, Answer, Call, Client, Scripted, Served, connect, served

pytestmark = pytest.mark.virtual

CACHED = "x_warmroute_cached_tokens"


class Ours(Scripted):
    """A replica of ours that says its role, and at the end of its name the port where its blocks are read."""

    def __init__(self, name: str, role: str | None, **said: Any) -> None:
        super().__init__(name, self.serve, native=True)
        self.role_in_spec: Any = None
        self.cached_tokens = 4096  # of each prompt, as it says
        endpoint = f"tcp://127.0.0.1:700{name[-1]}"
        self.said.update({"kv_read": endpoint, "kv_layout": "layout", "role": role, **said})

    @property
    def said(self) -> dict[str, Any]:
        found: dict[str, Any] = self.control["/load"][1]
        return found

    @property
    def spec(self) -> ReplicaSpec:
        return ReplicaSpec(name=self.name, url=f"http://127.0.0.1:{self.port}", role=self.role_in_spec)

    def serve(self, call: Call) -> Awaitable[None] | None:
        headers: dict[str, Any] = {CACHED: str(self.cached_tokens)}
        if call.header("accept") != FRAMES_TYPE:
            call.answer(b'{"said":"a token"}', **headers)
            return None
        call.begin_frames("application/json", **headers)
        call.frame(b'{"said":"%b"}' % self.name.encode(), 104)
        call.end()
        return None


class Pair:
    def __init__(self, running: Served, client: Client, replicas: list[Ours]) -> None:
        self.running, self.client = running, client
        self.prefill, self.decode, *self.others = replicas

    async def ask(self, path: str = CHAT, **fields: Any) -> Answer:
        answer = await self.client.post(path, body(path, **fields))
        assert answer.status == 200, answer.body
        return answer

    @property
    def last(self) -> Any:
        return self.running.router.history.decisions[-1].record()

    async def outcome(self) -> str | None:
        await self.running.idle()
        found: str | None = self.last.prefill.outcome
        return found


@asynccontextmanager
async def pair(*replicas: Ours, mode: str = "always", **config: Any) -> AsyncIterator[Pair]:
    """A router before these replicas; by default one that computes prompts and one that generates."""
    ours = list(replicas) or [Ours("r0", "prefill"), Ours("r1", "decode")]
    config = {"policy": "cost", "prefill_elsewhere": mode, **config}
    async with served(*ours, **config) as running, connect(running.port) as client:
        yield Pair(running, client, ours)


def said(answer: Answer) -> str:
    name = answer.headers["x-warmroute-replica"]
    assert name.encode() in answer.body
    return name


def sources(call: Call) -> list[KvSource]:
    return call.native[0].kv_sources


@pytest.mark.parametrize("path", PATHS)
async def test_the_prompt_is_computed_at_one_replica_and_read_by_the_other(path: str) -> None:
    async with pair() as two:
        assert said(await two.ask(path)) == "r1"
        [first], [second] = two.prefill.calls, two.decode.calls
        asked, sent = first.native, second.native
        assert first.header("content-type") == REQUEST_TYPE and first.header("accept") is None
        assert asked[0].prompts == sent[0].prompts and len(asked[0].prompts) == 1
        assert asked[0] == Native(prompts=asked[0].prompts, priority=asked[0].priority)
        assert sent[1] == body(path), "the second half is the client's own request"
        assert sources(second) == [KvSource("tcp://127.0.0.1:7000", len(unpack_ids(sent[0].prompts[0])))]
        assert await two.outcome() == "handed"
        assert two.last.prefill.reported_cached_tokens == 4096
        assert not two.last.prediction_exact


@pytest.mark.parametrize("path", PATHS)
async def test_the_first_half_is_one_token_that_nobody_keeps(path: str) -> None:
    more: dict[str, Any] = {"stream": False, "min_tokens": 3}
    if path == "/v1/responses":
        more["store"] = True
    async with pair() as two:
        await two.ask(path, **more)
        [first] = two.prefill.calls
        half = first.native[1]
        limits = [half[name] for name in ("max_tokens", "max_completion_tokens", "max_output_tokens") if name in half]
        assert limits and set(limits) == {1}
        assert (half["stream"], half["min_tokens"], half.get("store", False)) == (False, 0, False)
        assert "kv_transfer_params" not in half


@pytest.mark.parametrize(
    "changes",
    [{"kv_read": ""}, {"kv_layout": ""}, {"kv_layout": "other"}, {"kv_read": None}],
)
@pytest.mark.parametrize("which", [0, 1])
async def test_replicas_that_cannot_read_each_other_share_no_request(changes: dict[str, Any], which: int) -> None:
    replicas = [Ours("r0", "prefill"), Ours("r1", "decode")]
    replicas[which].said.update(changes)
    async with pair(*replicas) as two:
        assert said(await two.ask()) == "r1"
        assert not two.prefill.calls and not sources(two.decode.calls[0])
        assert await two.outcome() is None
        explained = (await two.client.post("/explain", body(), host="127.0.0.1")).json["prefill"]
        assert "cannot read its blocks" in explained["candidates"][0]["why"]


# ---- roles


async def test_a_role_is_learned_and_changes_with_a_restart() -> None:
    async with pair() as two:
        member, members = two.running.member("r0"), two.running.router.members
        assert (member.spec.role, member.candidate.role) == ("prefill", "prefill")
        for number, role in enumerate((None, "both"), start=2):
            two.prefill.said.update({"role": role, "incarnation": number})
            member.server.learned = False
            await two.running.front.upkeep.learn_again(member.server)
            assert (member.spec.role, member.candidate.role) == (role, role)
            assert members.models[MODEL].splits is (role is not None)


async def test_the_role_in_the_routers_own_spec_counts_more() -> None:
    replicas = [Ours("r0", "decode"), Ours("r1", "prefill")]
    replicas[0].role_in_spec, replicas[1].role_in_spec = "prefill", "decode"
    async with pair(*replicas) as two:
        assert said(await two.ask()) == "r1"
        assert len(two.prefill.calls) == 1


# ---- losses


@pytest.mark.parametrize("ends", [Call.drop, lambda call: call.answer(b"{}", 503)])
async def test_the_next_replica_reads_the_same_blocks(ends: Any) -> None:
    async with pair(Ours("r0", "prefill"), Ours("r1", "decode"), Ours("r2", "decode")) as two:
        seen: list[list[KvSource]] = []

        def serving(replica: Ours) -> Any:
            def serves(call: Call) -> None:
                seen.append(sources(call))
                ends(call) if len(seen) == 1 else replica.serve(call)

            return serves

        for replica in (two.decode, *two.others):
            replica.handler = serving(replica)
        assert said(await two.ask()) in ("r1", "r2")
        assert len(two.prefill.calls) == 1 and len(seen) == 2 and seen[0] == seen[1] != []


async def test_a_source_that_could_not_be_read_is_left_alone_for_a_while() -> None:
    async with pair() as two:
        two.decode.cached_tokens = 0
        assert said(await two.ask()) == "r1"
        assert await two.outcome() == "unread"
        assert said(await two.ask()) == "r1"
        assert len(two.prefill.calls) == 1
        two.running.member("r0").no_prefill_until_s = 0.0
        two.decode.cached_tokens = 2048
        assert said(await two.ask()) == "r1"
        assert await two.outcome() == "handed"


async def test_the_replica_that_computed_the_prompt_generates_if_no_other_can() -> None:
    async with pair(Ours("r0", "both"), Ours("r1", "decode")) as two:
        one, other = two.running.member("r0").candidate, two.running.member("r1").candidate
        one.slowness = 1000.0

        def serves(call: Call) -> None:
            other.unavailable = "gone"
            two.prefill.serve(call)

        two.prefill.handler = serves
        answer = await two.ask()
        assert answer.headers["x-warmroute-replica"] == "r0"
        first, second = two.prefill.calls
        assert first.native[1]["max_tokens"] == 1 and second.native[1] == body()
        assert not sources(second)
        other.unavailable = None


async def test_a_source_that_shows_its_blocks_no_more_is_not_named() -> None:
    async with pair() as two:
        member = two.running.member("r0")

        def computes_and_restarts(call: Call) -> None:
            two.running.router.placement.offers(member.load, "", "")
            two.prefill.serve(call)

        two.prefill.handler = computes_and_restarts
        assert said(await two.ask()) == "r1"
        assert not sources(two.decode.calls[0])


async def test_who_has_begun_is_not_refused_for_its_class() -> None:
    """Its prompt is computed by then, however busy the others have become."""

    class Busier(Ours):
        def serve(self, call: Call) -> Awaitable[None] | None:
            load = Load(waiting=9, queued_prefill_tokens=10**9, prefill_tokens_per_s=1000.0)
            for name in ("r0", "r1"):
                two.running.member(name).load.reported(load, two.running.router.now_s())
            return super().serve(call)

    keys = tuple(parse_keys("keys.toml", "[keys.a]\nkey = 'a'\nclass = 'batch'"))
    replicas = Busier("r0", "prefill"), Ours("r1", "decode")
    async with pair(*replicas, keys=keys, demand_key=True) as two:
        as_key = {"authorization": "Bearer a"}
        assert (await two.client.post(CHAT, body(), **as_key)).status == 200
        assert await two.outcome() == "handed"
        assert (await two.client.post(CHAT, body(), **as_key)).status == 503, "a new one would be late"
