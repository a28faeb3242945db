"""Requests that wait for replicas: their cost, the requests that they delay, and their final answers."""

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import pytest

from router.placement.decision import Decision
from router.proxy.request import Request
from tests.router.loopback import until
from tests.router.scripted import (
    CHAT,
    COMPLETIONS,
    MODEL,
    QUEUE_FULL,
    Call,
    Client,
    Scripted,
    Served,
    chat,
    connect,
    event,
    named,
    says,
    served,
    silent,
)

EMBEDDINGS = "/v1/embeddings"


async def asked(stack: AsyncExitStack, running: Served, count: int, model: str = MODEL, **fields: Any) -> list[Client]:
    clients = [await stack.enter_async_context(connect(running.port)) for _ in range(count)]
    for client in clients:
        client.send("POST", CHAT, chat("hi", **fields) | {"model": model})
    return clients


async def test_a_full_replica_beside_one_for_shorter_prompts_is_not_asked_without_end() -> None:
    full = Scripted("full", says(QUEUE_FULL, 429, retry_after="7"), native=True)
    short = Scripted("short", says(b"{}"), native=True)
    short.control["/load"][1]["max_model_len"] = 4
    async with served(full, short, queue_timeout_s=1.0) as running, AsyncExitStack() as stack:
        answers = await asyncio.gather(*(client.answer() for client in await asked(stack, running, 10)))
        assert {(answer.status, answer.headers["retry-after"]) for answer in answers} == {(429, "7")}
        assert len(full.calls) == 10 and not short.calls


async def test_requests_for_an_absent_model_take_at_most_half_of_the_queue() -> None:
    async def slow(call: Call) -> None:
        await asyncio.sleep(0.1)
        call.answer(b'"live"')

    away, live = Scripted("away", says(b"{}"), models=["away"]), Scripted("live", slow, models=["live"])
    limits: dict[str, Any] = {"replica_limit": 1, "queue_size": 8, "queue_timeout_s": 1.0}
    async with served(away, live, **limits) as running, AsyncExitStack() as stack:
        running.member("away").health.drain()
        crowd = await asked(stack, running, 8, "away")
        await until(
            lambda: running.router.lifecycle.open_requests + sum(running.router.history.counts.refused.values()) >= 8,
            "all came",
        )
        others = await asked(stack, running, 3, "live")
        assert [(await client.answer()).json for client in others] == ["live"] * 3
        assert {(await client.answer()).status for client in crowd} == {503}


async def test_a_prompt_is_made_again_if_the_model_comes_back_with_another_tokenizer() -> None:
    sent: list[list[bytes]] = []

    def takes(call: Call) -> None:
        sent.append(call.native[0].prompts)
        call.answer(b"{}")

    replica = Scripted("a", takes, native=True)
    async with served(replica) as running, connect(running.port) as client:
        member = running.member("a")
        member.health.rests("it begins anew")
        client.send("POST", COMPLETIONS, {"model": MODEL, "prompt": "hello"})
        await until(lambda: len(running.router.waiting) == 1, "the request waits")
        running.router.members.models[MODEL].tokens.go_approximate("it has another tokenizer")
        member.health.undrain()
        member.health.probe_soon(running.router.now_s())
        assert (await client.answer()).status == 200
    assert sent == [[]], "the tokens came from another tokenizer"


async def test_a_replica_for_shorter_prompts_is_no_better_place_for_a_stream() -> None:
    async def speaks(call: Call) -> None:
        call.begin_frames()
        call.frame(event("one "), 5)
        await call.left()

    async with served(
        Scripted("long", speaks, native=True), Scripted("short", says(b"{}", 400), native=True), policy="least-loaded"
    ) as running:
        running.member("short").candidate.max_model_len = 64
        running.member("short").health.drain()
        async with connect(running.port) as client:
            client.send("POST", CHAT, chat("hi", stream=True))
            await client.head()
            await client.chunk()
            running.member("short").health.undrain()
            routing = next(iter(running.router.attempts)).owner
            attempt = next(iter(running.router.attempts))
            assert not routing.may_move(attempt, [running.member("short")])
            running.member("short").candidate.max_model_len = running.member("long").candidate.max_model_len
            assert routing.may_move(attempt, [running.member("short")])
            client.leave()


