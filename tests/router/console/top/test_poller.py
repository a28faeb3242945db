"""Polls of a router, the answers kept, and the messages where there are none."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import click
import pytest

from router.console.asking import Client
from router.console.top.poller import DECISIONS, REPLICAS, ROUTER, TIMEOUT_S, Poller, Seen
from tests.router.loopback import Reply, Request, serving, until

GOOD = b'{"usage":{"prompt_tokens_details":{"cached_tokens":16}}}'


class FakeRouter:
    def __init__(self, names: int = 1, **answers: tuple[int, Any]) -> None:
        self.asked: Counter[str] = Counter()
        self.targets: list[str] = []
        self.answers: dict[str, tuple[int, Any]] = {
            "/replicas": (200, {"replicas": [{"name": f"r{number}", "newer": 1} for number in range(names)]}),
            "/decisions": (200, {"decisions": [{"ts": 1.0, "request_id": "x", "newer": 1}]}),
            "/sessions": (200, {"models": {"m": {"sessions": [{"session": "s", "context_tokens": 9, "newer": 1}]}}}),
        } | {f"/{name}": answer for name, answer in answers.items()}

    async def handle(self, request: Request, reply: Reply) -> None:
        self.asked[request.path] += 1
        self.targets.append(f"{request.path}?{request.query.get('limit', '')}")
        await reply.whole(*self.answers[request.path])


@contextmanager
def poller_of(url: str, key: str | None = None, clock: Callable[[], float] = lambda: 0.0) -> Iterator[Poller]:
    with Client(url, key, ROUTER, TIMEOUT_S) as client:
        yield Poller(client, 1.0, clock)


async def polled(poller: Poller) -> Seen:
    return await asyncio.to_thread(poller.poll)


async def looked(router: FakeRouter, times: int = 1) -> Seen:
    async with serving(router.handle) as url:
        with poller_of(url, "root") as poller:
            for _ in range(times):
                await polled(poller)
            return poller.seen


@pytest.mark.parametrize(("replicas", "limit"), [(1, 200), (200, 100), (1000, 20)])
async def test_fewer_decisions_are_asked_for_where_each_has_many_candidates(replicas: int, limit: int) -> None:
    router = FakeRouter(replicas)
    await looked(router)
    assert f"/decisions?{limit}" in router.targets and "/sessions?200" in router.targets


async def test_refusals_are_reported_and_the_rest_is_shown() -> None:
    refusal = (403, {"error": {"message": "not yours"}})
    seen = await looked(FakeRouter(decisions=refusal))
    assert seen.refused == {DECISIONS: "the router says: not yours; see --admin-key or WARMROUTE_ADMIN_KEY"}
    assert seen.replicas and not seen.is_stale


async def test_a_refusal_cannot_take_hold_of_the_terminal() -> None:
    router = FakeRouter()
    router.answers["/replicas"] = (403, {"error": {"message": "\x1b[2Jnot\nyours"}})
    async with serving(router.handle) as url:
        with poller_of(url) as poller, pytest.raises(click.ClickException) as refused:
            await asyncio.to_thread(poller.require)
    assert refused.value.message.startswith("the router says: \\x1b[2Jnot\\nyours; see --admin-key")


async def test_what_is_refused_is_not_asked_for_at_every_look() -> None:
    now_s = 0.0
    router = FakeRouter(decisions=(403, {"error": {"message": "not yours"}}))
    async with serving(router.handle) as url:
        with poller_of(url, clock=lambda: now_s) as poller:
            for at_s in range(15):
                now_s = float(at_s)
                assert DECISIONS in (await polled(poller)).refused
    assert (router.asked["/replicas"], router.asked["/decisions"]) == (15, 2)


async def test_a_key_without_access_to_replicas_makes_the_figures_stale() -> None:
    router = FakeRouter()
    router.answers["/replicas"] = (401, {"error": {"message": "no key"}})
    seen = await looked(router, times=5)
    assert seen.is_stale and "no key" in seen.refused[REPLICAS] and router.asked["/replicas"] == 1


@pytest.mark.parametrize(
    ("path", "answer", "why"),
    [
        ("replicas", (200, b"<html>"), "not a router: /replicas: JSON is malformed"),
        ("replicas", (200, {"replicas": [{"name": 5}]}), "not a router: /replicas: Expected `str`"),
        ("replicas", (502, b""), "status 502 for /replicas"),
    ],
)
async def test_an_invalid_answer_counts_as_absence(path: str, answer: tuple[int, Any], why: str) -> None:
    router = FakeRouter()
    router.answers[f"/{path}"] = answer
    seen = await looked(router)
    assert seen.is_stale and why in (seen.silence or "")


async def test_a_slow_router_is_asked_less_often() -> None:
    router, began = FakeRouter(), []

    async def slow(request: Request, reply: Reply) -> None:
        if request.path == "/replicas":
            began.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.05)
        await router.handle(request, reply)

    async with serving(slow) as url:
        poller = Poller(Client(url), 0.01)
        thread = Thread(target=poller.run)
        thread.start()
        await until(lambda: len(began) == 2, "it is asked again")
        poller.ended.set()
        await asyncio.to_thread(thread.join)
    assert began[1] - began[0] >= 0.05 * 10
