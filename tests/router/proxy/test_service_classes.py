"""Requests of classes: in what order a replica of ours computes them, and which are refused."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from events.native import Load
from router.placement.cost import Tenant
from router.tenants.keys import parse_keys
from tests.router.scripted import CHAT, COMPLETIONS, Call, Script, Served, connect, served

pytestmark = pytest.mark.virtual

KEYS = """
[keys.chat]
key = "chat"
class = "interactive"
[keys.nightly]
key = "nightly"
class = "batch"
[keys.usual]
key = "usual"
"""
SPEED = 1000.0
CHATS, NIGHTLY, USUAL = ({"authorization": f"Bearer {name}"} for name in ("chat", "nightly", "usual"))


def frames(call: Call) -> None:
    call.begin_frames("application/json", x_warmroute_cached_tokens="0")
    call.frame(b"{}", 1)
    call.end()


def answers(call: Call) -> None:
    call.answer(b'{"choices":[]}')


@asynccontextmanager
async def running(script: Script, *, queued_s: float = 0.0, native: bool = True) -> AsyncIterator[Served]:
    """A router whose only replica has reported so many seconds of work."""
    keys = tuple(parse_keys("keys.toml", KEYS))
    async with served(*script.replicas(1, native=native), keys=keys, demand_key=True, policy="cost") as made:
        load = Load(waiting=1, queued_prefill_tokens=int(queued_s * SPEED), prefill_tokens_per_s=SPEED)
        made.member("r0").load.reported(load, made.router.now_s())
        yield made


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "1234", **more}


async def ranks(*asked: tuple[dict[str, str], dict[str, Any]]) -> list[float]:
    """How much later than it was sent each request counts as come, at the replica."""
    script = Script(frames)
    async with running(script) as made, connect(made.port) as client:
        for key, more in asked:
            assert (await client.post(COMPLETIONS, body(**more), **key)).status == 200
    return [call.native[0].priority for call in script.calls]


async def test_each_class_counts_as_come_later_by_what_it_wants() -> None:
    chat, usual, nightly = await ranks((CHATS, {}), (USUAL, {}), (NIGHTLY, {}))
    assert 1.9 < chat < 3
    assert 9.9 < usual < 11
    assert 119 < nightly < 121


async def test_a_client_may_ask_for_a_lower_class_and_for_no_higher_one() -> None:
    asked: list[tuple[dict[str, str], dict[str, Any]]] = [
        (CHATS, {"service_tier": "flex"}),
        (CHATS, {"priority": 1}),
        (USUAL, {"service_tier": "priority"}),
        (USUAL, {"priority": -100}),
        (NIGHTLY, {"service_tier": "default"}),
    ]
    found = await ranks(*asked)
    assert [round(rank, -1) for rank in found] == [120, 120, 10, 10, 120]


async def test_the_priority_is_for_the_router_alone() -> None:
    for native in (True, False):
        script = Script(frames if native else answers)
        async with running(script, native=native) as made, connect(made.port) as client:
            answer = await client.post(COMPLETIONS, body(priority=-3, service_tier="priority"), **USUAL)
            assert answer.status == 200
        [call] = script.calls
        asked = call.native[1] if native else call.json
        assert "priority" not in asked
        assert asked["service_tier"] == "priority"


async def test_batch_work_that_would_be_late_is_refused_and_told_when_to_come_again() -> None:
    async with running(Script(frames), queued_s=200.0) as made, connect(made.port) as client:
        refused = await client.post(COMPLETIONS, body(), **NIGHTLY)
        assert refused.status == 503
        error = refused.json["error"]
        assert error["code"] == "class_refused"
        assert '"batch"' in error["message"]
        assert 70 < int(refused.headers["retry-after"]) < 90, "200 s of work, and 120 s that it would wait for"
        assert made.router.history.counts.classes.by_name["batch"].refused == 1
        [decision] = made.router.history.decisions
        record = decision.record()
        assert (record.service_class, record.status) == ("batch", 503)


async def test_batch_work_that_is_in_time_is_taken() -> None:
    script = Script(frames)
    async with running(script, queued_s=100.0) as made, connect(made.port) as client:
        assert (await client.post(COMPLETIONS, body(), **NIGHTLY)).status == 200
        [decision] = made.router.history.decisions
        record = decision.record()
        assert record.service_class == "batch"
        assert record.behind_s == 120.0
        assert made.router.history.counts.classes.by_name["batch"].answered == 1


async def test_who_waits_already_is_not_refused() -> None:
    """Retries and what has waited for room go on, however late they are."""
    calls = 0

    def first_fails(call: Call) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            made.member("r0").load.reported(Load(queued_prefill_tokens=10**6, prefill_tokens_per_s=SPEED), 0.0)
            made.member("r1").load.reported(Load(queued_prefill_tokens=10**6, prefill_tokens_per_s=SPEED), 0.0)
            call.answer(b'{"error":{}}', 500)
        else:
            frames(call)

    script = Script(first_fails)
    keys = tuple(parse_keys("keys.toml", KEYS))
    async with (
        served(*script.replicas(2, native=True), keys=keys, demand_key=True, policy="cost") as made,
        connect(made.port) as client,
    ):
        assert (await client.post(COMPLETIONS, body(), **NIGHTLY)).status == 200
        assert calls == 2
        chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        assert (await client.post(CHAT, chat, **NIGHTLY)).status == 503


async def test_a_replica_is_told_whose_prompts_will_not_come_again() -> None:
    script, nightly = Script(frames), Tenant("nightly", "m")
    async with running(script, queued_s=1.0) as made, connect(made.port) as client:
        for _ in range(2):  # the second time it has had more than its share
            for key in (CHATS, NIGHTLY):
                assert (await client.post(COMPLETIONS, body(), **key)).status == 200
            made.router.placement.shares.found(nightly, 1000, 0)
            made.router.placement.shares.asked(nightly, 1_000_000, made.router.now_s())
    assert [call.native[0].is_cold for call in script.calls] == [False, False, False, True]