@pytest.mark.parametrize("limit", [1, 2])
async def test_a_stuck_stream_starts_over_at_a_replica_that_is_at_its_limit(limit: int) -> None:
    calls: list[Call] = []

    async def begins(call: Call) -> None:
        calls.append(call)
        call.begin_frames()
        call.frame(event("one "), 5)
        await call.left()

    async with (
        served(Scripted("a", begins, native=True), replica_limit=limit) as running,
        connect(running.port) as client,
    ):
        server = running.member("a").server
        client.send("POST", CHAT, chat("x", stream=True))
        await client.head()
        await client.chunk()
        attempt = next(iter(running.router.attempts))
        await until(lambda: not attempt.spoken, "the clock has looked")
        running.front.upkeep.suspects.suspect(server, "silent", running.router.now_s())
        # Long ago, however much time a busy machine takes off its silence.
        server.suspicion, server.recovered_s = "", running.router.now_s() - 60
        attempt.touched_s = server.recovered_s - 1
        await until(lambda: len(calls) == 2, "it begins anew")
        client.leave()


async def test_what_is_passed_on_stays_with_the_replicas_of_its_model() -> None:
    busy = Scripted("busy", says(b"slow down", 429, retry_after="17"), models=["x"])
    other = Scripted("other", says(b"{}"), models=["y"])
    async with served(busy, other) as running, connect(running.port) as client:
        before = running.router.retry_budget.left
        answer = await client.post(EMBEDDINGS, {"model": "x", "input": "q"})
        assert (answer.status, answer.headers["retry-after"]) == (429, "17")
        assert running.router.retry_budget.left == before, "no budget is spent without competing requests"


async def test_what_is_passed_on_waits_where_only_replicas_of_other_models_are_better() -> None:
    quiet, other = Scripted("quiet", silent, models=["x"]), Scripted("other", says(b"{}"), models=["y"])
    async with served(quiet, other) as running, connect(running.port) as client:
        client.send("POST", EMBEDDINGS, {"model": "x", "input": "q"})
        await until(lambda: quiet.calls, "the replica is asked")
        attempt = next(iter(running.router.attempts))
        assert not attempt.owner.may_move(attempt, [running.member("other")])
        client.leave()


@pytest.mark.parametrize(("path", "body"), [(EMBEDDINGS, {}), (CHAT, chat("hi"))])
async def test_one_replica_is_tried_even_if_every_breaker_is_open(path: str, body: dict[str, Any]) -> None:
    async with served(named("a"), named("b")) as running, connect(running.port) as client:
        for member in running.router.members:
            for _ in range(running.router.config.breaker_faults):
                member.health.fault("status 500", running.router.now_s())
            assert member.candidate.unavailable is not None and member.candidate.may_try_anyway
        answer = await client.post(path, body)
        assert (answer.status, answer.json in ("a", "b")) == (200, True)


async def test_a_mistake_of_ours_is_not_said_to_be_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only reading its body can fail for how deeply that is nested; a decision that recurses is our fault."""

    def recurses(*_: object, **__: object) -> NoReturn:
        raise RecursionError("maximum recursion depth exceeded")

    async with served(named("a")) as running, connect(running.port) as client:
        monkeypatch.setattr(running.router.placement, "decide", recurses)
        answer = await client.post(CHAT, chat("hi"))
        assert (answer.status, answer.error["code"]) == (500, "internal_error")
        await running.idle()


async def test_any_number_of_replicas_that_cannot_continue_with_it_are_skipped() -> None:
    """More than Python takes calls within each other."""
    passed_over: list[str] = []

    def cannot(request: Request, decision: Decision) -> bool:  # noqa: ARG001
        assert decision.chosen is not None
        passed_over.append(decision.chosen.name)
        return False

    async with served(named("a")) as running, connect(running.port) as client:
        members = running.router.members
        added = [running.router.placement.add(f"x{number}").candidate for number in range(600)]
        known: dict[str, Any] = {"block_size": 0, "native": True, "why_no_events": ""}
        others = {one.name: SimpleNamespace(name=one.name, candidate=one, feed=None, **known) for one in added}
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Request, "send", cannot)
            patched.setattr(members.models[MODEL], "candidates", added)
            with patch.dict(members.by_name, others):
                client.send("POST", CHAT, chat("hi"))
                answer = await client.answer()
        assert answer.status == 503 and "nested" not in answer.error["message"]
        assert len(set(passed_over)) == len(passed_over) == 600
